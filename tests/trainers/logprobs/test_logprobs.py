"""Log-probabilities in slices; and models whose logits are, or are not, their output layer's product."""

import copy
import logging
import threading

import pytest
import torch
from computed import Computed
from small_models import EPS, Head, assert_same_gradients, grads_of, plain_logprobs, random_sequences, small
from transformers import CohereConfig, Gemma2Config, GPT2Config, GPTJConfig, LlamaConfig, LlamaForCausalLM

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.trainers import logprobs as logprobs_package
from sparse_opt.trainers.batches import collate
from sparse_opt.trainers.logprobs import chunked as logprobs_module
from sparse_opt.trainers.logprobs import completion_logprobs, output_layer, token_logprobs
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

    monkeypatch.setattr(logprobs_package, "selected_logprobs", counted)
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


# A model that does more than a product, or edits its logits in place.
OWN_LOGITS = {
    "soft-capping": lambda: small(Gemma2Config, final_logit_softcapping=2.0, head_dim=8),
    "scale": lambda: small(CohereConfig, logit_scale=0.25),
    "bias": lambda: small(GPTJConfig, rotary_dim=8),
    "scale in place": lambda: with_logits_in(small(LlamaConfig), scaled),
    "words in place": lambda: with_logits_in(small(LlamaConfig), without_some_words),
    "own function in place": lambda: with_logits_in(small(LlamaConfig), Halved.apply),
}


@pytest.mark.parametrize("name", OWN_LOGITS)
def test_a_model_with_logits_of_its_own_keeps_them(all_logits, name):
    model = OWN_LOGITS[name]()
    batch = collate(random_sequences(5, 190), pad_id=0)
    expected = plain_logprobs(model, batch)
    expected_grads = grads_of(model, expected)
    for n in (1, 2):  # the first call finds out, the second remembers
        found = token_logprobs(model, batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=30 * 8 * EPS[torch.float32])
        assert_same_gradients(grads_of(model, found), expected_grads)
        assert len(all_logits) == n
    assert "forward" not in vars(model.get_output_embeddings())


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
