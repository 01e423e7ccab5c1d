from __future__ import annotations

import copy

import pytest
import torch
from computed import Computed
from small_models import (
    EPS,
    Head,
    assert_same_gradients,
    grads_of,
    plain_logprobs,
    random_sequences,
    small,
)
from transformers import LlamaConfig

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.trainers.batches import collate
from sparse_opt.trainers.logprobs import chunked as logprobs_module
from sparse_opt.trainers.logprobs import completion_logprobs, token_logprobs
from sparse_opt.trainers.logprobs.chunked import linear_logprobs, selected_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [1, 5 * 37, 10**9])
def test_selected_logprobs_equals_log_softmax_and_its_gradient(monkeypatch, dtype, chunk_elements):
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = (torch.randn(3, 4, 37) * 5).to(dtype).requires_grad_()
    labels = torch.randint(37, (3, 4))
    weight = torch.randn(3, 4)
    ours = selected_logprobs(logits, labels)
    (ours * weight).sum().backward()
    exact = logits.detach().double().requires_grad_()
    theirs = exact.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    (theirs * weight).sum().backward()
    assert ours.dtype == torch.float32
    # A sum of 37 exponentials, a logarithm and a subtraction of numbers up to 20, each rounded to fp32.
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=40 * 20 * EPS[torch.float32])
    # The gradient is rounded once to the logits' dtype, after fp32 arithmetic of the same length.
    tolerance = EPS[dtype] + 40 * 20 * EPS[torch.float32]
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=40 * 20 * EPS[torch.float32])


def test_sums_over_completion_tokens_only(model):
    sequences = random_sequences(5, model.config.vocab_size)
    with torch.no_grad():
        batched = completion_logprobs(model, collate(sequences, pad_id=0))
        expected = []
        for sequence in sequences:  # one by one, without padding, over all positions
            ids = torch.tensor([sequence.ids])
            table = model(ids).logits[0].double().log_softmax(-1)
            first = max(sequence.prompt_length, 1)
            expected.append(sum(table[t - 1, sequence.ids[t]] for t in range(first, len(sequence.ids))))
    # Up to 30 terms of about 6 in fp32, from logits that another batch shape rounds differently in a few operations.
    torch.testing.assert_close(batched.double(), torch.stack(expected), rtol=0, atol=30 * 6 * 8 * EPS[torch.float32])


@pytest.fixture(params=[1, 28 * 64, 10**9], ids=["slices of 1", "slices of 64", "one slice"])
def chunk_elements(request, monkeypatch):
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", request.param)
    monkeypatch.setattr(logprobs_module, "_LEAST_WORDS", 1)
    return request.param


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_linear_logprobs_in_fp32_are_exact(chunk_elements, temperature):
    Head(torch.float32, temperature).assert_exact(linear_logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_linear_logprobs_in_bf16_are_as_good_as_a_linear_layer_with_all_logits(chunk_elements, temperature):
    Head(torch.bfloat16, temperature).assert_as_good_as_all_logits(linear_logprobs)


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_never_makes_all_its_logits(monkeypatch, tied):
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs_module, "_LEAST_WORDS", 50)
    model = small(LlamaConfig, tie_word_embeddings=tied)
    batch = collate(random_sequences(5, 211), pad_id=0)
    expected = plain_logprobs(model, batch, 0.9)
    expected_grads = grads_of(model, expected)

    with Computed(model) as computed:
        found = token_logprobs(model, batch, 0.9)
        found_grads = grads_of(model, found)
    # The widest is a slice of words, or the weight's gradient, [211, 32], and its transpose.
    assert {shape for shape in computed.shapes if 211 in shape} <= {(211, 32), (32, 211)}
    assert any(shape[-1] == 50 for shape in computed.shapes)
    torch.testing.assert_close(found, expected, rtol=0, atol=30 * 8 * EPS[torch.float32])
    assert_same_gradients(found_grads, expected_grads)


def test_the_weight_gradient_comes_last_and_once():
    model = small(LlamaConfig, tie_word_embeddings=True)
    arrived = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    token_logprobs(model, collate(random_sequences(3, 211), pad_id=0)).sum().backward()
    assert len(arrived) == len(set(arrived)) == len(list(model.parameters()))
    assert arrived[-1] == "model.embed_tokens.weight"
    untied = small(LlamaConfig, tie_word_embeddings=False)
    for name, parameter in untied.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    arrived.clear()
    token_logprobs(untied, collate(random_sequences(3, 211), pad_id=0)).sum().backward()
    assert arrived[-1] == "lm_head.weight"  # after all of the model's own


def test_compact_gradients_are_those_of_the_plain_computation():
    model = small(LlamaConfig, tie_word_embeddings=True)
    batch = collate(random_sequences(5, 211), pad_id=0)
    twin = copy.deepcopy(model)
    expected = grads_of(twin, plain_logprobs(twin, batch))
    mask = MaskSet.random(model, density=0.3, seed=0)
    optimizer = SparseAdamW(model.named_parameters(), mask)
    found = token_logprobs(model, batch)
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        compact = optimizer.compact_grad(parameter)
        active = expected[name].view(-1)[mask[name].long()]
        torch.testing.assert_close(compact, active, rtol=0, atol=200 * 2**-23 * expected[name].abs().max().item())
