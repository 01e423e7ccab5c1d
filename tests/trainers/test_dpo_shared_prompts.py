"""Runs of dpo.train with `share_prompts` against the same runs with separate rows, on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from stopping import assert_same_run, rows, stop_and_resume
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from sparse_opt.cli.main import main
from sparse_opt.errors import ConfigError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers import dpo

EPS = 2**-23
# Differences of sums of some 12 log-probabilities of up to 10, of a few roundings each, times beta 0.1.
ROUNDING = 4 * 12 * 10 * 8 * EPS
CASES = {
    "dense": {},
    "sparse": {"mode": "sparse"},
    "tiles": {"mode": "sparse", "mask": "tiles"},
    "lora": {"mode": "lora", "lora_rank": 4},
    "precomputed": {"reference": "precomputed"},
    "lora precomputed": {"mode": "lora", "reference": "precomputed"},
    "another reference": {"ref_name": "other"},
    "another reference precomputed": {"ref_name": "other", "reference": "precomputed"},
    "several passes, checkpointed": {
        "mode": "sparse",
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    "averages": {"loss_type": "ipo", "ipo_average": True},
    "truncated at the end": {"max_length": 12},
    "truncated at the start": {"max_length": 12, "truncation_mode": "keep_end"},
    "workers": {"dataloader_num_workers": 1},
}


@pytest.fixture(scope="module")
def tiles_file(tmp_path_factory, model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    mask = MaskSet.random(model, density=0.5, pattern="tile64", seed=3)
    return mask.save(tmp_path_factory.mktemp("masks") / "tiles.safetensors")


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


@pytest.fixture
def options_of(dpo_options, mask_file, tiles_file, other_folder, pairs_file):
    """The options of a case: three steps of SGD, whose weights move in proportion to the gradients, and evaluation."""

    def make(case, **changes):
        options = {"optim": "sgd", "learning_rate": 0.5, "n_steps": 3, "eval_dataset": str(pairs_file), "eval_steps": 2}
        options |= CASES[case]
        if options.get("mode") == "sparse":
            options["mask"] = tiles_file if options.get("mask") == "tiles" else mask_file
        if "ref_name" in options:
            options["ref_name"] = str(other_folder)
        return dpo_options(**options | changes)

    return make


def run_both(config):
    return [
        dpo.train(dataclasses.replace(config, share_prompts=flag, output_dir=config.output_dir / str(flag)))
        for flag in (True, False)
    ]


def weights_of(summary):
    return load_file(Path(summary["checkpoint"]) / "model.safetensors")


def assert_close_rows(found, expected):
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row.keys() - {"n_computed_tokens"} == other.keys()
        assert row.get("n_tokens") == other.get("n_tokens")
        for name in row.keys() & {"loss", "margin", "rewards_chosen", "rewards_rejected", "eval_loss", "eval_margin"}:
            assert row[name] == pytest.approx(other[name], rel=2e-4, abs=ROUNDING), name
        if "grad_norm" in row:
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_with_separate_rows(options_of, model_folder, case):
    shared, separate = run_both(options_of(case))
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        found, expected = (rows(Path(summary["checkpoint"]).with_name(file)) for summary in (shared, separate))
        assert_close_rows(found, expected)
    first, second, start = weights_of(shared), weights_of(separate), load_file(model_folder / "model.safetensors")
    # Gradients are clipped to a norm of 1; errors as in `small_models.assert_same_gradients`, at rate 0.5.
    atol = 3 * 0.5 * 200 * EPS
    for name, weight in second.items():
        torch.testing.assert_close(first[name], weight, rtol=0, atol=atol, msg=name)
    moved = max(float((weight - start[name]).abs().max()) for name, weight in second.items())
    assert moved > 100 * atol


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_fp16_autocast(options_of, mode):
    config = options_of(mode, dtype="fp16")
    for row, other in zip(*(rows(summary["metrics_file"]) for summary in run_both(config)), strict=True):
        # As in test_fp16: log-probabilities of some 10 tokens of up to 10 each, of logits rounded to 2^-11.
        assert row["loss"] == pytest.approx(other["loss"], abs=0.02)
        assert not row["step_skipped"]


@pytest.mark.parametrize("changes", [{}, {"max_length": 12, "truncation_mode": "keep_end"}], ids=["whole", "truncated"])
def test_all_passes_compute_shared_rows(options_of, monkeypatch, read_metrics, changes):
    """Those of the policy, the reference and the evaluation; in 3 steps and 2 evaluations of 24 pairs."""
    widths = []
    forward = dpo.completion_logprobs

    def watched(model, batch):
        widths.append((len(batch.input_ids), batch.branches is not None, batch.n_tokens))
        return forward(model, batch)

    monkeypatch.setattr(dpo, "completion_logprobs", watched)
    metrics = read_metrics(dpo.train(options_of("dense", share_prompts=True, **changes)))
    assert len(widths) == 2 * (3 + 3 * 6) and all(n_rows == 4 and branches for n_rows, branches, _ in widths)
    n_shared = sum(n for *_, n in widths)
    of_steps = [n for *_, n in widths]
    assert all(row["n_computed_tokens"] in of_steps for row in metrics)
    widths.clear()
    dpo.train(options_of("dense", output_dir=options_of("dense").output_dir / "separate", **changes))
    assert all(n_rows == 8 and not branches for n_rows, branches, _ in widths)
    n_separate = sum(n for *_, n in widths)
    # A prompt of 7 to 9 tokens is computed once but for its last token; truncated to their ends, pairs share little.
    assert n_shared <= n_separate if changes else n_shared < 0.8 * n_separate


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_a_resumed_run_is_the_run(options_of, monkeypatch, mode):
    config = options_of(mode, share_prompts=True, save_steps=1)
    whole = dpo.train(dataclasses.replace(config, output_dir=config.output_dir / "whole"))
    cut = dataclasses.replace(config, output_dir=config.output_dir / "cut")
    assert_same_run(whole, stop_and_resume(monkeypatch, dpo.train, cut, 1))


def test_through_the_command_line(tmp_path, model_folder, pairs_file, mask_file, capsys):
    words = f"train minimal_dpo --policy_name {model_folder} --dataset {pairs_file} --mask {mask_file} --dtype fp32"
    words += " --device cpu --n_steps 2 --max_length 64 --learning_rate 1e-3 --delta_log_dir none --sample_steps none"
    for flag in ("true", "false"):
        assert main([*words.split(), "--share_prompts", flag, "--output_dir", str(tmp_path / flag)]) == 0
        options = yaml.safe_load((tmp_path / flag / "options.yaml").read_text())
        assert options["share_prompts"] is (flag == "true")
    assert_close_rows(*(rows(tmp_path / flag / "metrics.jsonl") for flag in ("true", "false")))


# Refusals


@pytest.fixture(scope="module")
def window_folder(tmp_path_factory, tokenizer):
    """A model whose layers see 8 tokens back."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, sliding_window=8, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **sizes,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "window"
    MistralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("changes", [{"policy_name": "window"}, {"ref_name": "window"},
                                     {"ref_name": "window", "reference": "precomputed"}],
                         ids=["policy", "reference", "precomputed reference"])  # fmt: skip
def test_a_model_that_cannot_is_refused_before_a_file_is_written(dpo_options, window_folder, changes):
    changes = {name: str(window_folder) if value == "window" else value for name, value in changes.items()}
    config = dpo_options(share_prompts=True, **changes)
    with pytest.raises(ConfigError, match="'share_prompts': MistralForCausalLM attends to a window of 8 tokens"):
        dpo.train(config)
    assert not config.output_dir.exists()
    dpo.train(dataclasses.replace(config, share_prompts=False, n_steps=1))


def test_a_run_is_resumed_with_its_own_rows_only(options_of):
    config = options_of("dense")
    first = dataclasses.replace(config, n_steps=3, save_steps=1, share_prompts=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpo.TrainingRun, "finish", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            dpo.train(first)
    with pytest.raises(ConfigError, match="'resume': share_prompts is False; expected True"):
        dpo.train(dataclasses.replace(first, share_prompts=False, resume=True))
