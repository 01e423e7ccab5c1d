"""Runs of several processes see the batches of one process: the same losses and metrics, up to rounding."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from launch import launch
from stopping import rows

# Eight examples a step: two forward passes on each of 2 ranks; 2, 3 and 3 examples and unequal numbers of passes on 3.
# The first of 3 ranks has no example to evaluate.
SUPERVISED = {"n_steps": 3, "batch_size": 2, "gradient_accumulation_steps": 4, "eval_subset_size": 2, "max_length": 64}
CASES = {
    "sft": ("sft", {}),
    "sft-packing": ("sft", {"packing": True}),
    "dpo": ("dpo", {"max_grad_norm": 0.1}),
    "dpo-sparse": ("dpo", {"mode": "sparse", "max_grad_norm": 0.1, "gradient_checkpointing": True}),
    "dpo-lora": ("dpo", {"mode": "lora", "learning_rate": 1e-2}),
    "dpo-precomputed": ("dpo", {"reference": "precomputed", "log_margins": True}),
}
CONFIGS = {"sft": "SFTConfig", "dpo": "DPOConfig"}
FILES = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "logs/margins/margins_log.jsonl")


@pytest.fixture(scope="module")
def options(model_folder, pairs_file, mask_file, tmp_path_factory):
    """Name -> (algorithm, options) of the cases."""
    shared = {
        "policy_name": str(model_folder),
        "dataset": str(pairs_file),
        "eval_dataset": str(pairs_file),
        "eval_steps": 2,
        "sample_steps": 1,
        "dtype": "fp32",
        "device": "cpu",
        "learning_rate": 1e-3,
        "seed": 5,
        **SUPERVISED,
    }
    masks = {"sparse": str(mask_file)}
    return {
        name: (algorithm, {**shared, "mask": masks.get(changes.get("mode")), **changes})
        for name, (algorithm, changes) in CASES.items()
    }


@pytest.fixture(scope="module", autouse=True)
def dataset_cache(tmp_path_factory):
    """Keep the cache of `datasets` of all processes out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


def config_of(algorithm, options, folder):
    module = importlib.import_module(f"sparse_opt.trainers.{algorithm}")
    return module, getattr(module, CONFIGS[algorithm])(**options, output_dir=folder)


def train_all(rank, options, folder):
    """Train each of the cases, and return its summary."""
    summaries = {}
    for name, (algorithm, given) in options.items():
        module, config = config_of(algorithm, given, Path(folder) / name)
        summaries[name] = module.train(config)
    return summaries


@pytest.fixture(scope="module")
def of_one(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        train_all(0, options, folder)
    return folder


def assert_same_rows(one, several, name):
    """The rows of all files are equal up to rounding; those of several processes also have columns of each rank."""
    for file in FILES:
        assert (one / file).is_file() == (several / file).is_file(), (name, file)
        if not (one / file).is_file():
            continue
        expected, found = rows(one / file), rows(several / file)
        assert len(found) == len(expected), (name, file)
        for before, after in zip(expected, found, strict=True):
            assert {key for key in after if "/" not in key or key in before} == before.keys(), (name, file)
            for key, value in before.items():
                where = f"{name}: {file}, step {before['step']}: {key}"
                if key == "padding":  # depends on the division into forward passes
                    assert 0 <= after[key] < 1, where
                elif isinstance(value, float):
                    # Gradients of a step are sums in another order: some units of 2^-24 of some 1000 terms. Adam makes
                    # a step of the learning rate of any gradient, and so a larger difference of some of the weights.
                    assert after[key] == pytest.approx(value, rel=5e-4, abs=5e-5), where
                else:
                    assert after[key] == value, where


@pytest.mark.parametrize("n", [2, 3])
def test_the_losses_of_several_processes_are_those_of_one(options, of_one, tmp_path, n):
    summaries = launch(train_all, n, options, str(tmp_path), timeout=240)
    assert all(summary == summaries[0] for summary in summaries)
    for name in options:
        assert_same_rows(of_one / name, tmp_path / name, name)
        last = rows(tmp_path / name / "metrics.jsonl")[-1]
        assert all(last[f"rank{rank}/peak_host_memory_bytes"] > 0 for rank in range(n))
        one, several = (folder / name / "final" / "model.safetensors" for folder in (of_one, tmp_path))
        assert one.stat().st_size == several.stat().st_size
        assert sorted(path.name for path in (of_one / name).iterdir()) == sorted(
            path.name for path in (tmp_path / name).iterdir()
        )
