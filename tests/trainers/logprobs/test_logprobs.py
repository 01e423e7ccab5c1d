from __future__ import annotations

import copy

import pytest
import torch
from small_models import (
    EPS,
    Head,
    assert_same_gradients,
    grads_of,
    plain_logprobs,
    random_sequences,
    small,
    with_logits,
)
from torch.utils._python_dispatch import TorchDispatchMode
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


def test_models_that_give_logits_everywhere(model):
    class EverywhereModel(torch.nn.Module):
        def forward(self, input_ids, attention_mask, use_cache):
            return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    batch = collate(random_sequences(4, model.config.vocab_size), pad_id=0)
    with torch.no_grad():
        cut, whole = completion_logprobs(model, batch), completion_logprobs(EverywhereModel(), batch)
    # The output layer multiplies matrices of another height, whose sums over 32 products may be ordered differently.
    torch.testing.assert_close(cut, whole, rtol=0, atol=30 * 6 * 8 * EPS[torch.float32])


@pytest.fixture(params=[1, 28 * 64, 10**9], ids=["slices of 1", "slices of 64", "one slice"])
def chunk_elements(request, monkeypatch):
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", request.param)
    monkeypatch.setattr(logprobs_module, "_LEAST_WORDS", 1)
    return request.param


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_linear_logprobs_in_fp32_are_exact(chunk_elements, temperature):
    head = Head(torch.float32, temperature)
    eps = EPS[torch.float32]
    scale = 60 / temperature  # the largest logit; it is a sum of 24 products, each rounded
    found, grad_hidden, grad_weight = head.run(linear_logprobs)
    torch.testing.assert_close(found.double(), head.selected, rtol=0, atol=24 * scale * eps)
    # A probability's relative error is its exponent's error; sums of 300 and 28 of them times values of about 4.
    torch.testing.assert_close(grad_hidden.double(), head.grads[0], rtol=0, atol=24 * scale * eps * 4)
    torch.testing.assert_close(grad_weight.double(), head.grads[1], rtol=0, atol=24 * scale * eps * 28)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_linear_logprobs_in_bf16_are_as_good_as_a_linear_layer_with_all_logits(chunk_elements, temperature):
    head = Head(torch.bfloat16, temperature)
    exact = [head.selected, *head.grads]
    for ours, theirs, true in zip(head.run(linear_logprobs), head.run(with_logits), exact, strict=True):
        assert ours.dtype == theirs.dtype
        # Both round the logits to bf16; after that each rounds probabilities to bf16 once, before or after it applies
        # the gradient that comes in.
        assert (ours - true).norm() <= 2 * (theirs - true).norm()


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_never_makes_all_its_logits(monkeypatch, tied):
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs_module, "_LEAST_WORDS", 50)
    model = small(LlamaConfig, tie_word_embeddings=tied)
    batch = collate(random_sequences(5, 211), pad_id=0)
    expected = plain_logprobs(model, batch, 0.9)
    expected_grads = grads_of(model, expected)

    class Widths(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
            for tensor in tensors:
                # A stand-in has the logits' shape, and the memory of one element.
                if tensor.dim() and tensor.untyped_storage().nbytes() > 4:
                    made.append(tuple(tensor.shape))
            return out

    made: list[tuple[int, ...]] = []
    with Widths():
        found = token_logprobs(model, batch, 0.9)
        found_grads = grads_of(model, found)
    # The widest is a slice of words, or the weight itself, [211, 32], and its transpose.
    assert {shape for shape in made if 211 in shape} <= {(211, 32), (32, 211)}
    assert any(shape[-1] == 50 for shape in made)
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
