"""The loops `sft`, `dpo` and `grpo`: they learn, train what they are told to, and load few modules."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_models import run
from transformers import AutoModelForCausalLM

from sparse_opt import MaskSet
from sparse_opt.errors import DataError, SparseOptError
from sparse_opt.trainers import dpo, grpo, sft
from sparse_opt.trainers.arithmetic import make_arithmetic
from sparse_opt.trainers.console import Metrics

# One worker makes what the tests of this file share.
pytestmark = pytest.mark.xdist_group("loops")

MODES = {
    "dense": {},
    "sparse": {"density": 0.3},
    "tiles": {"density": 0.5, "pattern": "tile64"},
    "lora": {"lora_rank": 16},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Sums of numbers up to 9, and `start`: a model that answers some of them."""
    sizes = {"max_operand": 9, "n_train": 80, "n_test": 10, "n_demonstrations": 800, "hidden_size": 64}
    folder = make_arithmetic(tmp_path_factory.mktemp("worlds") / "sums", **sizes)
    run(sft.main, folder, "start", data="demonstrations", model="model", n_steps=150, learning_rate=5e-3)
    return folder


def mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


@pytest.mark.parametrize("mode", MODES)
def test_sft_learns(world, mode):
    """The right answers, after demonstrations of which half are wrong."""
    rows = run(sft.main, world, f"sft_{mode}", "preferences", n_steps=40, learning_rate=3e-3, **MODES[mode])
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert mean(rows[-5:], "loss") < 0.9 * mean(rows[:3], "loss")
    assert {"forward_s", "backward_s", "clip_s", "step_s", "grad_norm", "n_tokens"} <= rows[0].keys()


@pytest.mark.parametrize("mode", MODES)
def test_dpo_learns_and_its_first_loss_is_ln_2(world, mode):
    rate = 6e-3 if mode == "lora" else 2e-3  # adapters start at 0
    rows = run(dpo.main, world, f"dpo_{mode}", "preferences", n_steps=60, learning_rate=rate, **MODES[mode])
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-4)
    assert mean(rows[-10:], "loss") < 0.66 and mean(rows[-10:], "accuracy") > 0.6


@pytest.mark.parametrize("mode", MODES)
def test_grpo_learns(world, mode):
    """To write tokens with even ids, by a reward function as TRL calls it."""
    options = {"n_steps": 15, "learning_rate": 3e-3, "max_completion_length": 4, "batch_size": 8, **MODES[mode]}
    rows = run(grpo.main, world, f"grpo_{mode}", "train", reward="token_rewards.even_tokens", **options)
    assert all(row["ratio_error"] == 0 for row in rows)  # one update on each rollout
    assert mean(rows[-3:], "reward") > mean(rows[:3], "reward") + 0.1


def test_a_rollout_is_used_for_several_updates(world):
    options = {"beta": 0.01, "num_iterations": 2, "rows_per_pass": 32, "max_completion_length": 4}
    rows = run(grpo.main, world, "twice", "train", n_steps=2, learning_rate=1e-3, **options)
    assert rows[0]["k3"] > 0 and rows[0]["ratio_error"] > 0  # of the second update on the first rollout
    assert 0 <= rows[0]["reward"] < 0.5  # exact_match, of a model that knows few sums
    assert {"rollout_s", "reward_s", "reference_s"} <= rows[0].keys()


