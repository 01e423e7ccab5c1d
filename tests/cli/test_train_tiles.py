"""`sparse-opt train` under a tile mask: the layers make the active tiles of the gradients, and the run is the same."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.cli.quickstart import data as quickstart_data
from sparse_opt.optim.gradients import tile_layers
from sparse_opt.trainers.arithmetic import make_tokenizer

EPS32 = torch.finfo(torch.float32).eps
TILED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.embed_tokens.weight",  # tied to the output layer
)


@pytest.fixture(scope="module")
def run_files(tmp_path_factory):
    """A model whose matrices hold 16 tiles of 64, a mask of one tile of three of its parameters, pairs, prompts."""
    folder = tmp_path_factory.mktemp("tiles")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    mask = {}
    for name in TILED:
        mask[name] = torch.zeros(model.get_parameter(name).shape, dtype=torch.bool)
        mask[name][:64, 64:128] = True
    MaskSet.from_bool(mask).save(folder / "mask.safetensors")
    rows = quickstart_data.preferences(24, random.Random(0))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": row["prompt"], "answer": row["chosen"]} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "tile_rewards.py").write_text(
        "def even(completion_ids, **kwargs):\n    return [sum(i % 2 == 0 for i in ids) / 8 for ids in completion_ids]\n"
    )
    return folder


OWN = {
    "dpo": ("pairs.jsonl", ("--per_device_train_batch_size", 2)),
    "grpo": (
        "prompts.jsonl",
        (
            *("--per_device_train_batch_size", 4, "--num_generations", 4, "--max_completion_length", 6),
            *("--reward_funcs", "tile_rewards.even"),
        ),
    ),
}


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_train_under_a_tile_mask(sparse_opt, run_files, tmp_path, monkeypatch, algorithm):
    monkeypatch.syspath_prepend(run_files)
    dataset, own = OWN[algorithm]
    taken, step = [], SparseAdamW.step

    def seen(self, closure=None):
        taken.append(self.tiled_parameters)
        return step(self, closure)

    monkeypatch.setattr(SparseAdamW, "step", seen)
    ends = []
    for name in ("tiles", "dense"):
        if name == "dense":
            monkeypatch.setattr(tile_layers, "MAX_TILED_DENSITY", {64: 0.0, 128: 0.0})
            monkeypatch.setattr(tile_layers, "MAX_TILED_EMBEDDING_DENSITY", 0.0)
        where = ("--model_name_or_path", run_files / "model", "--dataset_name", run_files / dataset)
        mask = ("--mask", run_files / "mask.safetensors", "--output_dir", tmp_path / name)
        options = "--max_steps 2 --lr_scheduler_type constant --gradient_checkpointing false --report_to none".split()
        sparse_opt("train", algorithm, *where, *mask, *options, *own).done()
        ends.append(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32))
    assert sorted(taken[0]) == sorted(TILED) and taken[0] == taken[1] and taken[2] == taken[3] == ()
    start = AutoModelForCausalLM.from_pretrained(run_files / "model", dtype=torch.float32)
    for name in TILED:
        ours, theirs, before = (m.get_parameter(name) for m in (*ends, start))
        moved = (theirs - before).norm()
        assert moved > 0, name
        # Adam's steps have the size of the learning rate also where a gradient is little more than its rounding error,
        # which is some hundred eps of the largest one: few elements, so the runs agree as a whole.
        assert (ours - theirs).norm() <= 0.01 * moved, name
