"""Runs of sft.train with packing and evaluation, on a CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stopping import assert_same_run, stop_and_resume
from transformers import AutoModelForCausalLM, BloomConfig

from sparse_opt.errors import ConfigError
from sparse_opt.masks import MaskSet
from sparse_opt.trainers import sft
from sparse_opt.trainers.data.encoding import collate, load_examples
from sparse_opt.trainers.policy.logprobs import completion_logprobs
from sparse_opt.trainers.policy.pretrained import parameter_shapes


@pytest.fixture
def options(tmp_path, model_folder, pairs_file):
    """`options("folder", n_steps=3)`: an SFTConfig of a small run."""

    def make(folder, **changes):
        return sft.SFTConfig(
            **{
                "policy_name": str(model_folder),
                "dataset": str(pairs_file),
                "output_dir": tmp_path / folder,
                "dtype": "fp32",
                "device": "cpu",
                "n_steps": 4,
                "batch_size": 24,
                "max_length": 64,
                "learning_rate": 1e-3,
                "seed": 5,
                "sample_steps": None,
                **changes,
            }
        )

    return make


def test_packed_steps_over_the_whole_data_are_the_unpacked_ones(options, read_metrics):
    """24 examples in batches of all of them: the same tokens in the same step, packed or not, in one pass or in two."""
    plain = read_metrics(sft.train(options("plain")))
    summary = sft.train(options("packed", packing=True, batch_size=1))
    n_rows = summary["data"]["n_packed_rows"]
    assert summary["data"]["n_examples"] == 24 and 1 < n_rows < 12
    for name, batch_size, passes in (("one", n_rows, 1), ("several", 1, n_rows)):
        config = options(name, packing=True, batch_size=batch_size, gradient_accumulation_steps=passes)
        packed = read_metrics(sft.train(config))
        for row, other in zip(packed, plain, strict=True):
            assert row["n_tokens"] == other["n_tokens"]
            # The same sums in another order, as for accumulation: see test_runs.
            assert row["loss"] == pytest.approx(other["loss"], rel=2e-4)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)
    assert packed[-1]["loss"] < packed[0]["loss"] - 0.1
    assert 0 <= packed[0]["padding"] < 0.1


def test_steps_without_padding_are_the_padded_ones(options, read_metrics, pairs_file):
    common = {"batch_size": 5, "gradient_accumulation_steps": 2, "eval_dataset": str(pairs_file), "eval_steps": 2}
    plain, free = (sft.train(options(str(on), **common, padding_free=on)) for on in (False, True))
    for row, other in zip(read_metrics(free), read_metrics(plain), strict=True):
        assert row["n_tokens"] == other["n_tokens"]
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-4)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)
        assert row["padding"] <= other["padding"]
    assert free["last_evaluation"]["eval_loss"] == pytest.approx(plain["last_evaluation"]["eval_loss"], rel=2e-4)
    with pytest.raises(ConfigError, match="'packing' and 'padding_free' are true"):
        options("both", packing=True, padding_free=True)


def test_grouped_steps_have_less_padding(options, read_metrics):
    plain, grouped = (
        read_metrics(sft.train(options(str(on), batch_size=4, n_steps=6, group_by_length=on))) for on in (False, True)
    )
    assert sum(row["padding"] for row in grouped) < 0.7 * sum(row["padding"] for row in plain)
    assert sum(row["n_tokens"] for row in grouped) == sum(row["n_tokens"] for row in plain)  # one epoch


def test_warm_up_by_share_and_torchs_default_adamw(options, read_metrics):
    rows = read_metrics(sft.train(options("a", n_steps=5, warmup_ratio=0.3, lr_schedule="cosine", optim="adamw_torch")))
    rates = [row["learning_rate"] for row in rows]
    assert rates[0] == 0.0 and rates[2] == max(rates) == pytest.approx(1e-3)  # two steps of five
    fused = read_metrics(sft.train(options("b", n_steps=5, warmup_steps=2, lr_schedule="cosine")))
    assert [row["learning_rate"] for row in fused] == rates
    assert [row["loss"] for row in fused] == pytest.approx([row["loss"] for row in rows], rel=1e-5)


def weights_of(summary):
    return load_file(Path(summary["checkpoint"]) / "model.safetensors")


def test_sgd_on_all_weights_and_under_a_mask_of_all(options, model_folder, tmp_path, read_metrics):
    shapes = {name: torch.ones(shape, dtype=torch.bool) for name, shape in parameter_shapes(model_folder).items()}
    mask = MaskSet.from_bool(shapes).save(tmp_path / "all.safetensors")
    dense, sparse = (
        sft.train(options(name, optim="sgd", learning_rate=0.5, mask=mask, n_steps=2))
        for name, mask in (("dense", None), ("sparse", mask))
    )
    assert dense["optimizer_bytes"]["state"] == sparse["optimizer_bytes"]["state"] == 0
    first, second, start = weights_of(dense), weights_of(sparse), load_file(Path(model_folder) / "model.safetensors")
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-5, atol=1e-6)
    # Clipped to 1 at a rate of 0.5 and without moments, one step moves all weights together by at most 0.5.
    moved = sum(float((weight - start[name]).square().sum()) for name, weight in first.items()) ** 0.5
    assert min(row["grad_norm"] for row in read_metrics(dense)) > 1 and 0.3 < moved <= 1.0


@pytest.mark.parametrize("adapter", ["shira", "supertuning"])
def test_sparse_adapters_change_as_many_values_as_their_rank_has(options, model_folder, adapter):
    if adapter == "supertuning" and not hasattr(pytest.importorskip("peft"), "SupertuningConfig"):
        pytest.skip("this peft has no Super-Tuning")
    summary = sft.train(options("a", mode="lora", adapter=adapter, lora_rank=2, n_steps=2))
    after, start = weights_of(summary), load_file(Path(model_folder) / "model.safetensors")
    n_changed, n_values = 0, 0
    for name, weight in after.items():
        changed = int((weight != start[name]).sum())
        adapted = weight.dim() == 2 and "layers" in name
        assert changed > 0 if adapted else changed == 0
        # SHiRA has as many values in each weight as LoRA, Super-Tuning in all together.
        assert adapter == "supertuning" or changed <= 2 * sum(weight.shape)
        n_changed, n_values = n_changed + changed, n_values + adapted * 2 * sum(weight.shape)
    assert n_changed <= n_values
    with pytest.raises(ConfigError, match=f"option 'adapter' is {adapter} with mode dense"):
        options("b", adapter=adapter)


@pytest.mark.parametrize("packing", [False, True])
def test_evaluation_is_the_loss_per_token_of_the_whole_dataset(options, pairs_file, model_folder, tokenizer, packing):
    config = options(
        "run", packing=packing, eval_dataset=str(pairs_file), eval_steps=3, batch_size=2, eval_subset_size=23
    )
    summary = sft.train(config)
    file = Path(summary["metrics_file"]).with_name("evaluations.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 3, 4]
    examples, _ = load_examples(
        "demonstration", str(pairs_file), "train", tokenizer, max_length=64, subset_size=23, seed=5
    )
    batch = collate([sequence for (sequence,) in examples], 0)
    for row, folder in ((rows[0], model_folder), (rows[-1], summary["checkpoint"])):
        with torch.no_grad():
            logprobs = completion_logprobs(AutoModelForCausalLM.from_pretrained(folder), batch)
        assert row["eval_loss"] == pytest.approx(-logprobs.sum().item() / batch.n_trained, rel=1e-5)
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"] - 0.01


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_a_resumed_packed_run_is_the_run(options, mask_file, monkeypatch, mode):
    changes = {"mode": mode, "mask": mask_file if mode == "sparse" else None}
    configs = [
        options(folder, packing=True, batch_size=2, n_steps=3, save_steps=1, **changes) for folder in ("whole", "cut")
    ]
    whole = sft.train(configs[0])
    assert_same_run(whole, stop_and_resume(monkeypatch, sft.train, configs[1], 1))
    assert whole["last"]["loss"] < whole["first"]["loss"]


def test_a_model_that_mixes_packed_sequences_is_refused(options, tokenizer, tmp_path):
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    plain = options("plain", policy_name=str(tmp_path / "bloom"), n_steps=1)
    assert sft.train(plain)["n_steps"] == 1
    packed = dataclasses.replace(plain, packing=True, output_dir=tmp_path / "packed")
    with pytest.raises(ConfigError, match="'packing': in BloomForCausalLM a packed sequence depends on the one before"):
        sft.train(packed)
    assert not (tmp_path / "packed").exists()


def test_other_loops_that_end_in_sft_have_their_own_name(options, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = sft.train(options("unused", output_dir=None, n_steps=1, sample_steps=1), "rft")
    assert summary["algorithm"] == "rft"
    folder = tmp_path / "checkpoints_tiny_llama_rft"
    assert Path(summary["checkpoint"]) == folder.relative_to(tmp_path) / "final"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4 and all(row["data"].startswith(" It is") for row in samples)
