"""A Llama of two layers with random weights; nothing is downloaded."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> LlamaForCausalLM:
    """On the CPU; about 20 thousand parameters.

    It has the relevant shapes: grouped key-value heads, a gated MLP whose width is not a multiple of a tile, norms
    (1-D), embeddings tied or not (`tie_word_embeddings=`).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**SIZES, **overrides})).to(dtype)
