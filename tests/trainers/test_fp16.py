"""Runs with dtype fp16: fp32 weights under fp16 autocast, with loss scaling that is part of checkpoints."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from launch import launch
from stopping import assert_same_run, rows, stop_and_resume
from transformers import AutoModelForCausalLM

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.policy.dense.adamw import DenseAdamW
from sparse_opt.trainers.ranks import ONE_RANK, Ranks
from sparse_opt.trainers.run import loss_scaling
from sparse_opt.trainers.run.loss_scaling import LossScaling
from sparse_opt.trainers.run.training_run import TrainingRun


@pytest.fixture
def modes(mask_file):
    return {"dense": {}, "sparse": {"mask": mask_file}, "lora": {"mode": "lora"}}


@pytest.fixture
def init_scale(monkeypatch):
    """Set the first scale of runs."""

    def set_to(scale):
        scaler = torch.amp.GradScaler
        monkeypatch.setattr(loss_scaling.torch.amp, "GradScaler", lambda *a, **k: scaler(*a, init_scale=scale, **k))

    return set_to


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_a_run_is_the_fp32_run_within_fp16_rounding(dpo_options, modes, read_metrics, tmp_path, mode):
    runs = {
        dtype: dpo.train(dpo_options(dtype=dtype, output_dir=tmp_path / dtype, **modes[mode]))
        for dtype in ("fp32", "fp16")
    }
    half, single = (read_metrics(runs[dtype]) for dtype in ("fp16", "fp32"))
    assert half[0]["loss_scale"] == 2.0**16 and "loss_scale" not in single[0]
    assert not any(row["step_skipped"] for row in half)
    for row, other in zip(half, single, strict=True):
        # Log-probabilities of some 10 tokens of up to 10 each, of logits rounded to 2^-11.
        assert row["loss"] == pytest.approx(other["loss"], abs=0.02)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.02)
    assert [row["loss"] for row in half] != [row["loss"] for row in single]
    weights = AutoModelForCausalLM.from_pretrained(runs["fp16"]["checkpoint"], dtype="auto").state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("mode", "optim"),
    [(mode, "adamw_torch_fused") for mode in ("dense", "sparse", "lora")] + [("dense", "adamw_torch")],
)
def test_steps_that_overflow_are_skipped(dpo_options, modes, read_metrics, init_scale, tmp_path, mode, optim):
    init_scale(2.0**40)
    config = dpo_options(dtype="fp16", n_steps=34, optim=optim, lr_schedule="constant", **modes[mode])
    found = read_metrics(dpo.train(config))
    n_skipped = sum(row["step_skipped"] for row in found)
    assert 0 < n_skipped < 33
    for row, following in itertools.pairwise(found):
        assert (row["grad_norm"] is None) == (row["step_skipped"] == 1.0)
        assert following["loss_scale"] == row["loss_scale"] / (1 + row["step_skipped"])
    first = [row for row in found if row["step_skipped"]]
    assert all(abs(row["loss"] - 0.6931) < 1e-3 for row in first)  # no weight has changed
    assert found[-1]["loss"] < 0.69


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(monkeypatch, dpo_options, modes, init_scale, tmp_path, mode):
    init_scale(2.0**40)
    config = dpo_options(dtype="fp16", n_steps=5, save_steps=2, **modes[mode])
    whole = dpo.train(dataclasses.replace(config, output_dir=tmp_path / "whole"))
    resumed = stop_and_resume(monkeypatch, dpo.train, config, 2)
    assert resumed["last"]["loss_scale"] < 2.0**40  # the steps before had halved it
    assert_same_run(whole, resumed)


def test_two_optimizers_share_a_scale():
    """One of two optimizers overflows: it alone is skipped, and the scale is halved for both."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
    optimizers = [DenseAdamW([weight], **options) for weight in weights]
    scaling = LossScaling(torch.device("cpu"), enabled=True)
    scaling.scaled(weights[0].sum() + weights[1].sum() * 1e35).backward()
    scaling.step(*optimizers)
    assert torch.allclose(weights[0], torch.full((3,), 0.9)) and torch.equal(weights[1], torch.ones(3))
    assert optimizers[0].grad_norm == pytest.approx(3**0.5)
    assert scaling.skipped and scaling.scale == 2.0**16 and scaling.state_dict()["scale"] == 2.0**15
    assert weights[0].grad is None and weights[1].grad is None


