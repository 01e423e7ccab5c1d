"""Whole runs of grpo.train on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from stopping import assert_same_run, rows, stop_and_resume
from transformers import AutoModelForCausalLM

from sparse_opt.config import parse_config
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers import grpo
from sparse_opt.trainers.grpo import GRPOConfig
from sparse_opt.trainers.run.training_run import TrainingRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "configs" / "grpo.yaml"


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory, pairs):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": row["prompt"], "answer": row["chosen"]}) + "\n" for row in pairs))
    return path


@pytest.fixture
def options(tmp_path, model_folder, prompts_file):
    """`options("run", beta=0.1)`: four steps of two optimizer steps of two passes of four completions."""

    def make(folder="run", **changes):
        settings = {
            "policy_name": str(model_folder),
            "dataset": str(prompts_file),
            "output_dir": tmp_path / folder,
            "dtype": "fp32",
            "device": "cpu",
            "n_steps": 4,
            "batch_size": 4,
            "gradient_accumulation_steps": 2,
            "n_minibatches": 2,
            "n_generations": 4,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "reward_functions": ["token_rewards:even_tokens"],
            "seed": 5,
        }
        return GRPOConfig(**{**settings, **changes})

    return make


@pytest.fixture
def modes(mask_file):
    """A mode's options."""
    return {
        mode: {"mode": mode, "mask": mask_file if mode == "sparse" else None} for mode in ("dense", "sparse", "lora")
    }


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_grpo_learns_and_writes_what_came_of_it(options, modes, prompts_file, model_folder, mode):
    config = options(
        **modes[mode],
        n_steps=12,
        batch_size=16,
        n_minibatches=1,
        n_generations=8,
        learning_rate={"dense": 2e-2, "sparse": 5e-2, "lora": 2e-2}[mode],
        lr_schedule="constant",
        eval_dataset=str(prompts_file),
        eval_subset_size=6,
        eval_steps=6,
        sample_steps=6,
    )
    summary = grpo.train(config)
    metrics = rows(summary["metrics_file"])
    rewards = [row["reward"] for row in metrics]
    if mode != "lora":  # its output layer is frozen, and 32 random numbers a word do not tell even ids from odd
        # Half of the ids are even. A rollout's 256 tokens have 0.5, give or take 0.03; three rollouts, 0.018.
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
        assert metrics[-1]["entropy"] < metrics[0]["entropy"]
    for row in metrics:
        assert row["reward"] == row["rewards/even_tokens"]
        assert 1 <= row["completion_length_min"] <= row["completion_length"] <= row["completion_length_max"] <= 8
        assert 0 <= row["truncated"] <= 1 and 0 <= row["zero_std_groups"] <= 1 and row["kl"] is None
        assert row["ratio_mean"] == 1 and row["ratio_error"] == row["clip_low"] == row["clip_high"] == 0
    # The entropy of 320 tokens is ln 320 = 5.8 at most; a sampled estimate may be a little higher.
    assert 4 < metrics[0]["entropy"] < 6
    folder = config.output_dir
    evaluations = rows(folder / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 6, 12]
    assert all(0 <= row["eval_reward"] <= 1 and row["eval_completion_length_max"] <= 8 for row in evaluations)
    assert evaluations[0]["eval_reward"] != evaluations[-1]["eval_reward"]
    samples = rows(folder / "samples.jsonl")
    assert [row["step"] for row in samples] == [1] * 4 + [6] * 4 + [12] * 4
    assert {row["prompt"] for row in samples[:4]} == {samples[0]["prompt"]}  # of one group
    best, worst = (pick(samples[:4], key=lambda row: row["reward"]) for pick in (max, min))
    assert best["advantage"] > worst["advantage"]
    start, end = weights(model_folder), weights(summary["checkpoint"])
    if mode == "sparse":
        mask = MaskSet.load(config.mask)
        for name, before in start.items():
            inactive = ~mask.bool(name) if name in mask else torch.ones(before.shape, dtype=torch.bool)
            assert torch.equal(before[inactive], end[name][inactive]), name
    assert any(not torch.equal(start[name], end[name]) for name in start)


