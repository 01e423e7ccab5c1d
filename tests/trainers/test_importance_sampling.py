"""Importance weights against the formulas written by hand, in the losses and in runs with an engine that is off."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from small_models import small
from stopping import rows
from transformers import LlamaConfig

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.trainers import grpo, ppo
from sparse_opt.trainers.grpo import GRPOConfig, grpo_loss
from sparse_opt.trainers.ppo import PPOConfig
from sparse_opt.trainers.ppo.losses import policy_loss
from sparse_opt.trainers.rollouts import Completions, GenerateEngine, Sampling, concatenated, rollout
from sparse_opt.trainers.rollouts.importance import (
    importance_weights,
    logprob_differences,
    require_agreement,
)

LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, 7.0]])
ENGINE = torch.tensor([[-1.1, -4.0, -0.25], [-0.5, -0.25, -9.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def by_hand(mode, low, high):
    """The table of `importance_weights`, token by token."""
    weights = []
    for row in range(2):
        differences = [float(LOGPROBS[row, t] - ENGINE[row, t]) for t in range(3) if MASK[row, t]]
        of_row = []
        for difference in differences:
            ratio = math.exp(sum(differences) if mode.startswith("sequence") else difference)
            if mode.endswith("truncate"):
                ratio = min(max(ratio, low or 0.0), high or math.inf)
            elif not (low or 0.0) <= ratio <= (high or math.inf):
                ratio = 0.0
            of_row.append(ratio)
        weights.append(of_row + [1.0] * (3 - len(of_row)))
    return torch.tensor(weights)


@pytest.mark.parametrize(("low", "high"), [(None, 2.0), (0.5, 3.0), (0.9, None), (None, 100.0)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_are_those_written_by_hand(mode, low, high):
    weights, outside = importance_weights(LOGPROBS, ENGINE, MASK, mode=mode, clip_max=high, clip_min=low)
    torch.testing.assert_close(weights, by_hand(mode, low, high), rtol=1e-6, atol=0)
    assert torch.equal(outside, weights.ne(importance_weights(LOGPROBS, ENGINE, MASK, mode=mode, clip_max=None)[0]))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode is 'truncate', expected token_truncate, token_mask"):
        importance_weights(LOGPROBS, ENGINE, MASK, mode="truncate")


def test_equal_probabilities_have_the_weight_1():
    for mode in ("token_truncate", "sequence_mask"):
        weights, outside = importance_weights(LOGPROBS, LOGPROBS, MASK, mode=mode)
        assert torch.equal(weights, torch.ones_like(LOGPROBS)) and not outside.any()


def test_statistics_are_those_written_by_hand():
    found = logprob_differences(LOGPROBS, ENGINE, MASK)
    differences = [0.1, 2.0, -0.25, -1.0, 0.05]
    expected = {
        "sampling_logp_difference_mean": sum(map(abs, differences)) / 5,
        "sampling_logp_difference_max": 2.0,
        "importance_sampling_ratio_mean": sum(map(math.exp, differences)) / 5,
        "sampling_kl": sum(math.exp(d) - 1 - d for d in differences) / 5,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value, rel=1e-5), name


def test_the_bound_of_the_mean_difference():
    statistics = logprob_differences(LOGPROBS, ENGINE, MASK)
    require_agreement(statistics, None)
    require_agreement(statistics, 0.7)
    with pytest.raises(SparseOptError, match=r"differ by 0.68 on average, more than max_logprob_difference 0.67"):
        require_agreement(statistics, 0.67)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "gspo"])
def test_grpos_policy_term_is_weighted_and_its_divergence_is_not(loss_type):
    logprobs = LOGPROBS.clone().requires_grad_()
    advantages = torch.tensor([0.5, -1.5])
    old, ref = LOGPROBS + 0.1, LOGPROBS - 0.3
    weights, _ = importance_weights(old, ENGINE, MASK, clip_max=2.0)
    options = {"loss_type": loss_type, "max_completion_length": 3}

    def loss(beta, weights=None):
        return grpo_loss(
            logprobs, old, advantages, MASK, ref_logprobs=ref, beta=beta, importance_weights=weights, **options
        )[0]

    # Per token: the gradient of the weighted loss is the weight times that of the loss, plus that of the divergence.
    (plain,) = torch.autograd.grad(loss(0.0), logprobs)
    (divergence,) = torch.autograd.grad(loss(0.3) - loss(0.0), logprobs)
    (weighted,) = torch.autograd.grad(loss(0.3, weights), logprobs)
    if loss_type == "gspo":  # one ratio per sequence: the mean of the weights of a sequence multiplies its gradient
        weights = (weights * MASK).sum(1, keepdim=True) / MASK.sum(1, keepdim=True)
    torch.testing.assert_close(weighted, plain * weights + divergence, rtol=1e-5, atol=1e-7)
    assert torch.equal(loss(0.3, torch.ones_like(LOGPROBS)), loss(0.3))


def test_ppos_policy_loss_is_weighted():
    weights, _ = importance_weights(LOGPROBS, ENGINE, MASK, clip_max=2.0)
    advantages = torch.tensor([[0.5, -1.0, 2.0], [1.0, -0.5, 3.0]])
    loss, _ = policy_loss(LOGPROBS, LOGPROBS, advantages, MASK, clip=0.2, n_tokens=5, importance_weights=weights)
    expected = -sum(float(weights[row, t] * advantages[row, t]) for row in range(2) for t in range(3) if MASK[row, t])
    assert loss.item() == pytest.approx(expected / 5, abs=5 * 2**-23)  # five products below 2, each to one ulp


class Biased(GenerateEngine):
    """Reports log-probabilities that differ from the policy's by a given amount, which may alternate in sign."""

    off = 0.0
    alternates = True

    def generate(self, prompts, n, sampling):
        ids = super().generate(prompts, n, sampling).ids
        sequences = [[*prompt, *row] for prompt, row in zip([p for p in prompts for _ in range(n)], ids, strict=True)]
        logprobs = []
        for sequence, row in zip(sequences, ids, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([sequence])).logits[0].float() / (sampling.temperature or 1)
            start = len(sequence) - len(row) - 1
            table = logits.log_softmax(-1)[start:-1]
            logprobs.append(
                [float(table[i, token]) + self.off * (-1) ** (i * self.alternates) for i, token in enumerate(row)]
            )
        return Completions(ids, logprobs)


