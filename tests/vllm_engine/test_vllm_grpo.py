"""GRPO whose completions vLLM samples, on generated arithmetic and a CPU: `make test-vllm`."""

from __future__ import annotations

import json
from statistics import mean

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from sparse_opt.config import parse_config
from sparse_opt.masks import MaskSet
from sparse_opt.trainers import grpo, sft
from sparse_opt.trainers.arithmetic import make_arithmetic


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Sums of digits, and a model that has begun to learn them from demonstrations, half of them right."""
    folder = tmp_path_factory.mktemp("world")
    data = make_arithmetic(folder / "arithmetic", max_operand=9, n_train=80, n_test=20, n_demonstrations=4000) / "data"
    words = ["--policy_name", folder / "arithmetic" / "model", "--dataset", data / "demonstrations.jsonl"]
    words += ["--n_steps", 200, "--batch_size", 32, "--learning_rate", 3e-3, "--warmup_steps", 20, "--max_length", 16]
    run(sft.SFTConfig, sft.train, folder / "start", words)
    return folder


def run(config_class, train, folder, words):
    """Train on the CPU; return the rows of the metrics."""
    words = [*words, "--dtype", "fp32", "--device", "cpu", "--output_dir", folder]
    train(parse_config(config_class, [*map(str, words)]))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_the_reward_rises(world, mode):
    words = ["--policy_name", world / "start" / "final", "--dataset", world / "arithmetic" / "data" / "train.jsonl"]
    words += ["--n_steps", 40, "--batch_size", 128, "--n_generations", 8]
    words += ["--learning_rate", {"dense": 1e-3, "sparse": 3e-3}[mode]]
    words += ["--max_prompt_length", 16, "--max_completion_length", 4, "--reward_functions", "exact_match"]
    words += ["--rollout_engine", "vllm", "--vllm_enforce_eager", "true", "--max_logprob_difference", 1e-4]
    words += ["--vllm_importance_sampling_correction", "true", "--lr_schedule", "constant"]
    if mode == "sparse":
        model = AutoModelForCausalLM.from_pretrained(world / "start" / "final")
        MaskSet.random(model, density=0.1, seed=0).save(world / "mask.safetensors")
        words += ["--mode", "sparse", "--mask", world / "mask.safetensors"]
    rows = run(grpo.GRPOConfig, grpo.train, world / mode, words)
    assert len(rows) == 40
    # The standard error of the difference of two means of 5 * 128 answers, each right or wrong, is 0.028 at most.
    rewards = [row["reward"] for row in rows]
    assert mean(rewards[-5:]) - mean(rewards[:5]) > 0.1
    for row in rows:  # the same weights and dtype: the two differ by the order of their sums only
        assert 0 < row["sampling_logp_difference_max"] < 1e-3
        assert row["importance_sampling_ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert row["importance_sampling_clipped"] == 0
