"""Runs of dpo.train with each of its options, on a CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from stopping import assert_same_run, stop_and_resume
from transformers import AutoModelForCausalLM

from sparse_opt.integrations.trl.margins import step_file
from sparse_opt.trainers import dpo
from sparse_opt.trainers.data.encoding import collate, load_examples
from sparse_opt.trainers.policy.logprobs import completion_logprobs

MODES = ["dense", "sparse", "lora"]


def in_mode(mode, mask_file):
    return {"mode": mode, "mask": mask_file if mode == "sparse" else None}


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory, model_folder):
    """A reference that is not where the policy starts."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    folder = tmp_path_factory.mktemp("reference") / "other"
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_precomputed_reference_gives_the_same_bits_in_the_first_epoch(dpo_options, mask_file, mode):
    # 6 steps of 4 pairs are the 24 pairs; gradients go in two passes, so that a step has two batches.
    config = dpo_options(n_steps=6, batch_size=2, gradient_accumulation_steps=2, **in_mode(mode, mask_file))
    runs = [
        dpo.train(dataclasses.replace(config, reference=kind, output_dir=config.output_dir / kind))
        for kind in ("weights", "precomputed")
    ]
    assert_same_run(*runs)
    assert runs[0]["last"]["loss"] < 0.69


def test_precomputed_reference_in_later_epochs(dpo_options, read_metrics):
    config = dpo_options(n_steps=5, batch_size=12)  # two epochs and a half
    weights, precomputed = (
        read_metrics(dpo.train(dataclasses.replace(config, reference=kind, output_dir=config.output_dir / kind)))
        for kind in ("weights", "precomputed")
    )
    # Other batches have other lengths, and round sums of about 10 log-probabilities of about 6 otherwise. Adam makes a
    # step of the learning rate of any gradient, so that later steps may differ by more than the first of them.
    for row, other in zip(weights, precomputed, strict=True):
        for name in ("loss", "margin", "rewards_chosen"):
            assert row[name] == pytest.approx(other[name], rel=2e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["weights", "precomputed"])
def test_another_model_as_the_reference(dpo_options, other_folder, model_folder, pairs_file, tokenizer, kind):
    summary = dpo.train(dpo_options(n_steps=1, batch_size=24, ref_name=str(other_folder), reference=kind))
    examples, _ = load_examples("preference", str(pairs_file), "train", tokenizer, max_length=64)
    batch = collate([sequence for column in zip(*examples, strict=True) for sequence in column], 0)
    with torch.no_grad():
        policy, reference = (
            completion_logprobs(AutoModelForCausalLM.from_pretrained(folder), batch)
            for folder in (model_folder, other_folder)
        )
    chosen, rejected = (0.1 * (policy - reference)).chunk(2)
    assert chosen.abs().mean() > 0.01
    for name, expected in (("rewards_chosen", chosen), ("rewards_rejected", rejected)):
        assert summary["first"][name] == pytest.approx(expected.mean().item(), abs=10 * 6 * 8 * 2**-23)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("dense", {"ref_name": "other"}),
        ("sparse", {"reference": "precomputed"}),
        ("lora", {"ref_name": "other", "reference": "precomputed"}),
    ],
)
def test_a_resumed_run_is_the_run(dpo_options, mask_file, other_folder, monkeypatch, mode, changes):
    if "ref_name" in changes:
        changes = {**changes, "ref_name": str(other_folder)}
    config = dpo_options(
        n_steps=3, save_steps=1, log_margins=True, loss_type="robust", label_smoothing=0.1, **in_mode(mode, mask_file),
        **changes,
    )  # fmt: skip
    whole = dpo.train(dataclasses.replace(config, output_dir=config.output_dir / "whole"))
    cut = dataclasses.replace(config, output_dir=config.output_dir / "cut")
    resumed = stop_and_resume(monkeypatch, dpo.train, cut, 1)
    assert_same_run(whole, resumed)
    assert [row["step"] for row in margin_rows(cut.output_dir)] == [1, 2, 3]
    assert margin_rows(config.output_dir / "whole") == margin_rows(cut.output_dir)


def margin_rows(output_dir):
    text = (Path(output_dir) / "logs" / "margins" / "margins_log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_evaluation_is_that_of_the_whole_dataset(dpo_options, pairs_file, model_folder, tokenizer):
    config = dpo_options(eval_dataset=str(pairs_file), eval_steps=2, batch_size=5, loss_type="hinge")
    for kind in ("weights", "precomputed"):
        summary = dpo.train(dataclasses.replace(config, reference=kind, output_dir=config.output_dir / kind))
        file = Path(summary["metrics_file"]).with_name("evaluations.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 2, 4]
        assert (rows[0]["eval_loss"], rows[0]["eval_accuracy"], rows[0]["eval_margin"]) == (1.0, 0.0, 0.0)
        examples, _ = load_examples("preference", str(pairs_file), "train", tokenizer, max_length=64)
        batch = collate([sequence for column in zip(*examples, strict=True) for sequence in column], 0)
        with torch.no_grad():
            policy, reference = (
                completion_logprobs(AutoModelForCausalLM.from_pretrained(folder), batch)
                for folder in (summary["checkpoint"], model_folder)
            )
        chosen, rejected = (0.1 * (policy - reference)).chunk(2)
        margins = chosen - rejected
        rounding = 10 * 6 * 8 * 2**-23
        assert rows[-1]["eval_margin"] == pytest.approx(margins.mean().item(), abs=rounding)
        assert rows[-1]["eval_loss"] == pytest.approx(torch.relu(1 - margins).mean().item(), abs=rounding)
        assert rows[-1]["eval_accuracy"] == pytest.approx((margins > 0).float().mean().item())
        assert rows[-1]["eval_margin"] > 0.01


def test_margins_are_those_of_the_steps(dpo_options, read_metrics):
    summary = dpo.train(dpo_options(log_margins=True, n_steps=5, batch_size=4, gradient_accumulation_steps=2))
    folder = Path(summary["metrics_file"]).parent / "logs" / "margins"
    rows = margin_rows(folder.parent.parent)
    assert [(row["step"], row["epoch"], row["n"]) for row in rows] == [
        (1, 0, 8), (2, 0, 8), (3, 0, 8), (4, 1, 8), (5, 1, 8),
    ]  # fmt: skip
    for row, metrics in zip(rows, read_metrics(summary), strict=True):
        values = np.load(step_file(folder, row["epoch"], row["step"]))
        assert values.dtype == np.float32 and values.shape == (8,)
        assert row["mean"] == pytest.approx(metrics["margin"], abs=1e-6)
        assert row["share_positive"] == pytest.approx(metrics["accuracy"])
        assert (row["min"], row["max"]) == (values.min(), values.max())
        assert row["std"] == pytest.approx(values.astype(np.float64).std())
    assert (folder / "epoch_001" / "step_00004.npy").is_file()


def test_samples_are_written(dpo_options):
    summary = dpo.train(dpo_options(sample_steps=3))
    file = Path(summary["metrics_file"]).with_name("samples.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 4 + [3] * 4 + [4] * 4
    for row in rows:
        assert row["prompt"].startswith("<s>What is") and row["data"].startswith(" It is") and row["completion"]
