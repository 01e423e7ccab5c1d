"""`cuda_graphs`: the runs are those of eager steps with the same padding. The replays themselves need a GPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from stopping import assert_same_run, rows, stop_and_resume
from torch import Tensor

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import dpo, sft
from sparse_opt.trainers.data.encoding import TokenSequence, collate, collate_examples
from sparse_opt.trainers.data.shared_prompts import collate_shared_prompts
from sparse_opt.trainers.policy.branch_attention import Pieces, SeparateRows
from sparse_opt.trainers.run import graphs, training_run


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
        for result, tensor in zip(results, self.function(*buffers), strict=True):
            result.copy_(tensor)
        return results


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(graphs, "GraphedStep", StandIn)
    monkeypatch.setattr(training_run, "require_graphs", lambda *_: None)
    monkeypatch.setattr(StandIn, "made", [])


@pytest.fixture
def sft_options(tmp_path, model_folder, pairs_file, mask_file):
    def make(folder, **changes):
        return sft.SFTConfig(
            **{
                "policy_name": str(model_folder),
                "dataset": str(pairs_file),
                "mask": mask_file,
                "output_dir": tmp_path / folder,
                "dtype": "fp32",
                "device": "cpu",
                "n_steps": 6,
                "batch_size": 3,
                "gradient_accumulation_steps": 2,
                "max_length": 64,
                "learning_rate": 1e-2,
                "warmup_steps": 2,
                "sample_steps": None,
                "pad_to_multiple_of": 8,
                **changes,
            }
        )

    return make


def assert_same_steps(one, two):
    for row, other in zip(*(rows(summary["metrics_file"]) for summary in (one, two)), strict=True):
        names = [name for name in other if "memory" not in name and "utilization" not in name]
        assert [row[name] for name in names] == [other[name] for name in names]
    first, second = (load_file(f"{summary['checkpoint']}/model.safetensors") for summary in (one, two))
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_batches_are_padded_to_a_multiple():
    sequences = [TokenSequence([5, 6, 7, 8, 9, 10, 11, 12, 13], 6), TokenSequence([5, 6, 7], 5)]
    plain, padded = collate(sequences, 0), collate(sequences, 0, 4)
    assert (plain.input_ids.shape, plain.first_trained) == ((2, 9), 5)
    assert (padded.input_ids.shape, padded.first_trained) == ((2, 12), 4)
    for name in ("input_ids", "attention_mask", "completion_mask"):
        assert torch.equal(getattr(padded, name)[:, :9], getattr(plain, name))
        assert not getattr(padded, name)[:, 9:].any()
    assert (padded.n_tokens, padded.n_trained) == (plain.n_tokens, plain.n_trained)
    assert collate(sequences, 0, 16).first_trained == 1  # position 0 has no token before it
    assert collate([], 0, 8).input_ids.shape == (0, 8)


def test_padding_does_not_change_a_run(sft_options, read_metrics):
    rows = [read_metrics(sft.train(sft_options(str(n), pad_to_multiple_of=n))) for n in (None, 8, 64)]
    for row, *others in zip(*rows, strict=True):
        for other in others:
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert row["n_tokens"] == other["n_tokens"] and row["padding"] < other["padding"]


def test_sft_with_graphs_is_sft(on_a_cpu, sft_options):
    options = {"pad_to_multiple_of": 4, "n_steps": 12}
    eager, graphed = (sft.train(sft_options(str(on), cuda_graphs=on, **options)) for on in (False, True))
    assert_same_steps(graphed, eager)
    assert {name for name in graphed["median"] if name not in eager["median"]} == {"whole_step_time_s"}
    assert {"forward_backward_time_s", "optimizer_time_s"} <= set(eager["median"]) - set(graphed["median"])
    (step,) = StandIn.made
    assert 1 < len(step.buffers) < 12


@pytest.mark.parametrize("share", [False, True])
def test_a_batch_is_taken_apart_and_put_together(share):
    pairs = [[TokenSequence([5, 6, 7, 8, *own], 4) for own in ([9, 10], [11])], [TokenSequence([5, 12], 1)] * 2]
    batch = collate_shared_prompts(pairs, 0, 4, separate_rows=True) if share else collate_examples(pairs, 0, 4)
    found = graphs._batch(*graphs._tensors(batch))
    for field in dataclasses.fields(batch):
        one, other = (getattr(each, field.name) for each in (found, batch))
        if field.name in ("n_tokens", "n_trained"):
            assert one == 0 < other
        elif field.name == "branch_layout" and share:
            assert type(one) is type(other) is SeparateRows
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        else:
            assert torch.equal(one, other) if isinstance(other, Tensor) else one == other, field.name


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"compile": True}], ids=str)
def test_sft_replays_are_its_steps(sft_options, changes, deterministic):
    options = {"pad_to_multiple_of": 8, "n_steps": 16, "device": "cuda", "dtype": "bf16", **changes}
    eager, graphed = (sft.train(sft_options(str(on), cuda_graphs=on, **options)) for on in (False, True))
    assert_same_steps(graphed, eager)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reference": "precomputed"},
        {"loss_type": "ipo", "ipo_average": True},
        {"eval_ratio": 0.2, "eval_steps": 4},
        {"share_prompts": True},
        {"share_prompts": True, "reference": "precomputed", "loss_type": "ipo", "ipo_average": True},
    ],
    ids=str,
)
def test_dpo_with_graphs_is_dpo(on_a_cpu, dpo_options, mask_file, tmp_path, changes):
    options = {"mask": mask_file, "n_steps": 10, "batch_size": 2, "gradient_accumulation_steps": 2, **changes}
    options |= {"pad_to_multiple_of": 4, "log_margins": True}
    eager, graphed = (
        dpo.train(dpo_options(output_dir=tmp_path / str(on), cuda_graphs=on, **options)) for on in (False, True)
    )
    assert_same_steps(graphed, eager)
    (step,) = StandIn.made
    assert 1 < len(step.buffers) < 10
    margins = [sorted(path for path in (tmp_path / str(on) / "logs").rglob("*.npy")) for on in (False, True)]
    assert margins[0] and [a.read_bytes() for a in margins[0]] == [b.read_bytes() for b in margins[1]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reference": "precomputed"},
        {"gradient_checkpointing": True},
        {"share_prompts": True},
        {"share_prompts": True, "compile": True},
    ],
    ids=str,
)
def test_dpo_replays_are_its_steps(dpo_options, mask_file, tmp_path, changes, deterministic):
    options = {"mask": mask_file, "n_steps": 16, "device": "cuda", "dtype": "bf16", "pad_to_multiple_of": 8, **changes}
    eager, graphed = (
        dpo.train(dpo_options(output_dir=tmp_path / str(on), cuda_graphs=on, **options)) for on in (False, True)
    )
    assert_same_steps(graphed, eager)


@pytest.mark.parametrize(
    ("changes", "separate"),
    [({}, False), ({"pad_to_multiple_of": 1}, True), ({"cuda_graphs": True, "pad_to_multiple_of": 1}, True)],
    ids=str,
)
def test_shared_rows_of_few_shapes_are_separate(
    on_a_cpu, dpo_options, tmp_path, mask_file, monkeypatch, changes, separate
):
    """Also without padding, and of pairs whose layout would be pieces: graphs cannot take these."""
    rows = [{"prompt": "a b c d e f g h " * 6, "chosen": "i", "rejected": "j"}]
    dataset = tmp_path / "long_prompts.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    layouts, collate_rows = set(), dpo.collate_shared_prompts

    def recorded(*groups, **options):
        batch = collate_rows(*groups, **options)
        layouts.add(type(batch.branch_layout))
        return batch

    monkeypatch.setattr(dpo, "collate_shared_prompts", recorded)
    options = {"mask": mask_file, "share_prompts": True, "n_steps": 2, "batch_size": 2, "max_length": 256}
    dpo.train(dpo_options(dataset=str(dataset), **options, **changes))
    assert layouts == {SeparateRows if separate else Pieces}


def test_a_resumed_run_with_graphs_is_the_run(on_a_cpu, sft_options, monkeypatch):
    whole = sft.train(sft_options("whole", cuda_graphs=True))
    config = sft_options("part", cuda_graphs=True, save_steps=2)
    assert_same_run(stop_and_resume(monkeypatch, sft.train, config, 3), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": None}, "option 'cuda_graphs' is true, and mode is dense: expected mode sparse"),
        ({"dtype": "fp16"}, "'cuda_graphs' is true, and dtype is fp16"),
        ({"packing": True}, "option 'packing' is true, and cuda_graphs or pad_to_multiple_of pads"),
        ({"packing": True, "pad_to_multiple_of": 1}, "option 'packing' is true, and cuda_graphs or pad_to_multiple_of"),
        ({"padding_free": True}, "option 'padding_free' is true, and cuda_graphs or pad_to_multiple_of pads"),
        ({}, "option 'cuda_graphs' is true, and the device is cpu: expected a GPU"),
    ],
)
def test_runs_without_graphs_are_refused(sft_options, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        sft.train(sft_options("refused", cuda_graphs=True, **changes))
    assert not (tmp_path / "refused").exists()
