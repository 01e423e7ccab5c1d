"""README.md, CONTRIBUTING.md and docs/: the links, paths, modules, names and make targets on these pages exist."""

import ast
import contextlib
import functools
import importlib
import io
import re
import textwrap
from pathlib import Path

import pytest

from sparse_opt.cli.main import main

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


def test_no_line_begins_with_a_measured_value(page):
    """Markdown ends the paragraph before a line that begins with a comment."""
    assert "\n<!-- bench value" not in prose_of(page)


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


@functools.cache
def help_of(words: tuple[str, ...]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return shown.getvalue()


def test_commands_have_their_flags(page):
    unknown = []
    for line in re.findall(r"sparse-opt ((?:[a-z_0-9]+ )+[^`\n#]*--[^`\n#]*)", prose_of(page).replace("\\\n", " ")):
        words = tuple(re.match(r"(?:[a-z_0-9]+ )+", line)[0].split()[:3])
        flags = re.findall(r"(?<!\S)--[a-z]\w+", line) if words[0] != "train" else []  # has those of TRL, too
        unknown += [(line, flag) for flag in flags if flag not in help_of(words)]
    assert unknown == []


def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", prose_of(page), re.MULTILINE)
    assert {first or second for first, second in code} <= targets


FACES = (
    "sparse_opt",
    "sparse_opt.masks",
    "sparse_opt.mask_finding",
    "sparse_opt.optim",
    "sparse_opt.ops",
    "sparse_opt.delta",
    "sparse_opt.distributed",
    "sparse_opt.weight_sync",
    "sparse_opt.weight_sync.transports",
    "sparse_opt.analysis",
    "sparse_opt.integrations",
    "sparse_opt.integrations.vllm",
    "sparse_opt.integrations.verl",
)
# A loop or a recipe is one file, to be read; benchmarks are not part of the library.
MODULES = ("sparse_opt.trainers.", "sparse_opt.bench.")
SOURCES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]


@pytest.mark.parametrize("face", FACES)
def test_every_name_exists_and_is_documented(face):
    if face.endswith(".verl"):
        pytest.importorskip("verl", reason="needs verl: make test-verl")
    package = importlib.import_module(face)
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text(encoding="utf-8")))
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert [name for name in package.__all__ if name not in documented] == []
    with pytest.raises(AttributeError):
        _ = package.no_such_name


def imports_of(code: str) -> list[tuple[str, str]]:
    found = []
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "sparse_opt"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_pages_and_examples_import_from_faces(source):
    text = source.read_text(encoding="utf-8")
    blocks = (
        [text] if source.suffix == ".py" else re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    )
    others = [
        f"from {module} import {name}"
        for block in blocks
        for module, name in imports_of(block)
        if not module.startswith(MODULES)
        and (module not in FACES or (name and name not in importlib.import_module(module).__all__))
    ]
    assert others == []
