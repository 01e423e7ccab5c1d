"""docs/delta_logs.md: its blocks run, one after the other, and its calls are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from sparse_opt import DeltaLog
from sparse_opt.cli import delta
from sparse_opt.tensors import as_bits

PAGE = (Path(__file__).parents[2] / "docs" / "delta_logs.md").read_text(encoding="utf-8")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def train_one_step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] += 1


def test_the_code_runs_in_its_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model": Model(), "train_one_step": train_one_step}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "docs/delta_logs.md", "exec"), names)
    log = DeltaLog.open("delta_logs_m")
    assert log.steps == (0, 1, 2, 3, 4, 5, 6)
    for name, tensor in log.load(3).items():
        assert torch.equal(as_bits(names["state"][name]), as_bits(tensor))


@pytest.mark.parametrize("line", re.findall(r"^sparse-opt delta (.*)$", PAGE, re.MULTILINE))
def test_its_calls_are_understood(line):
    delta._parser().parse_words(shlex.split(line.partition("|")[0]))