def test_only_the_mask_is_trained(world, tmp_path):
    start = load_file(world / "start" / "model" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(world / "start" / "model")
    mask = MaskSet.random(model, density=0.2, seed=5)
    file = mask.save(tmp_path / "mask.safetensors")
    run(dpo.main, world, "masked", "preferences", mask=file, n_steps=3, learning_rate=1e-3)
    trained, moved = load_file(world / "masked" / "model" / "model.safetensors"), 0
    for name, before in start.items():
        differs = (trained[name] != before).view(-1)
        moved += int(differs.sum())
        if name in mask.names:
            differs[mask[name].long()] = False
        assert not differs.any(), name
    assert moved > 0.9 * mask.nnz


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 4, "accumulation": 2},
        {"precomputed_reference": True},
        {"share_prompts": True},
        {"pad_to_multiple_of": 16},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_same_steps_in_another_way(world, changes):
    name = "-".join(changes)
    options = {"batch_size": 8, "n_steps": 4, "learning_rate": 1e-3, "density": 0.3}
    plain = run(dpo.main, world, f"plain-{name}", "preferences", **options)
    other = run(dpo.main, world, name, "preferences", **options | changes)
    for row, same in zip(other, plain, strict=True):
        for metric in ("loss", "grad_norm", "margin"):
            assert row[metric] == pytest.approx(same[metric], rel=1e-3, abs=2e-5), metric


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_grpo_with_shared_prompts_is_that_without(world, mode):
    options = {"n_steps": 3, "learning_rate": 1e-3, "max_completion_length": 4, "batch_size": 4, "beta": 0.1}
    alone, shared = (
        run(grpo.main, world, f"shared_{mode}_{on}", "train", share_prompts=on, **options, **MODES[mode])
        for on in (False, True)
    )
    for row, same in zip(shared, alone, strict=True):
        assert row["ratio_error"] == 0  # the old log-probabilities come from the same rows
        for metric in ("loss", "grad_norm", "reward", "length"):
            assert row[metric] == pytest.approx(same[metric], rel=1e-3, abs=1e-5), metric


def test_the_same_seed_is_the_same_run(world):
    options = {"n_steps": 3, "max_completion_length": 4, "learning_rate": 1e-3, "density": 0.3}
    one, again, other = (
        [row["loss"] for row in run(grpo.main, world, f"seed_{i}", "train", seed=seed, **options)]
        for i, seed in enumerate((1, 1, 2))
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mask m.safetensors --lora_rank 2", "options mask m.safetensors, lora_rank 2: give one of them"),
        ("--density 1e-9", "density 1e-09 is less than one unit of element in each tensor"),
        ("--device tpu", "option 'device' is 'tpu': expected auto, cpu, cuda or cuda:N"),
        ("--output_dir .", r"option 'output_dir': \. exists and is not empty"),
    ],
)
def test_a_wrong_call_is_one_line_and_leaves_nothing(model_folder, pairs_file, tmp_path, capsys, words, message):
    argv = ["--model", str(model_folder), "--data", str(pairs_file), "--output_dir", str(tmp_path / "run")]
    assert dpo.main([*argv, *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert re.search(message, err), err
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_an_unknown_option_is_named(capsys):
    with pytest.raises(SystemExit) as raised:
        sft.main(["--model", "m", "--data", "d", "--output_dir", "o", "--learning", "1"])
    assert raised.value.code == 2 and "unknown arguments: --learning 1" in capsys.readouterr().err


def test_tokens_without_an_embedding_are_named(tmp_path, model_folder, pairs_file):
    small = AutoModelForCausalLM.from_pretrained(model_folder)
    small.resize_token_embeddings(100)
    small.save_pretrained(tmp_path / "small")
    for file in model_folder.glob("token*"):
        (tmp_path / "small" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match=r"the data has token \d+ .* the model has embeddings for 100 of"):
        sft.train(sft.SFTConfig(str(tmp_path / "small"), str(pairs_file), tmp_path / "run", device="cpu"))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    metrics = Metrics(tmp_path / "run", 3)
    metrics.write(1, {"loss": torch.tensor(0.5)}, {"forward": 0.1})
    with pytest.raises(SparseOptError, match="step 2: loss is nan: lower the learning rate"):
        metrics.write(2, {"loss": torch.tensor(float("nan"))}, {})
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5, "forward_s": 0.1}
    assert capsys.readouterr().out == "step 1/3: loss 0.5; 0 s left\n"


# A loop loads what it uses: not the inference engines, nor the transport of weights to them.
def test_a_loop_loads_few_modules():
    code = """
import sys
import sparse_opt.trainers.grpo
print(*(name for name in sys.modules if name.partition('.')[0] in ("sparse_opt", "trl", "vllm", "datasets")))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "sparse_opt.trainers.grpo" in found and len(found) <= 90, sorted(found)
    foreign = ("trl", "vllm", "datasets", "sparse_opt.weight_sync", "sparse_opt.integrations.vllm")
    assert [module for module in found if module.startswith(foreign)] == []
