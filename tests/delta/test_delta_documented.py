"""docs/delta_logs.md and docs/sharing.md: their blocks run one after the other, and their commands are understood."""

import copy
import re
import shlex
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparse_opt import DeltaLog, SparseDelta
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
    assert len(blocks) == 4
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for block in blocks:
            exec(compile(block, "docs/delta_logs.md", "exec"), names)
    finally:
        dist.destroy_process_group()
    assert DeltaLog.open("delta_logs_ranks").steps == (0, 1, 2, 3, 4, 5)
    log = DeltaLog.open("delta_logs_m")
    assert log.steps == (0, 1, 2, 3, 4, 5, 6)
    for name, tensor in log.load(3).items():
        assert torch.equal(as_bits(names["state"][name]), as_bits(tensor))


@pytest.mark.parametrize("line", re.findall(r"^sparse-opt delta (.*)$", PAGE, re.MULTILINE))
def test_its_calls_are_understood(line):
    delta._parser().parse_words(shlex.split(line.partition("|")[0]))


SHARING = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text(encoding="utf-8")


def train(opt: torch.optim.Optimizer) -> None:
    model = opt._root()
    for _ in range(3):
        model(torch.randn(2, 32).bfloat16()).square().sum().backward()
        opt.step()
        opt.zero_grad()


def test_the_blocks_run(tmp_path, monkeypatch, recwarn):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).bfloat16()
    base, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[3] += 1
    saved, evaluated = copy.deepcopy(base), []

    def fresh() -> nn.Module:
        return copy.deepcopy(saved)

    names = {"model": model, "base": base, "fresh": fresh, "train": train}
    names |= {"LLM": MagicMock(), "WeightTransferConfig": dict, "prompts": []}  # of vLLM, which is not installed
    names |= {
        "other": SparseDelta.from_models(base, other),
        "evaluate": lambda m: evaluated.append(m[0].weight.clone()),
    }
    for block in re.findall(r"^```python\n(.*?)^```", SHARING, re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert torch.equal(as_bits(evaluated[0]), as_bits(model[0].weight.detach()))
    assert torch.equal(as_bits(base[0].weight.detach()), as_bits(fresh()[0].weight.detach()))
    updates = [call.args[0]["update_info"]["delta"] for call in names["llm"].update_weights.call_args_list]
    assert [next(iter(update.items())) for update in updates] == [
        *(("register", "math"), ("register", "code")),
        *(("switch", "math"), ("switch", None)),
    ]
    assert names["same"].result_digest == names["delta"].result_digest


def test_the_commands_are_understood():
    listed = re.findall(r"^\| `delta (\w+) (.*?)` \|", SHARING, re.MULTILINE)
    assert [name for name, _ in listed] == ["diff", "apply", "show", "merge", "push"]
    calls = re.findall(r"^sparse-opt delta (.*)$", SHARING, re.MULTILINE)
    for words in [f"{name} {rest}" for name, rest in listed] + calls:
        delta._parser().parse_words(shlex.split(words))