def train_each(rank, configs):
    """(loss scale, whether the step was skipped, loss) of each step of each run; the first ones overflow."""
    scaler = torch.amp.GradScaler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", lambda *a, **k: scaler(*a, init_scale=2.0**20, **k))
        files = [dpo.train(config)["metrics_file"] for config in configs]
    return [[(row["loss_scale"], row["step_skipped"], row["loss"]) for row in rows(file)] for file in files]


def test_two_processes_skip_the_same_steps(dpo_options, modes, tmp_path):
    def configs(folder):
        return [
            dpo_options(dtype="fp16", n_steps=8, output_dir=tmp_path / folder / mode, **modes[mode])
            for mode in ("dense", "sparse")
        ]

    expected = train_each(0, configs("one"))
    found, other = launch(train_each, 2, configs("two"))
    assert found == other
    for ours, theirs in zip(found, expected, strict=True):
        n_ours, n_theirs = (sum(skipped for _, skipped, _ in steps) for steps in (ours, theirs))
        # A rank's loss is twice its part of the sum, so that fp16 overflows at half the scale at the latest.
        assert 0 < n_theirs <= n_ours <= n_theirs + 1 < 8
        assert ours[0][2] == pytest.approx(theirs[0][2], abs=1e-3)
        assert ours[-1][2] < ours[0][2] - 1e-3


def overflow_on_rank_1(rank, configs):
    """The loss scale after each step of runs whose second backward pass overflows on rank 1 alone."""
    make_scaler, backward, log = torch.amp.GradScaler, TrainingRun.backward, TrainingRun.log
    scalers, scales = [], []

    def scaler(*args, **options):
        scalers.append(make_scaler(*args, init_scale=2.0**10, **options))
        return scalers[-1]

    def overflowing(run, loss, is_last):
        overflows = len(scales) % 4 == 1 and rank == 1
        backward(run, loss * float("inf") if overflows else loss, is_last)

    def checked(run, *args, **metrics):
        log(run, *args, **metrics)
        run.optimizer.check_ranks()
        scales.append(scalers[-1].get_scale())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", scaler)
        patch.setattr(TrainingRun, "backward", overflowing)
        patch.setattr(TrainingRun, "log", checked)
        for config in configs:
            dpo.train(config)
    return scales


def test_an_overflow_on_one_rank_skips_the_step_of_sparse_runs_on_all(dpo_options, modes, tmp_path):
    configs = [
        dpo_options(dtype="fp16", parallel=parallel, n_steps=4, output_dir=tmp_path / parallel, **modes["sparse"])
        for parallel in ("fsdp", "replicate")
    ]
    assert launch(overflow_on_rank_1, 2, configs) == [2 * [1024.0, 512.0, 512.0, 512.0]] * 2
    sharded, whole = (rows(config.output_dir / "metrics.jsonl") for config in configs)
    assert [row["step_skipped"] for row in sharded] == [0.0, 1.0, 0.0, 0.0]
    # The sums of two ranks' gradients have the same bits in both, and all other arithmetic is the same.
    assert [row["loss"] for row in sharded] == [row["loss"] for row in whole]
    assert sharded[-1]["loss"] < sharded[0]["loss"] - 1e-3


def test_with_fsdp_mode_dense_is_refused(dpo_options, monkeypatch, tmp_path):
    monkeypatch.setattr(Ranks, "of", lambda *options: dataclasses.replace(ONE_RANK, sharded=True))
    with pytest.raises(ConfigError, match="'dtype' is fp16 with parallel fsdp and mode dense.*expected mode sparse"):
        dpo.train(dpo_options(dtype="fp16"))
    assert not (tmp_path / "run").exists()
