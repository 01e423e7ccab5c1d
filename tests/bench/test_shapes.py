"""The weight shapes that the benchmarks use."""

import pytest
import torch

from sparse_opt.bench.shapes import LLAMA_3_2_3B, LLAMA_64M, scaled, total_numel

HIDDEN, N_NORMS = 3072, 57  # two norm vectors a layer, and the last one


def test_names_and_shapes_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=HIDDEN,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert {n: tuple(p.shape) for n, p in model.named_parameters() if p.dim() == 2} == LLAMA_3_2_3B


@pytest.mark.parametrize("numel", [100_000, 1_000_000, 1_000_000_000])
def test_scaling_keeps_the_matrices_and_reaches_the_size(numel):
    small = scaled(LLAMA_3_2_3B, numel)
    assert list(small) == list(LLAMA_3_2_3B)
    assert total_numel(small) == pytest.approx(numel, rel=0.1)
    assert scaled(LLAMA_64M, total_numel(LLAMA_64M)) == LLAMA_64M
