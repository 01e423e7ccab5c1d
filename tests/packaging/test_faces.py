"""What users import is in the `__all__` of a package and on docs/api.md; pages and examples import nothing else."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
