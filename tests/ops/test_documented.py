"""docs/ops.md: every block runs, needs nothing but torch and sparse_opt, and no op or argument is left out."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from sparse_opt import backends, ops

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "ops.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
BLOCKS = [
    pytest.param(block, id=f"{title}-{i}", marks=[pytest.mark.gpu] if '"cuda"' in block else [])
    for title, section in SECTIONS.items()
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block):
    tree = ast.parse(block)
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imports == {"torch", "sparse_opt"}
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    torch._dynamo.reset()
    exec(compile(block, "docs/ops.md", "exec"), {"__name__": "docs_ops"})


def test_the_example_of_adding_an_op():
    (block,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "adding_an_op.md").read_text(), flags=re.M | re.S)
    exec(compile(block, "docs/adding_an_op.md", "exec"), {"__name__": "docs_adding_an_op"})


def test_every_fence_is_one_that_runs():
    assert len(BLOCKS) * 2 == PAGE.count("```")


@pytest.mark.parametrize("op", backends.OPS)
def test_the_arguments_of_every_op_are_in_its_tables(op):
    tables = [line for title in (op, "Lists, segments, slots") for line in SECTIONS[title].splitlines() if "|" in line]
    named = {name for line in tables for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert set(inspect.signature(getattr(ops, op)).parameters) <= named


@pytest.mark.parametrize("op", backends.OPS)
def test_what_is_said_to_be_written_is_what_the_schema_mutates(op):
    arguments = getattr(torch.ops.sparse_opt, op).default._schema.arguments
    mutated = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| [`{op}`]"))
    assert set(re.findall(r"`(\w+)`", row.split("|")[3])) == mutated
    rows = [line.split("|") for line in SECTIONS[op].splitlines() if "**written**" in line]
    assert {name for cells in rows for name in re.findall(r"`(\w+)`", cells[1])} >= mutated