def test_a_run_with_every_weight_active_is_the_dense_one(options, model_folder, tmp_path):
    full = MaskSet.random(AutoModelForCausalLM.from_pretrained(model_folder), density=1.0).save(
        tmp_path / "full.safetensors"
    )
    changes = {"beta": 0.1, "num_iterations": 2}
    dense = rows(grpo.train(options("dense", **changes))["metrics_file"])
    sparse = rows(grpo.train(options("sparse", mode="sparse", mask=full, **changes))["metrics_file"])
    assert [row["n_tokens"] for row in sparse] == [row["n_tokens"] for row in dense]
    for name in ("loss", "reward", "grad_norm", "kl", "ratio_mean", "ratio_error", "entropy"):
        # The same arithmetic in another order: a rounding or two of 2^-23 per operation of a step. Adam divides by the
        # gradient's own size, so a weight whose gradient is all rounding moves by the learning rate either way; such
        # weights hardly move the loss.
        assert [row[name] for row in sparse] == pytest.approx([row[name] for row in dense], rel=2e-4, abs=1e-5), name


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(monkeypatch, options, modes, prompts_file, mode):
    changes = {
        **modes[mode],
        "beta": 0.05,
        "num_iterations": 2,
        "save_steps": 1,
        "sample_steps": 2,
        "eval_dataset": str(prompts_file),
        "eval_subset_size": 3,
        "eval_steps": 2,
        "eval_temperature": 1.0,
    }
    whole = grpo.train(options("whole", **changes))
    assert_same_run(whole, stop_and_resume(monkeypatch, grpo.train, options("resumed", **changes), 2))


def test_ratios_are_to_the_policy_that_wrote_the_rollout(monkeypatch, options):
    seen = []

    def spy(logprobs, old_logprobs, *args, **options):
        result = original(logprobs, old_logprobs, *args, **options)
        seen.append((old_logprobs, (result[1] - 1).abs().max().item()))
        return result

    original = grpo.grpo_loss
    monkeypatch.setattr(grpo, "grpo_loss", spy)
    summary = grpo.train(options(n_steps=2, num_iterations=3))
    # A step: 3 iterations of 2 optimizer steps of 2 passes.
    assert len(seen) == 2 * 12
    for step, row in enumerate(rows(summary["metrics_file"])):
        old, errors = zip(*seen[12 * step : 12 * step + 12], strict=True)
        assert errors[:2] == (0, 0)  # to the bit, before the first update
        assert all(error > 1e-4 for error in errors[2:])
        assert row["ratio_error"] == pytest.approx(max(errors), rel=1e-6)
        for iteration in (4, 8):
            for first, later in zip(old[:4], old[iteration : iteration + 4], strict=True):
                assert torch.equal(first, later)


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_the_reference_is_the_policy_as_it_began(options, modes, mode):
    metrics = rows(grpo.train(options(**modes[mode], beta=0.1, n_minibatches=1))["metrics_file"])
    assert metrics[0]["kl"] == 0
    assert all(row["kl"] > 0 for row in metrics[1:])


def test_without_beta_there_is_no_reference(monkeypatch, options):
    monkeypatch.setattr(TrainingRun, "reference", lambda *_: pytest.fail("a reference was made"))
    grpo.train(options(n_steps=1))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "gspo"])
def test_cut_completions_are_left_out_if_asked(options, model_folder, loss_type):
    """With one token a completion nearly none has ended, and this seed's have not: nothing is left to train on."""
    changes = {"loss_type": loss_type, "max_completion_length": 1, "n_steps": 1, "n_minibatches": 1}
    left_out = grpo.train(options("left_out", mask_truncated_completions=True, **changes))
    (row,) = rows(left_out["metrics_file"])
    assert row["truncated"] == 1 and row["zero_std_groups"] < 1
    assert row["loss"] == row["grad_norm"] == 0
    start, end = weights(model_folder), weights(left_out["checkpoint"])
    assert all(torch.equal(start[name], end[name]) for name in start)
    assert rows(grpo.train(options("kept", **changes))["metrics_file"])[0]["grad_norm"] > 0


def test_several_rewards_with_weights_and_rows_without_one(options):
    names = ["token_rewards:even_tokens", "token_rewards:none_for_the_last"]
    summary = grpo.train(options(n_steps=2, reward_functions=names, reward_weights=[2.0, 0.5]))
    for row in rows(summary["metrics_file"]):
        assert row["rewards/none_for_the_last"] == 1
        # The last of 16 rows lacks the 0.5.
        assert row["reward"] == pytest.approx(2 * row["rewards/even_tokens"] + 0.5 * 15 / 16, rel=1e-6)


