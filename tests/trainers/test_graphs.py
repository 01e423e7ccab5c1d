"""`cuda_graphs`: the runs are those of eager steps with the same padding and layout. Replays need a GPU."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from small_models import small
from torch import Tensor
from transformers import GPT2Config

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.errors import ConfigError
from sparse_opt.trainers import dpo, graphs, sft
from sparse_opt.trainers.graphs import require_graphs
from sparse_opt.trainers.shared_prompts import collate_shared_prompts


def collate_as_for_graphs(*args, separate_rows, **options):
    """On a GPU eager steps attend by `Pieces`, whose sums have other roundings than those of `SeparateRows`."""
    return collate_shared_prompts(*args, separate_rows=True, **options)


class StandIn:
    """`GraphedStep` on a CPU: one set of buffers for the inputs and results of each shape, and no graph."""

    made: ClassVar[list[StandIn]] = []

    def __init__(self, function, optimizer):
        for group in optimizer.param_groups:
            assert isinstance(group["lr"], Tensor) and group["lr"].dtype is torch.float32
        self.function = function
        self.buffers: dict[Any, tuple[list[Tensor], Any]] = {}
        StandIn.made.append(self)

    def __call__(self, *inputs):
        key = tuple(tensor.shape for tensor in inputs)
        if key not in self.buffers:
            buffers = [tensor.clone() for tensor in inputs]
            self.buffers[key] = buffers, self.function(*buffers)
            return self.buffers[key][1]
        buffers, results = self.buffers[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        for name, tensor in self.function(*buffers).items():
            results[name].copy_(tensor)
        return results


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(graphs, "GraphedStep", StandIn)
    for module in (dpo, sft):
        monkeypatch.setattr(module, "require_graphs", lambda *_: None)
    monkeypatch.setattr(StandIn, "made", [])


CONFIGS = {"sft": (sft, sft.SFTConfig), "dpo": (dpo, dpo.DPOConfig)}


@pytest.fixture
def steps_of(tmp_path, model_folder, pairs_file, mask_file):
    """`steps_of("dpo", cuda_graphs=True)`: the rows of a run's metrics without times, and its trained weights."""

    def run(algorithm, **changes):
        module, config_class = CONFIGS[algorithm]
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        options = {"dtype": "fp32", "device": "cpu", "n_steps": 10, "batch_size": 2, "accumulation": 2}
        options |= {"max_length": 64, "learning_rate": 1e-2, "mask": str(mask_file), "pad_to_multiple_of": 4}
        module.train(config_class(str(model_folder), str(pairs_file), folder, **options | changes))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [{k: v for k, v in json.loads(line).items() if not k.endswith("_s")} for line in lines]
        return rows, load_file(folder / "model" / "model.safetensors")

    return run


def assert_same_run(one, two):
    assert one[0] == two[0]
    assert all(torch.equal(one[1][name], tensor) for name, tensor in two[1].items())


RUNS = [
    ("sft", {}),
    ("dpo", {}),
    ("dpo", {"precomputed_reference": True}),
    ("dpo", {"share_prompts": True, "loss_type": "ipo"}),
]


@pytest.mark.parametrize(("algorithm", "changes"), RUNS, ids=str)
def test_runs_with_graphs_are_the_runs_without(on_a_cpu, steps_of, algorithm, changes):
    eager, graphed = (steps_of(algorithm, cuda_graphs=on, **changes) for on in (False, True))
    assert_same_run(graphed, eager)
    (step,) = StandIn.made
    assert 1 < len(step.buffers) < 10


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"compile": True}], ids=str)
@pytest.mark.parametrize(("algorithm", "changes"), RUNS, ids=str)
def test_replays_are_the_steps(steps_of, algorithm, changes, more, deterministic, monkeypatch):
    monkeypatch.setattr(dpo, "collate_shared_prompts", collate_as_for_graphs)
    options = {"n_steps": 16, "device": "cuda", "dtype": "bf16", "pad_to_multiple_of": 16, **changes, **more}
    assert_same_run(*(steps_of(algorithm, cuda_graphs=on, **options) for on in (True, False)))


def test_what_cannot_be_replayed_is_refused(steps_of):
    with pytest.raises(ConfigError, match="'cuda_graphs' is true, and the device is cpu: expected a GPU"):
        steps_of("sft", cuda_graphs=True)
    model = small(GPT2Config)
    adamw, gpu = torch.optim.AdamW(model.parameters()), torch.device("cuda")
    with pytest.raises(ConfigError, match="the optimizer is AdamW: expected a mask"):
        require_graphs(model, adamw, gpu)
    mask = MaskSet.random(model, density=0.1)
    with pytest.raises(ConfigError, match="backend reference reads step counts on the host"):
        require_graphs(model, SparseAdamW(model, mask, backend="reference"), gpu)
    with pytest.raises(ConfigError, match="transformers makes attention masks for models of type gpt2"):
        require_graphs(model, SparseAdamW(small(GPT2Config), mask), gpu)