@pytest.fixture
def train(tmp_path, monkeypatch, model_folder, pairs):
    """`train(off, **options)`: metrics and weights of two steps with an engine that is `off` by this much."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in pairs))

    def train(off, engine="vllm", algorithm=grpo, **options):
        monkeypatch.setattr(Biased, "off", off)
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        settings = {
            "policy_name": str(model_folder),
            "dataset": str(data),
            "output_dir": folder,
            "dtype": "fp32",
            "device": "cpu",
            "n_steps": 2,
            "batch_size": 8,
            "n_generations": 4,
            "max_completion_length": 4,
            "learning_rate": 1e-3,
            "reward_functions": ["token_rewards:even_tokens"],
            "rollout_engine": engine,
            "sample_steps": None,
        }
        with monkeypatch.context() as patch:
            if engine == "vllm":
                patch.setattr(algorithm, "configured_engine", configured_biased)
            config = GRPOConfig if algorithm is grpo else PPOConfig
            algorithm.train(config(**{**settings, **options}))
        return rows(folder / "metrics.jsonl"), load_file(folder / "final" / "model.safetensors")

    return train


def configured_biased(config, model, tokenizer, **_):
    return Biased(model, pad_id=tokenizer.pad_token_id, eos_ids=[tokenizer.eos_token_id])


STATISTICS = (
    "sampling_logp_difference_mean",
    "sampling_logp_difference_max",
    "importance_sampling_ratio_mean",
    "sampling_kl",
)


def test_differences_are_logged_and_change_nothing_by_default(train):
    (first, _), weights = train(off=1.0)
    assert first["sampling_logp_difference_mean"] == pytest.approx(1, abs=1e-5)
    assert first["sampling_logp_difference_max"] == pytest.approx(1, abs=1e-5)
    assert 1 < first["importance_sampling_ratio_mean"] < math.e
    plain, expected = train(off=0.0, engine="generate")
    assert not any(name in row for row in plain for name in STATISTICS)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_correction_changes_the_update_where_the_engine_differs(train):
    correction = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 2.0}
    _, expected = train(off=0.0, engine="generate")
    (first, _), weights = train(off=1.0, **correction)
    # The ratio of every second token, from the second on, is e and truncated; that of the others is 1/e.
    assert 0 < first["importance_sampling_clipped"] <= 0.5
    assert any(not torch.equal(weights[name], expected[name]) for name in expected)
    (first, _), _ = train(off=0.0, **correction)
    assert first["importance_sampling_clipped"] == 0


@pytest.mark.parametrize(
    ("algorithm", "options"), [(grpo, {}), (ppo.loop, {"kl_coefficient": 0.05, "n_generations": 1})]
)
@pytest.mark.parametrize("off", [1.0, -1.0])
def test_the_ratio_is_the_policy_over_the_engine(train, monkeypatch, algorithm, options, off):
    monkeypatch.setattr(Biased, "alternates", False)
    correction = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 2.0}
    (first, _), _ = train(off=off, algorithm=algorithm, **correction, **options)
    assert first["importance_sampling_ratio_mean"] == pytest.approx(math.exp(-off), rel=1e-4)
    assert first["importance_sampling_clipped"] == (1 if off < 0 else 0)  # e is above the bound, 1/e below


def test_ppo_is_corrected_too(train):
    options = {"algorithm": ppo.loop, "kl_coefficient": 0.05, "learning_rate": 1e-3, "n_generations": 1}
    _, expected = train(off=0.0, engine="generate", **options)
    (first, _), weights = train(off=1.0, **options)
    assert first["sampling_logp_difference_mean"] == pytest.approx(1, abs=1e-5)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    correction = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_mask"}
    (first, _), weights = train(off=1.2, **correction, **options)  # exp(1.2) is above the bound, 3
    assert 0 < first["importance_sampling_clipped"] <= 0.5
    assert any(not torch.equal(weights[name], expected[name]) for name in expected)


def test_a_run_stops_if_the_engine_has_other_weights(train):
    train(off=0.1, max_logprob_difference=0.2)
    with pytest.raises(SparseOptError, match=r"differ by 0\.3 on average, more than max_logprob_difference 0\.2"):
        train(off=0.3, max_logprob_difference=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_logprob_difference": 0.1}, "'max_logprob_difference' is 0.1: rollout_engine generate reports no log"),
        ({"vllm_importance_sampling_correction": True}, "'vllm_importance_sampling_correction' is True: rollout_eng"),
    ],
)
def test_engines_without_log_probabilities_are_refused(train, options, message):
    with pytest.raises(ConfigError, match=message):
        train(0.0, engine="generate", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_min": 3.0}, "clip_min' is 3.0: expected less than vllm_importance_sampling_clip_max 3.0"),
        ({"clip_max": None}, "mode' is token_truncate: expected vllm_importance_sampling_clip_max or vllm"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(train, options, message):
    options = {f"vllm_importance_sampling_{name}": value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        train(0.0, vllm_importance_sampling_correction=True, **options)


@pytest.mark.parametrize("truncated", [{"top_p": 0.9}, {"top_k": 5}])
@pytest.mark.parametrize("name", ["max_logprob_difference", "vllm_importance_sampling_correction"])
def test_a_truncated_distribution_is_refused(train, name, truncated):
    with pytest.raises(ConfigError, match=f"'{name}' is .* with top_p .* and top_k .*: expected 1 and 0"):
        train(0.0, **{name: True}, **truncated)


@pytest.mark.parametrize(("name", "value"), [("mode", "token_mask"), ("clip_max", 2.0), ("clip_min", 0.5)])
def test_settings_of_the_correction_need_it(train, name, value):
    with pytest.raises(ConfigError, match=f"sampling_{name}' is {value}: it needs vllm_importance_sampling_correction"):
        train(0.0, **{f"vllm_importance_sampling_{name}": value})


def test_a_server_is_for_engine_vllm_only(train):
    with pytest.raises(ConfigError, match="'vllm_server_base_url' is http://a:1: rollout_engine is generate, expected"):
        train(0.0, engine="generate", vllm_server_base_url="http://a:1")


def test_parts_are_joined_with_their_log_probabilities():
    first, second = Completions([[5], [6, 7]], [[-1.0], [-2.0, -3.0]]), Completions([[8]], [[-4.0]])
    assert concatenated([first, Completions([]), second]) == Completions(
        [[5], [6, 7], [8]], [[-1.0], [-2.0, -3.0], [-4.0]]
    )
    assert concatenated([first, Completions([[8]])]) == Completions([[5], [6, 7], [8]])


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [([[-1.0]], "do not have the lengths of its completions"), ([[-1.0, math.nan]], "token 1 of completion 0 is nan")],
)
def test_log_probabilities_that_do_not_fit_are_refused(logprobs, message):
    class Engine:
        eos_ids = (1,)

        def generate(self, prompts, n, sampling):
            return Completions([[5, 6]], logprobs)

    with pytest.raises(SparseOptError, match=message):
        rollout(Engine(), small(LlamaConfig), [[3]], n_generations=1, sampling=Sampling(3), pad_id=0)
