"""GRPO teaches a small mixture of experts arithmetic, under a mask of the experts that its data use and under tiles."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparse_opt import MaskSet
from sparse_opt.cli.main import main
from sparse_opt.trainers import grpo, sft
from sparse_opt.trainers.arithmetic import make_arithmetic

pytestmark = pytest.mark.slow


def run(loop, folder: Path, name: str, data: str, model: Path, **options) -> list[dict[str, float]]:
    words = {"model": model, "data": folder / "data" / f"{data}.jsonl", "output_dir": folder / name}
    words |= {"dtype": "fp32", "device": "cpu", **options}
    assert loop.main([word for option, value in words.items() for word in (f"--{option}", str(value))]) == 0
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Sums of numbers up to 9, and `start`, a mixture of experts that often answers right."""
    sizes = {"max_operand": 9, "n_train": 80, "n_test": 10, "n_demonstrations": 4000}
    folder = make_arithmetic(tmp_path_factory.mktemp("worlds") / "sums", **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "moe")
    tokenizer.save_pretrained(folder / "moe")
    run(sft, folder, "start", "demonstrations", folder / "moe", n_steps=300, learning_rate=5e-3, batch_size=32)
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
    rows = run(grpo, world, kind, "train", start, **steps, **options)
    first, last = (sum(row["reward"] for row in of) / len(of) for of in (rows[:5], rows[-5:]))
    # Of 1280 completions each, whose mean has a standard deviation of 0.014.
    assert last > first + 0.08
