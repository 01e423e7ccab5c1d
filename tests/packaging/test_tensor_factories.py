"""The library's tensors name their device, and those of floats their dtype: scripts set torch's defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
FOLDERS = ("sparse_opt", "triton_kernels", "trainers")
# torch's default device does not apply to `Generator`; tensors drawn from it must be on its device.
FACTORIES = {name for name in dir(torch) if any(getattr(torch, name) is f for f in _device_constructors())}
FACTORIES.add("Generator")
# Of integers, or of the dtype of what they are given.
WITHOUT_DTYPE = {"arange", "Generator", "randint", "randperm", "tril_indices", "triu_indices"}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls of `torch.<name>`, and the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node, node.func.attr


def unnamed(source: str) -> list[str]:
    """The calls in a module that leave their device or dtype to torch's defaults."""
    found = []
    for call, name in calls(ast.parse(source)):
        if name not in FACTORIES:
            continue
        given = {keyword.arg for keyword in call.keywords}
        lacks = {"device"} if name in WITHOUT_DTYPE else {"device", "dtype"}
        if missing := sorted(lacks - given):
            found.append(f"{call.lineno}: torch.{name} without {' and '.join(missing)}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_devices_and_dtypes_are_named(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in unnamed(path.read_text())]
    assert not found, "\n".join(found)
