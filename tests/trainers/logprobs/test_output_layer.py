"""Detection of models whose logits are their output layer's product, on any thread and under any hooks."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from small_models import EPS, assert_same_gradients, grads_of, plain_logprobs, random_sequences, small
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from sparse_opt.trainers import logprobs as logprobs_module
from sparse_opt.trainers.batches import collate
from sparse_opt.trainers.logprobs import output_layer, token_logprobs
from sparse_opt.trainers.logprobs.chunked import selected_logprobs


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (Gemma2Config, {"final_logit_softcapping": 2.0, "head_dim": 8}),
        (CohereConfig, {"logit_scale": 0.25}),
        (GPTJConfig, {"rotary_dim": 8}),  # a bias
    ],
    ids=["soft-capping", "scale", "bias"],
)
def test_a_model_that_does_more_than_a_product_keeps_its_own_logits(config_class, changes):
    model = small(config_class, **changes)
    batch = collate(random_sequences(5, 211), pad_id=0)
    expected = plain_logprobs(model, batch)
    expected_grads = grads_of(model, expected)
    for _ in range(2):  # the first call finds out, the second remembers
        found = token_logprobs(model, batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=30 * 8 * EPS[torch.float32])
        assert_same_gradients(grads_of(model, found), expected_grads)
    assert "forward" not in vars(model.get_output_embeddings())


def test_an_output_layer_that_is_not_bare_is_left_in_the_model():
    def forward(self, args, output):
        return 3 * output

    model = small(LlamaConfig)
    batch = collate(random_sequences(3, 211), pad_id=0)
    bare = token_logprobs(model, batch)
    handle = model.get_output_embeddings().register_forward_hook(forward)
    torch.testing.assert_close(token_logprobs(model, batch), plain_logprobs(model, batch))
    assert not torch.allclose(token_logprobs(model, batch), bare)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(token_logprobs(model, batch), plain_logprobs(model, batch))


@pytest.fixture
def all_logits(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the logits that were taken from a model."""
    shapes = []

    def counted(logits, *args):
        shapes.append(tuple(logits.shape))
        return selected_logprobs(logits, *args)

    monkeypatch.setattr(logprobs_module, "selected_logprobs", counted)
    return shapes


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "not reentrant"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("config_class", [LlamaConfig, GPT2Config])
def test_a_plain_model_is_found_to_be_one(all_logits, caplog, config_class, tied, checkpointing):
    dropout = {} if config_class is LlamaConfig else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = small(config_class, tie_word_embeddings=tied, **dropout).train()
    batch = collate(random_sequences(5, 211), pad_id=0)
    expected_grads = grads_of(model, plain_logprobs(model, batch))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient
    found_grads = grads_of(model, token_logprobs(model, batch))
    assert_same_gradients(found_grads, expected_grads)
    assert not all_logits and not caplog.records


class WithLogits(LlamaForCausalLM):
    """Does something with its logits before it gives them out."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        self.kept = self.work(output.logits)
        return output


def with_logits_in(model, work):
    model.__class__, model.work = WithLogits, work
    return model


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.mark_dirty(logits)
        return logits.mul_(0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def scaled(logits):
    logits.mul_(0.5)


def without_some_words(logits):
    logits[:, :, 190:] = -torch.inf


@pytest.mark.parametrize("work", [scaled, without_some_words, Halved.apply], ids=["scale", "words", "own function"])
def test_a_model_that_edits_its_logits_in_place_keeps_them(all_logits, work):
    model = with_logits_in(small(LlamaConfig), work)
    batch = collate(random_sequences(5, 190), pad_id=0)
    expected = plain_logprobs(model, batch)
    expected_grads = grads_of(model, expected)
    found = token_logprobs(model, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=30 * 8 * EPS[torch.float32])
    assert_same_gradients(grads_of(model, found), expected_grads)
    assert len(all_logits) == 1


@pytest.mark.parametrize(
    "work",
    [
        lambda logits: logits.logsumexp(-1).mean(),
        lambda logits: torch.cat([logits, logits]),
        lambda logits: logits.detach().cpu().numpy().sum(),
        lambda logits: torch._C._nn.log_sigmoid(logits),
    ],
    ids=["a mean", "in a list", "numpy", "below the Python functions"],
)
def test_a_model_that_computes_with_its_logits_gets_them(all_logits, work):
    model = with_logits_in(small(LlamaConfig), work)
    batch = collate(random_sequences(3, 211), pad_id=0)
    with torch.no_grad():
        token_logprobs(model, batch)
        kept = model.kept
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    torch.testing.assert_close(kept, model.kept)
    assert len(all_logits) == 1


def test_two_threads_with_one_model(all_logits, caplog):
    both = threading.Barrier(2, timeout=30)

    def wait_for_other(module, args):
        both.wait()

    model = small(LlamaConfig)
    batch = collate(random_sequences(3, 211), pad_id=0)
    expected = plain_logprobs(model, batch).detach()
    model.model.register_forward_pre_hook(wait_for_other)  # both are in the model at once
    found = []
    threads = [threading.Thread(target=lambda: found.append(token_logprobs(model, batch).detach())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for logprobs in found:
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=30 * 8 * EPS[torch.float32])
    assert "forward" not in vars(model.lm_head) and not caplog.records


def test_a_hook_that_is_taken_away_is_forgotten(all_logits, caplog):
    model = small(LlamaConfig)
    batch = collate(random_sequences(3, 211), pad_id=0)
    bare = token_logprobs(model, batch)
    assert not all_logits
    forwards = []
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    for times in (1, 2):  # a second hook is found out anew
        hook = model.register_forward_hook(lambda module, args, output: setattr(output, "logits", 3 * output.logits))
        forwards.clear()
        with caplog.at_level(logging.WARNING):
            first, second = token_logprobs(model, batch), token_logprobs(model, batch)
        torch.testing.assert_close(first, plain_logprobs(model, batch))
        assert torch.equal(first, second) and not torch.allclose(first, bare)
        assert len(forwards) == 4  # two, one, and one for the comparison: it is remembered while the hook is there
        assert len(all_logits) == 2 * times
        hook.remove()
        assert torch.equal(token_logprobs(model, batch), bare)
        assert len(all_logits) == 2 * times
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.name == output_layer.__name__
    assert "LlamaForCausalLM" in record.message and "memory" in record.message and "\n" not in record.message
