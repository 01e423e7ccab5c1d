"""Fixtures that more than one folder uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    needs_gpu = pytest.mark.skip(reason=f"needs a CUDA GPU, and torch {torch.__version__} sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(needs_gpu)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device a test has to pass on; the one that is not there is skipped with its reason."""
    return torch.device(request.param)


@pytest.fixture
def tiny_llama() -> Callable[..., torch.nn.Module]:
    """`tiny_llama(seed=0, dtype=torch.float32, **config)`: a Llama of two layers with random weights, on the CPU.

    About 20 thousand parameters, in the shapes that matter: grouped key-value heads, a gated MLP whose width is no
    multiple of a tile, norms (1-D), embeddings tied or not (`tie_word_embeddings=`). Nothing is downloaded.
    """
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

    def make(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> torch.nn.Module:
        sizes = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **overrides})).to(dtype)

    return make
