"""Runs with sharded models on GPUs: the losses of one GPU, and rollouts."""

from __future__ import annotations

import shutil

import pytest
import test_distributed_runs
import torch
from stopping import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs"),
]


environment = test_distributed_runs.environment


@pytest.fixture
def options(model_folder, pairs_file):
    return {
        "policy_name": model_folder,
        "dataset": pairs_file,
        "device": "cuda",
        "dtype": "fp32",
        "n_steps": 4,
        "batch_size": 2,
        "gradient_accumulation_steps": 3,  # three rows and two passes on each rank
        "max_length": 64,
        "learning_rate": 1e-3,
        "save_steps": 2,
        "sample_steps": 2,
    }


def train(options, n, environment, *words):
    ended = test_distributed_runs.run(options, n, environment, *words)
    assert ended.returncode == 0, ended.stderr
    return rows(options["output_dir"] / "metrics.jsonl")


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_two_gpus_with_a_sharded_model_train_as_one(options, environment, mask_file, tmp_path, mode):
    options |= {"mode": mode, **({"mask": mask_file} if mode == "sparse" else {})}
    one = train({**options, "output_dir": tmp_path / "one"}, 1, environment, "dpo")
    two = train({**options, "output_dir": tmp_path / "two", "parallel": "fsdp"}, 2, environment, "dpo")
    for expected, found in zip(one, two, strict=True):
        # The gradients are sums in another order; see test_distributed_losses.
        assert found["loss"] == pytest.approx(expected["loss"], rel=5e-4, abs=5e-5)
    assert two[-1]["rank1/peak_memory_bytes"] > 0
    # Two processes saved the checkpoint of step 2; one goes on from it.
    (tmp_path / "two" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "two" / "final")
    shutil.rmtree(tmp_path / "two" / "adapter", ignore_errors=True)
    resumed = {**options, "output_dir": tmp_path / "two", "resume": True}
    assert [row["step"] for row in train(resumed, 1, environment, "dpo")] == [1, 2, 3, 4]


@pytest.mark.parametrize(("engine", "gather"), [("generate", True), ("generate", False), ("continuous_batching", True)])
def test_two_gpus_with_a_sharded_model_generate(options, environment, tmp_path, engine, gather):
    options |= {
        "output_dir": tmp_path / "run",
        "parallel": "fsdp",
        "rollout_engine": engine,
        "gather_for_generation": gather,
        "n_generations": 3,
        "max_completion_length": 8,
        "reward_functions": "token_rewards:even_tokens",
    }
    assert [row["completion_length_max"] for row in train(options, 2, environment, "grpo")] == [8.0] * 4
