"""Sizes of what is shared after a run: a `SparseDelta`, a LoRA adapter of rank 16, a whole checkpoint.

    python -m studies.delta_sizes            # a few minutes on two CPU cores

A model with the shapes of SmolLM2-135M and random weights in bf16, trained for 20 steps of SparseAdamW by gradients
drawn from a normal distribution (learning rate 3e-5, fp32 master weights, 2.5 % of the weights active). How many
bytes a change takes depends on the size of the steps, not on what the model learns.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_opt import MaskSet, SparseAdamW

SHAPE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}


def saved_bytes(saves: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        saves.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def delta_of(base: nn.Module, pattern: str, steps: int) -> Any:
    model, source = copy.deepcopy(base), torch.Generator().manual_seed(2)
    mask = MaskSet.random(model, density=0.025, pattern=pattern, seed=1)
    opt = SparseAdamW(model, mask, lr=3e-5, weight_decay=0.0, master_weights=True, grads="dense")
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=source, dtype=parameter.dtype)
        opt.step()
    return opt.delta()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS)).bfloat16()
    print(f"| {sum(p.numel() for p in base.parameters()) / 1e6:.1f} M weights | MB | bytes a changed weight |")
    print("|---|---:|---:|")
    print(f"| whole checkpoint | {saved_bytes(base) / 1e6:.1f} | |")
    config = peft.LoraConfig(r=16, target_modules="all-linear")
    print(f"| LoRA r16, fp32 | {saved_bytes(peft.get_peft_model(copy.deepcopy(base), config)) / 1e6:.1f} | |")
    for pattern in ("element", "run16", "tile64"):
        delta = delta_of(base, pattern, steps)
        size = saved_bytes(delta)
        print(f"| delta, {pattern} 2.5 %, {delta.changed:,} changed | {size / 1e6:.1f} | {size / delta.changed:.2f} |")


if __name__ == "__main__":
    main()
