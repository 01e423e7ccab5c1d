"""The output layer's weight gradient by tiles: what `linear_logprobs` leaves in an optimizer's compact buffer."""

import copy

import pytest
import torch
from computed import Computed
from small_models import random_sequences, small
from tiled_models import EPS32, assert_same_gradients
from transformers import LlamaConfig

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.optim.gradients.gradient_buffer import GradientBuffer
from sparse_opt.trainers import logprobs as logprobs_package
from sparse_opt.trainers.batches import collate
from sparse_opt.trainers.logprobs import chunked as logprobs_module
from sparse_opt.trainers.logprobs import fused, token_logprobs
from sparse_opt.trainers.logprobs.fused import weight_operand

# Sums of about 100 products in two orders, twice, as errors of a layer reach the one below.
RTOL = 200 * EPS32
N_WORDS = 331  # ragged at the end
SIZES = {"vocab_size": N_WORDS, "hidden_size": 80}


def make(tied, device="cpu", **options):
    """A model with tiles in its output layer, its optimizer, and a twin without."""
    model = small(LlamaConfig, tie_word_embeddings=tied, **SIZES).to(device)
    twin = copy.deepcopy(model)
    mask = MaskSet.random(model, density=0.4, pattern="tile64", seed=0)
    tiles = SparseAdamW(model, mask, tile_backward=True, **options)
    dense = SparseAdamW(twin, mask, tile_backward=False, **options)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert head in tiles.tiled_parameters and not dense.tiled_parameters
    return model, tiles, twin, dense


def loss_of(model, n=5, of=token_logprobs):
    found = of(model, collate(random_sequences(n, N_WORDS), pad_id=0).to(model.device))
    return (found * torch.linspace(-1, 1, found.numel(), device=found.device).view_as(found)).sum()


@pytest.fixture(autouse=True, params=[128, 10**9], ids=["slices of 128", "one slice"])
def least_words(request, monkeypatch):
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs_module, "_LEAST_WORDS", request.param)
    return request.param


@pytest.fixture
def without_parts(monkeypatch):
    """Call it to let a gradient that is computed in parts fail the test."""
    return lambda: monkeypatch.setattr(GradientBuffer, "tile_rows", lambda *_: pytest.fail("computed in parts"))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tiles_of_the_output_layer_over_micro_batches(tied, grad_dtype, device, least_words, without_parts):
    model, tiles, twin, dense = make(tied, device, grad_dtype=grad_dtype, max_grad_norm=1e-3)
    if least_words >= N_WORDS:
        without_parts()
    for n in (5, 3):
        for m in (model, twin):
            loss_of(m, n).backward()
        if grad_dtype == torch.float32:
            assert_same_gradients(tiles, dense, RTOL)
    for optimizer in (tiles, dense):
        optimizer.step()
    # A bf16 buffer rounds each sum, to 2^-9 of it; the norm averages that out.
    rtol = RTOL if grad_dtype == torch.float32 else 2**-9
    torch.testing.assert_close(tiles.grad_norm, dense.grad_norm, rtol=rtol, atol=0)
    for m in (model, twin):  # overwrites
        loss_of(m, 4).backward()
    expected = torch.cat([g.float() for p in model.parameters() if (g := tiles.compact_grad(p)) is not None]).norm()
    torch.testing.assert_close(tiles.clip_grad_norm_(1.0), expected, rtol=100 * EPS32, atol=0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tiles_of_all_logits_at_once(tied, monkeypatch, without_parts):
    """As with compiled layers, but for the compilation."""
    without_parts()
    monkeypatch.setattr(logprobs_package, "has_compiled_layers", lambda model: True)
    monkeypatch.setattr(fused, "compiled", lambda function: function)
    used = []
    monkeypatch.setattr(fused, "weight_operand", lambda *given: (used.append(1), weight_operand(*given))[1])
    model, tiles, twin, dense = make(tied)
    for n in (5, 3):
        for m in (model, twin):
            loss_of(m, n).backward()
        assert_same_gradients(tiles, dense, RTOL)
    assert len(used) == 4


def test_with_tiles_neither_logits_nor_the_dense_gradient_are_made(least_words):
    model, tiles, _, _ = make(tied=False)
    model.model.embed_tokens.weight.requires_grad_(False)  # it has the same shape
    with Computed(model) as made:
        loss_of(model).backward()
    assert tiles.compact_grad(model.lm_head.weight) is not None
    assert tuple(model.lm_head.weight.shape) not in made.shapes
    if least_words < N_WORDS:
        assert not any(N_WORDS in shape[1:] for shape in made.shapes)
