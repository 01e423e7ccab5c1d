"""docs/optimizer.md and README.md: the examples run, and the page has every argument and public method."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from sparse_opt.optim import OPTIMIZERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "optimizer.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


BLOCKS = [
    pytest.param(block, id=section.split("\n", 1)[0], marks=[pytest.mark.gpu] if '"cuda"' in block else [])
    for section in SECTIONS
    for block in blocks_of(section)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example(block):
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(block)))
    torch.manual_seed(0)
    exec(compile(block, "docs/optimizer.md", "exec"), {"__name__": "docs_optimizer"})


def test_every_fence_is_an_example():
    assert len(BLOCKS) * 2 == PAGE.count("```")


def test_the_readmes_loop(capsys):
    names = {"__name__": "readme"}
    exec(compile(blocks_of(README)[1], "README.md", "exec"), names)
    assert names["optimizer"].mask.nnz > 0
    assert capsys.readouterr().out.startswith("tensor(")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_tables_have_every_argument_and_its_default(optimizer):
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE, flags=re.MULTILINE)
    parameters = list(inspect.signature(optimizer).parameters.values())
    assert {p.name for p in parameters} <= {name for name, _ in rows}
    for parameter in parameters:
        default = "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        assert (parameter.name, default) in rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_public_method_is_on_the_page(optimizer):
    own = {name for name in dir(optimizer) if not name.startswith("_")} - set(dir(torch.optim.Optimizer))
    assert {name for name in own if not re.search(rf"\b{name}\b", PAGE)} == set()
