"""GRPO teaches a small mixture of experts arithmetic, under a mask of the experts that its data use and under tiles."""

from pathlib import Path

import pytest
from moe_models import moe_model
from small_models import run
from transformers import AutoTokenizer

from sparse_opt import MaskSet
from sparse_opt.cli.main import main
from sparse_opt.trainers import grpo, sft
from sparse_opt.trainers.arithmetic import make_arithmetic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Sums of numbers up to 9, and `start`, a mixture of experts that often answers right."""
    sizes = {"max_operand": 9, "n_train": 80, "n_test": 10, "n_demonstrations": 4000}
    folder = make_arithmetic(tmp_path_factory.mktemp("worlds") / "sums", **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    moe_model("qwen3", vocab_size=len(tokenizer), num_experts=8, **ids).save_pretrained(folder / "moe")
    tokenizer.save_pretrained(folder / "moe")
    run(sft.main, folder, "start", "demonstrations", "moe", n_steps=300, learning_rate=5e-3, batch_size=32)
    return folder


@pytest.mark.parametrize("kind", ["experts", "tiles"])
def test_grpo_learns_sums(world, kind):
    start = world / "start" / "model"
    if kind == "experts":
        mask = world / "experts.safetensors"
        words = f"--method experts --model_name {start} --dataset {world}/data/preferences.jsonl --n_samples 16"
        assert main(["mask", "find", *words.split(), "--experts_per_layer", "3", "--output", str(mask)]) == 0
        assert MaskSet.load(mask).density == 3 / 8
        options = {"mask": mask}
    else:
        options = {"density": 0.4, "pattern": "tile64"}
    steps = {"n_steps": 60, "learning_rate": 6e-3, "batch_size": 32, "max_completion_length": 4}
    rows = run(grpo.main, world, kind, "train", **steps, **options)
    first, last = (sum(row["reward"] for row in of) / len(of) for of in (rows[:5], rows[-5:]))
    # Of 1280 completions each, whose mean has a standard deviation of 0.014.
    assert last > first + 0.08
