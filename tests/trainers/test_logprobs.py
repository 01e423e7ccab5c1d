from __future__ import annotations

import pytest
import torch

from sparse_opt.trainers import logprobs as logprobs_module
from sparse_opt.trainers.encoding import TokenSequence, collate
from sparse_opt.trainers.logprobs import completion_logprobs, selected_logprobs

EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-7}


def random_sequences(n: int, vocabulary: int, seed: int = 0) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(n):
        length = int(torch.randint(6, 30, (), generator=generator))
        prompt = int(torch.randint(0, length - 1, (), generator=generator))
        sequences.append(TokenSequence(torch.randint(vocabulary, (length,), generator=generator).tolist(), prompt))
    return sequences


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


def test_padding_does_not_reach_the_result(model):
    sequences = random_sequences(4, model.config.vocab_size)
    with torch.no_grad():
        one, other = (completion_logprobs(model, collate(sequences, pad_id=pad)) for pad in (0, 7))
    assert torch.equal(one, other)


def test_models_that_give_logits_everywhere(model):
    class EverywhereModel(torch.nn.Module):
        def forward(self, input_ids, attention_mask, use_cache):
            return model(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    batch = collate(random_sequences(4, model.config.vocab_size), pad_id=0)
    with torch.no_grad():
        cut, whole = completion_logprobs(model, batch), completion_logprobs(EverywhereModel(), batch)
    # The output layer multiplies matrices of another height, whose sums over 32 products may be ordered differently.
    torch.testing.assert_close(cut, whole, rtol=0, atol=30 * 6 * 8 * EPS[torch.float32])
