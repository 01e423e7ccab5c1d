"""Runs of several processes see the batches of one process: the same losses and metrics, up to rounding."""

from __future__ import annotations

import functools
import importlib
import json
import random
from pathlib import Path

import pytest
import torch
from launch import BACKENDS, launch
from stopping import rows
from test_rlt import TEMPLATES
from transformers import LlamaForCausalLM

from sparse_opt import MaskSet
from sparse_opt.trainers.ranks import Ranks
from sparse_opt.trainers.rollouts import Completions, GenerateEngine

# Eight examples a step: two forward passes on each of 2 ranks; 2, 3 and 3 examples and unequal numbers of passes on 3.
# The first of 3 ranks has no example to evaluate.
SUPERVISED = {"n_steps": 3, "batch_size": 2, "gradient_accumulation_steps": 4, "eval_subset_size": 2, "max_length": 64}
# An optimizer step has three examples of one forward pass each: one and two on 2 ranks.
UNEVEN = {"batch_size": 1, "gradient_accumulation_steps": 3, "n_minibatches": 4}
REWARD = {"reward_functions": ["token_rewards:even_tokens"]}
CASES = {
    "sft": ("sft", {"batch_size": 1, "gradient_accumulation_steps": 3}),
    "sft-packing": ("sft", {"packing": True}),
    "dpo": ("dpo", {"max_grad_norm": 0.1}),
    "dpo-sparse": ("dpo", {"mode": "sparse", "max_grad_norm": 0.1, "gradient_checkpointing": True}),
    "dpo-tiles": ("dpo", {"mode": "sparse", "mask": "tile64"}),
    "dpo-lora": ("dpo", {"mode": "lora", "learning_rate": 1e-2}),
    "dpo-precomputed": ("dpo", {"reference": "precomputed", "log_margins": True}),
    "grpo": ("grpo", {"mask_truncated_completions": True}),
    "grpo-sparse": ("grpo", {"mode": "sparse", "beta": 0.1, "scale_rewards": "batch", "loss_type": "grpo", **UNEVEN}),
    "ppo": ("ppo", {**UNEVEN, "kl_target": 0.1, "kl_horizon": 50.0, **REWARD, "statistics_steps": 2}),
    "ppo-sparse": ("ppo", {"mode": "sparse", **REWARD}),
    "rlt": ("rlt", {"activate_debugging_logs": True, **TEMPLATES}),
}
# With 3 ranks, whose shares are unequal: each algorithm once, and packing.
ON_THREE_RANKS = ("sft", "sft-packing", "dpo-sparse", "grpo-sparse", "ppo", "rlt")
# What is sharded depends on the mode and the reference, not on the algorithm: packing, GRPO with a mask and dense PPO
# are left.
NOT_SHARDED = ("sft", "grpo", "ppo-sparse")
CONFIGS = {"sft": "SFTConfig", "dpo": "DPOConfig", "grpo": "GRPOConfig", "ppo": "PPOConfig", "rlt": "RLTConfig"}
# Two optimizer steps of two passes over 16 completions; a group of 4 of them may be on two ranks.
ROLLOUTS = {
    "n_minibatches": 2,
    "num_iterations": 2,
    "n_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-4,
}
FILES = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "samples.jsonl",
    "logs/margins/margins_log.jsonl",
    "reward_parts.jsonl",
)


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
    lessons = tmp_path_factory.mktemp("lessons") / "lessons.jsonl"
    lessons.write_text("".join(json.dumps({"question": f"{n}+1?", "solution": f"{n + 1}"}) + "\n" for n in range(24)))
    tiles = tmp_path_factory.mktemp("masks") / "tile64.safetensors"
    MaskSet.random(LlamaForCausalLM.from_pretrained(model_folder), density=0.2, pattern="tile64", seed=3).save(tiles)
    masks = {"sparse": str(mask_file), "tile64": str(tiles)}
    own = {
        "grpo": {**ROLLOUTS, **REWARD},
        "ppo": {**ROLLOUTS, "learning_rate": 1e-4},
        "rlt": {**ROLLOUTS, "dataset": str(lessons), "eval_dataset": str(lessons)},
    }
    return {
        name: (
            algorithm,
            {
                **shared,
                **own.get(algorithm, {}),
                **changes,
                "mask": masks.get(changes.get("mask", changes.get("mode"))),
            },
        )
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


@pytest.fixture(scope="module")
def fixed_completions():
    """Completions depend on the row among those of all ranks instead of the random state, which differs by rank."""
    with pytest.MonkeyPatch.context() as patch:
        fix_completions(patch)
        yield


def fix_completions(patch):
    share, first = Ranks.share, [0]

    def noted(self, start, stop):
        found = share(self, start, stop)
        first[0] = found.start if self.size > 1 else 0
        return found

    def generate(self, prompts, n, sampling):
        repeated = [prompt for prompt in prompts for _ in range(n)]
        completions = []
        for row, prompt in enumerate(repeated, first[0]):
            generator = random.Random(f"{row} {list(prompt)}")
            length = generator.randint(3, sampling.max_new_tokens)
            ends = length < sampling.max_new_tokens
            completions.append(
                [generator.randrange(10, 300) for _ in range(length - 1)] + [self.eos_ids[0] if ends else 9]
            )
        return Completions(completions)

    patch.setattr(Ranks, "share", noted)
    patch.setattr(GenerateEngine, "generate", generate)


def train_each(rank, options, folder):
    """`train_all` in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        fix_completions(patch)
        return train_all(rank, options, folder)


def train_all(rank, options, folder):
    """Train each of the cases, and return its summary."""
    summaries = {}
    for name, (algorithm, given) in options.items():
        module, config = config_of(algorithm, given, Path(folder) / name)
        summaries[name] = module.train(config)
    return summaries


@pytest.fixture(scope="module")
def of_one(options, fixed_completions, tmp_path_factory):
    """`of_one("cpu")`: the folder of the runs of one process on that device."""

    @functools.cache
    def train(device):
        folder = tmp_path_factory.mktemp("one")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
            train_all(0, on_device(options, device), folder)
        return folder

    return train


def on_device(options, device, **changes):
    return {name: (algorithm, {**given, "device": device, **changes}) for name, (algorithm, given) in options.items()}


def state_bytes(folder):
    """The size of rank 0's moments, after a run."""
    return json.loads((folder / "summary.json").read_text())["optimizer_bytes"]["state"]


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
                elif key.endswith(("memory_bytes", "gpu_utilization_percent")):  # of GPUs
                    assert after[key] >= 0, where
                elif isinstance(value, float):
                    # Gradients of a step are sums in another order: some units of 2^-24 of some 1000 terms. Adam makes
                    # a step of the learning rate of any gradient, and so a larger difference of some of the weights.
                    assert after[key] == pytest.approx(value, rel=5e-4, abs=5e-5), where
                else:
                    assert after[key] == value, where


@pytest.mark.parametrize(("n", "parallel"), [(2, "replicate"), (3, "replicate"), (2, "fsdp")])
@BACKENDS
def test_the_losses_of_several_processes_are_those_of_one(options, of_one, tmp_path, backend, n, parallel):
    if backend == "nccl" and torch.cuda.device_count() < n:
        pytest.skip(f"needs {n} CUDA GPUs")
    device = "cuda" if backend == "nccl" else "cpu"
    of_one = of_one(device)
    names = ON_THREE_RANKS if n == 3 else [name for name in CASES if parallel != "fsdp" or name not in NOT_SHARDED]
    given = on_device({name: options[name] for name in names}, device, parallel=parallel)
    summaries = launch(train_each, n, given, str(tmp_path), timeout=400, backend=backend)
    assert all(summary == summaries[0] for summary in summaries)
    for name in names:
        assert_same_rows(of_one / name, tmp_path / name, name)
        last = rows(tmp_path / name / "metrics.jsonl")[-1]
        assert all(last[f"rank{rank}/peak_host_memory_bytes"] > 0 for rank in range(n))
        one, several = (folder / name / "final" / "model.safetensors" for folder in (of_one, tmp_path))
        assert one.stat().st_size == several.stat().st_size
        one, several = (state_bytes(folder / name) for folder in (of_one, tmp_path))
        assert several < 0.6 * one if parallel == "fsdp" else several == one, name
        assert sorted(path.name for path in (of_one / name).iterdir()) == sorted(
            path.name for path in (tmp_path / name).iterdir()
        )
