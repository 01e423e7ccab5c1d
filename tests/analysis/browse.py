"""Opens a local page in Qt's Chromium, off screen, and prints the result as JSON. Run in a process of its own.

    python browse.py PAGE.html [PICTURE.png]

Prints the requests that the page made, the messages on its console, and what its document holds once all images are
decoded. With PICTURE, writes what the window shows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["QT_QPA_PLATFORM"] = "offscreen"
# No GPU is needed to lay out a page; a container's root user has no sandbox.
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu --no-sandbox"

import shiboken6
from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

LIMIT_MS = 60_000
QUESTION = """JSON.stringify({
  ready: document.readyState === "complete" && [...document.images].every(i => i.complete),
  title: document.title,
  headings: [...document.querySelectorAll("h2")].map(h => h.innerText),
  images: [...document.images].map(i => [i.alt, i.naturalWidth, i.clientWidth]),
  tables: [...document.querySelectorAll("table")].map(t => [t.caption.innerText, t.tBodies[0].rows.length]),
  closed: document.querySelectorAll("details:not([open])").length,
  cells: [...document.querySelectorAll("td")].map(c => c.textContent),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
})"""


class Requests(QWebEngineUrlRequestInterceptor):
    """Records every requested address."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def interceptRequest(self, info):
        self.seen.append(info.requestUrl().toString()[:500])


class Page(QWebEnginePage):
    """Keeps what the console says."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.messages: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.messages.append(message)


def main(page_file: str, picture: str | None = None) -> int:
    app = QApplication(["browse"])
    profile = QWebEngineProfile()
    requests = Requests()
    profile.setUrlRequestInterceptor(requests)
    page = Page(profile)
    view = QWebEngineView()
    view.setPage(page)
    view.resize(1300, 2400)
    view.show()

    def ask() -> None:
        page.runJavaScript(QUESTION, answered)

    def answered(text: str) -> None:
        found = json.loads(text)
        if not found.pop("ready"):
            QTimer.singleShot(100, ask)
            return
        print(json.dumps({"requests": requests.seen, "console": page.messages, **found}))
        if picture is None:
            app.exit(0)
        else:
            QTimer.singleShot(1000, lambda: app.exit(0 if view.grab().save(picture) else 1))

    page.loadFinished.connect(lambda ok: ask() if ok else app.exit(1))
    page.load(QUrl.fromLocalFile(str(Path(page_file).resolve())))
    QTimer.singleShot(LIMIT_MS, lambda: app.exit(3))
    code = app.exec()
    view.setPage(None)
    shiboken6.delete(page)  # before its profile
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
