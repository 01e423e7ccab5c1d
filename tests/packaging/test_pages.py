"""README.md, CONTRIBUTING.md and docs/: the links, paths, modules, names and make targets on these pages exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
FOLDERS = "sparse_opt|csrc|triton_kernels|trainers|bench|studies|tests|examples|docs"


@pytest.fixture(params=PAGES, ids=lambda path: path.name)
def page(request) -> Path:
    return request.param


def prose_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_paths_exist(page):
    paths = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.*-]*\w)", prose_of(page))
    assert [path for path in paths if not list(ROOT.glob(path))] == []


def test_names_and_modules_exist(page):
    missing = []
    for name in sorted(set(re.findall(r"\bsparse_opt(?:\.[A-Za-z]\w*)+", prose_of(page)))):
        parts = name.split(".")
        found, depth = importlib.import_module("sparse_opt"), 1
        while depth < len(parts):
            if not hasattr(found, parts[depth]):
                try:
                    importlib.import_module(".".join(parts[: depth + 1]))
                except ModuleNotFoundError as error:
                    if not (error.name or "").startswith("sparse_opt"):  # it exists, and imports an optional package
                        depth = len(parts)
                    break
            found, depth = getattr(found, parts[depth]), depth + 1
        if depth < len(parts):
            missing.append(name)
    assert missing == []


def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", prose_of(page), re.MULTILINE)
    assert {first or second for first, second in code} <= targets
