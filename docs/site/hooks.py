"""The site's start page is README.md, and its reference has the docstring of every name of api.md.

Links to files outside of docs/ lead to `repo_url`; without one they are text. A line `<!-- file: PATH -->` becomes the
file as a block of code.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # that lie in the root
FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")

# griffe reads __all__ without running it; the names of the step ops come from a table.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda record: "sparse_opt.ops.__all__" not in record.getMessage())


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_with_site_links(text, ROOT, "", config.repo_url)))
    reference = _docstrings((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "reference.md", content=reference))
    return files


def _docstrings(api: str) -> str:
    """A page for mkdocstrings with the classes and functions of the tables of api.md."""
    lines, packages, seen = ["# Reference", ""], [], set()
    for line in api.splitlines():
        if line.startswith("## "):
            packages = re.findall(r"`(sparse_opt[.\w]*)`", line)
            lines += [line, ""]
        elif line.startswith("| `"):
            for name in re.findall(r"`(\w+)`", line.split("|")[1]):
                package = next((p for p in packages if name in _exported(p)), None)
                if package and name not in seen:
                    seen.add(name)
                    lines += [f"::: {package}.{name}", ""]
    return "\n".join(lines)


def _exported(package: str) -> set[str]:
    """Names in the `__init__` of a package; none of trainers/, which lies outside of sparse_opt/."""
    file = ROOT / package.replace(".", "/") / "__init__.py"
    return set(re.findall(r'"(\w+)"', file.read_text(encoding="utf-8"))) if file.exists() else set()


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if page.file.generated_by:
        return markdown
    folder = str(PurePosixPath(page.file.src_uri).parent)
    return FILE.sub(_shown, _with_site_links(markdown, ROOT / "docs" / folder, folder, config.repo_url))


def _shown(match: re.Match[str]) -> str:
    return f"```python\n{(ROOT / match[1]).read_text(encoding='utf-8')}```"


def _with_site_links(text: str, folder: Path, site_folder: str, repository: str | None) -> str:
    """`text` of a page in `folder`, whose place is `site_folder` of docs/."""

    def replace(match: re.Match[str]) -> str:
        image, label, path, anchor = match.groups()
        if path.startswith(("http:", "https:")):
            return match[0]
        target = (folder / path).resolve().relative_to(ROOT)
        if target.parts[0] == "docs":
            path = os.path.relpath(Path(*target.parts[1:]), site_folder or ".")
        elif target.as_posix() in PAGES:
            path = os.path.relpath(PAGES[target.as_posix()], site_folder or ".")
        elif repository:
            path = f"{repository.rstrip('/')}/blob/main/{target}"
        else:
            return label
        return f"{image}[{label}]({path}{anchor})"

    return LINK.sub(replace, text)
