"""Sharded runs over gloo and over NCCL: a checkpoint of two ranks that one process goes on from, and rollouts.

test_distributed_losses.py compares the losses of all algorithms, replicated and sharded, over both.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launch import BACKENDS, launch
from stopping import rows

from sparse_opt.trainers import dpo, grpo

# By backend. test_distributed_fsdp.py and test_distributed_losses.py train in the other modes over gloo.
MODES = {"gloo": ("sparse",), "nccl": ("dense", "sparse", "lora")}
ENGINES = [("generate", True), ("generate", False), ("continuous_batching", True)]  # and whether weights are gathered


@pytest.fixture
def options(model_folder, pairs_file):
    return {
        "policy_name": str(model_folder),
        "dataset": str(pairs_file),
        "dtype": "fp32",
        "n_steps": 4,
        "batch_size": 2,
        "gradient_accumulation_steps": 3,  # three rows and two passes on each rank
        "max_length": 64,
        "learning_rate": 1e-3,
        "save_steps": 2,
        "sample_steps": 2,
    }


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path, monkeypatch):
    """Keep the cache of `datasets` of all processes out of the user's home."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def on(backend):
    return "cuda" if backend == "nccl" else "cpu"


def train_modes(rank, modes, options, mask_file, folder):
    """A DPO run of each mode."""
    for mode in modes:
        mask = {"mask": mask_file} if mode == "sparse" else {}
        dpo.train(dpo.DPOConfig(**options, **mask, mode=mode, output_dir=Path(folder) / mode))


@BACKENDS
def test_two_ranks_with_a_sharded_model_train_as_one(options, mask_file, tmp_path, backend):
    options |= {"device": on(backend)}
    one, two, modes = tmp_path / "one", tmp_path / "two", MODES[backend]
    train_modes(0, modes, options, str(mask_file), one)
    launch(train_modes, 2, modes, {**options, "parallel": "fsdp"}, str(mask_file), str(two), backend=backend)
    for mode in modes:
        expected, found = (rows(folder / mode / "metrics.jsonl") for folder in (one, two))
        assert [row["step"] for row in found] == [1, 2, 3, 4]
        for row, other in zip(expected, found, strict=True):
            # The gradients are sums in another order; see test_distributed_losses.
            assert other["loss"] == pytest.approx(row["loss"], rel=5e-4, abs=5e-5), mode
        peak = "rank1/peak_memory_bytes" if backend == "nccl" else "rank1/peak_host_memory_bytes"
        assert found[-1][peak] > 0
        # Two processes saved the checkpoint of step 2; one goes on from it.
        (two / mode / "summary.json").unlink()
        shutil.rmtree(two / mode / "final")
        shutil.rmtree(two / mode / "adapter", ignore_errors=True)
    train_modes(0, modes, {**options, "resume": True}, str(mask_file), two)
    for mode in modes:
        resumed = rows(two / mode / "metrics.jsonl")
        assert [row["step"] for row in resumed] == [1, 2, 3, 4]
        assert ["rank1/peak_host_memory_bytes" in row for row in resumed] == [True, True, False, False], mode
        assert resumed[-1]["loss"] == pytest.approx(rows(one / mode / "metrics.jsonl")[-1]["loss"], rel=5e-4, abs=5e-5)


def sample_with_each(rank, options, folder):
    """A GRPO run with each engine."""
    for engine, gather in ENGINES:
        how = {"rollout_engine": engine, "gather_for_generation": gather}
        grpo.train(grpo.GRPOConfig(**options, **how, output_dir=Path(folder) / f"{engine}_{gather}"))


@BACKENDS
def test_two_ranks_with_a_sharded_model_generate(options, tmp_path, backend):
    own = {"n_generations": 3, "max_completion_length": 8, "reward_functions": ["token_rewards:even_tokens"]}
    launch(
        sample_with_each,
        2,
        {**options, **own, "device": on(backend), "parallel": "fsdp", "n_steps": 2},
        str(tmp_path),
        backend=backend,
    )
    for engine, gather in ENGINES:
        found = rows(tmp_path / f"{engine}_{gather}" / "metrics.jsonl")
        assert [row["completion_length_max"] for row in found] == [8.0] * 2, (engine, gather)