def test_a_completion_that_nothing_rewards_is_counted_nowhere(options):
    summary = grpo.train(options(n_steps=1, reward_functions=["token_rewards:none_for_the_last"]))
    (row,) = rows(summary["metrics_file"])
    assert row["reward"] == 1 and row["reward_std"] == 0 and row["zero_std_groups"] == 1 and row["grad_norm"] == 0


def test_a_reward_that_applies_to_nothing_is_an_error(options, tmp_path, prompts_file):
    without = tmp_path / "without.jsonl"
    without.write_text('{"prompt": "What?", "answer": null}\n' * 4)
    with pytest.raises(DataError, match=r"no reward function \(exact_match\) applies to any of 16 completions"):
        grpo.train(options(dataset=str(without), reward_functions=["exact_match"]))


def test_options_come_from_a_file_and_words(options, tmp_path, model_folder, prompts_file):
    file = tmp_path / "grpo.yaml"
    file.write_text(
        f"policy_name: {model_folder}\ndataset: {prompts_file}\ndtype: fp32\ndevice: cpu\nn_steps: 4\nbatch_size: 4\n"
        "gradient_accumulation_steps: 2\nn_minibatches: 2\nn_generations: 4\nmax_completion_length: 8\n"
        "learning_rate: 1e-2\nreward_functions: [token_rewards:even_tokens]\nseed: 5\nscale_rewards: none\n"
    )
    words = ["--config", str(file), "--learning_rate", "1e-3", f"output_dir={tmp_path / 'words'}"]
    config = parse_config(GRPOConfig, words)
    assert config.scale == "none"
    assert_same_run(grpo.train(config), grpo.train(options("here", scale_rewards="none")))


def test_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl", reason="needs trl")
    theirs, ours = trl.GRPOConfig(use_cpu=True, bf16=False, report_to=[]), GRPOConfig(policy_name="m", dataset="d")
    same = (
        "learning_rate max_completion_length temperature top_p top_k beta num_iterations epsilon epsilon_high "
        "loss_type mask_truncated_completions weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm"
    )
    assert {name: getattr(ours, name) for name in same.split()} == {
        name: getattr(theirs, name) for name in same.split()
    }
    assert (ours.n_generations, ours.batch_size) == (theirs.num_generations, theirs.per_device_train_batch_size)
    assert (ours.scale, ours.lr_schedule) == (theirs.scale_rewards, theirs.lr_scheduler_type)


def test_dr_grpo_does_not_scale(options):
    assert options(loss_type="dr_grpo").scale == "none"
    assert options(loss_type="dr_grpo", scale_rewards="batch").scale == "batch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_generations": 1}, r"'n_generations' is 1: expected at least 2"),
        ({"n_generations": 5}, r"= 16 completions a step: expected a multiple of n_generations 5"),
        ({"beta": -0.1}, r"'beta' is -0.1: expected at least 0"),
        ({"epsilon": 0.0}, r"'epsilon' is 0.0: expected more than 0, less than 1"),
        ({"epsilon": 1.5}, r"'epsilon' is 1.5"),
        ({"epsilon_high": -0.28}, r"'epsilon_high' is -0.28: expected more than 0"),
        ({"eval_temperature": -1.0}, r"'eval_temperature' is -1.0"),
        ({"ref_name": "other"}, r"a reference \(other\) is used with beta only"),
    ],
)
def test_bad_options(options, changes, message):
    with pytest.raises(ConfigError, match=message):
        options(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_functions": []}, "'reward_functions' is empty"),
        ({"reward_functions": ["exact_mach"]}, "unknown reward function 'exact_mach': the nearest is 'exact_match'"),
    ],
)
def test_rewards_that_are_not_there_leave_nothing(options, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        grpo.train(options(**changes))
    assert not (tmp_path / "run").exists()


def test_fp16_is_fp32_within_rounding(options, read_metrics):
    half, single = (
        read_metrics(grpo.train(options(dtype, dtype=dtype, n_steps=1, beta=0.1))) for dtype in ("fp16", "fp32")
    )
    assert half[0]["reward"] == single[0]["reward"]  # completions are sampled in fp32
    assert half[0]["grad_norm"] == pytest.approx(single[0]["grad_norm"], rel=0.02)
    assert half[0]["loss_scale"] == 2.0**16
