"""Sizes of the models of the benchmarks, and the shapes of weight matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's family and sizes, as its configuration on the Hugging Face hub has them."""

    family: Literal["llama", "qwen2", "qwen3_moe"] = "llama"
    hidden: int
    intermediate: int  # of an expert, if there are any
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int = 128
    vocab: int = 128256
    tied: bool = False  # whether the output layer's weight is the embedding
    experts: int = 0
    experts_per_token: int = 0


# From huggingface.co/NAME/blob/main/config.json.
SHAPES = {
    # meta-llama/Llama-3.2-3B: 3.21 B elements in 197 matrices. Llama-3.1-8B: 8.03 B
    "3b": Shape(hidden=3072, intermediate=8192, n_layers=28, n_heads=24, n_kv_heads=8, tied=True),
    "8b": Shape(hidden=4096, intermediate=14336, n_layers=32, n_heads=32, n_kv_heads=8),
    # Qwen/Qwen2.5-14B: 14.8 B elements. Qwen2.5-32B: 32.8 B
    "14b": Shape(family="qwen2", hidden=5120, intermediate=13824, n_layers=48, n_heads=40, n_kv_heads=8, vocab=152064),
    "32b": Shape(family="qwen2", hidden=5120, intermediate=27648, n_layers=64, n_heads=40, n_kv_heads=8, vocab=152064),
    # Qwen/Qwen3-30B-A3B: 30.5 B elements
    "qwen3_30b_a3b": Shape(
        family="qwen3_moe",
        hidden=2048,
        intermediate=768,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        vocab=151936,
        experts=128,
        experts_per_token=8,
    ),
    # meta-llama/Meta-Llama-3-70B: 70.6 B elements
    "70b": Shape(hidden=8192, intermediate=28672, n_layers=80, n_heads=64, n_kv_heads=8),
    # Whole tiles of 64 by 64, as many tokens as `word_tokenizer` has, and so few weights that all runs on a CPU.
    "tiny": Shape(
        hidden=256, intermediate=512, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, vocab=2048, tied=True
    ),
}
SHAPES["tiny_qwen2"] = replace(SHAPES["tiny"], family="qwen2", tied=False)
SHAPES["tiny_moe"] = replace(
    SHAPES["tiny"], family="qwen3_moe", intermediate=128, tied=False, experts=8, experts_per_token=2
)
# Qwen3-30B-A3B with more layers, 61.7 B elements: no published mixture of experts whose class transformers
# has is larger than 58 B and fits one GPU of 141 GB.
SHAPES["qwen3_a3b_98_layers"] = replace(SHAPES["qwen3_30b_a3b"], n_layers=98)
LLAMAS = tuple(name for name, shape in SHAPES.items() if shape.family == "llama")


def llama_matrices(shape: Shape) -> Shapes:
    """Name -> shape of the matrices of a Llama with tied embeddings, named as transformers names them.

    Norm vectors are left out: they are 0.006 % of a 3B model, and sparse training masks matrices.
    """
    queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    hidden, intermediate = shape.hidden, shape.intermediate
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for layer in range(shape.n_layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (queries, hidden),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.v_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, queries),
            f"{name}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{name}.mlp.up_proj.weight": (intermediate, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, intermediate),
        }
    return shapes


LLAMA_3_2_3B = llama_matrices(SHAPES["3b"])
# 85 matrices, 64 M elements: a small language model's proportions.
LLAMA_64M = llama_matrices(
    Shape(hidden=512, intermediate=2048, n_layers=12, n_heads=8, n_kv_heads=4, head_dim=64, vocab=32768)
)

# Elements of a case of `pytest bench`. CPU: larger than most caches, a minute or two on two cores. GPU: larger than the
# L2, because checking many small sets of buffers, rotated past the L2, takes longer than timing them.
SUITE_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}


def total_numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The total number of elements of all matrices."""
    return sum(math.prod(shape) for shape in shapes.values())


def scaled(shapes: Shapes, numel: int) -> Shapes:
    """The same matrices with every dimension multiplied by one factor, so that they hold about ``numel`` elements."""
    factor = math.sqrt(numel / total_numel(shapes))
    return {name: (max(1, round(rows * factor)), max(1, round(cols * factor))) for name, (rows, cols) in shapes.items()}
