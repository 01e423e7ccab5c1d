"""Sizes of the models of the benchmarks, and the shapes of weight matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping

Shapes = dict[str, tuple[int, int]]


def llama_matrices(
    *, hidden: int, intermediate: int, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, vocab: int
) -> Shapes:
    """Name -> shape of the matrices of a Llama with tied embeddings, named as transformers names them.

    Norm vectors are left out: they are 0.006 % of a 3B model, and sparse training masks matrices.
    """
    queries, keys = n_heads * head_dim, n_kv_heads * head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(n_layers):
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


# 197 matrices, 3.21 B elements. https://huggingface.co/meta-llama/Llama-3.2-3B/blob/main/config.json
LLAMA_3_2_3B_SIZES = {
    "hidden": 3072,
    "intermediate": 8192,
    "n_layers": 28,
    "n_heads": 24,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab": 128256,
}
LLAMA_3_2_3B = llama_matrices(**LLAMA_3_2_3B_SIZES)

# 70.6 B elements, output layer not tied. https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json
LLAMA_3_70B_SIZES = {
    "hidden": 8192,
    "intermediate": 28672,
    "n_layers": 80,
    "n_heads": 64,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab": 128256,
}

# 8.03 B elements, output layer not tied. https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
LLAMA_3_1_8B_SIZES = {
    "hidden": 4096,
    "intermediate": 14336,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab": 128256,
}

# 14.8 B elements, output layer not tied. https://huggingface.co/Qwen/Qwen2.5-14B/blob/main/config.json
QWEN_2_5_14B_SIZES = {
    "hidden": 5120,
    "intermediate": 13824,
    "n_layers": 48,
    "n_heads": 40,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab": 152064,
}

# 30.5 B elements, output layer not tied. https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
QWEN3_30B_A3B_SIZES = {
    "hidden": 2048,
    "expert_intermediate": 768,
    "experts": 128,
    "experts_per_token": 8,
    "n_layers": 48,
    "n_heads": 32,
    "n_kv_heads": 4,
    "head_dim": 128,
    "vocab": 151936,
}
# 32.8 B elements, output layer not tied. https://huggingface.co/Qwen/Qwen2.5-32B/blob/main/config.json
QWEN_2_5_32B_SIZES = {**QWEN_2_5_14B_SIZES, "intermediate": 27648, "n_layers": 64}
# Whole tiles of 64 by 64, as many tokens as `word_tokenizer` has, and so few weights that everything runs on a CPU.
TINY_SIZES = {
    "hidden": 256,
    "intermediate": 512,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "vocab": 2048,
}

# 85 matrices, 64 M elements: a small language model's proportions.
LLAMA_64M = llama_matrices(
    hidden=512, intermediate=2048, n_layers=12, n_heads=8, n_kv_heads=4, head_dim=64, vocab=32768
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
