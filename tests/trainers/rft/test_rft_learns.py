"""A round of rejection sampling on generated arithmetic, from a model that is right now and then."""

from __future__ import annotations

import pytest

from sparse_opt.trainers import sft
from sparse_opt.trainers.arithmetic import make_arithmetic
from sparse_opt.trainers.rft import train as rft


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(folder of the arithmetic, model after SFT on demonstrations, half of them wrong)."""
    world = make_arithmetic(
        tmp_path_factory.mktemp("world") / "arithmetic",
        max_operand=9,
        n_train=80,
        n_test=20,
        n_demonstrations=4000,
        hidden_size=96,
        n_layers=2,
    )
    config = sft.SFTConfig(
        policy_name=str(world / "model"),
        dataset=str(world / "data/demonstrations.jsonl"),
        output_dir=world / "sft",
        device="cpu",
        dtype="fp32",
        batch_size=64,
        n_steps=150,
        learning_rate=3e-3,
        warmup_steps=10,
        sample_steps=None,
    )
    return world, sft.train(config)["checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seeds"), [("dense", (0, 1, 2)), ("sparse", (0,))])
def test_rft_raises_accuracy(start, tmp_path, mode, seeds):
    world, model = start
    prompts = {
        "dataset": str(world / "data/train.jsonl"),
        "device": "cpu",
        "dtype": "fp32",
        "reward_functions": ["exact_match"],
        "max_completion_length": 4,
        "prompts_per_batch": 80,
    }

    def accuracy(policy, name, seed):
        config = rft.TestConfig(
            **prompts, policy_name=policy, output_dir=tmp_path / name, n_generations=8, temperature=1.0, seed=seed
        )
        return rft.test(config)["accuracy"]

    gains = []
    for seed in seeds:
        data = rft.datagen(
            rft.DatagenConfig(**prompts, policy_name=model, output_dir=tmp_path / f"data_{seed}", seed=seed)
        )
        trained = rft.train(
            rft.RFTConfig(
                policy_name=model,
                dataset=data["kept_file"],
                output_dir=tmp_path / f"rft_{seed}",
                mount_dir=tmp_path,
                device="cpu",
                dtype="fp32",
                mode=mode,
                mask_density=0.2,
                batch_size=32,
                n_steps=60,
                learning_rate=1e-3 if mode == "dense" else 5e-3,
                sample_steps=None,
                seed=seed,
            )
        )
        gains.append(accuracy(trained["checkpoint"], f"after_{seed}", seed) - accuracy(model, f"before_{seed}", seed))
    # 640 sampled answers a side: three standard errors of a difference of shares are at most 3 * sqrt(2 / 4 / 640).
    assert min(gains) > 3 * (2 / 4 / 640) ** 0.5, gains
