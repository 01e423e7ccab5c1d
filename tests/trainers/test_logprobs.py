from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.trainers import logprobs as logprobs_module
from sparse_opt.trainers.encoding import TokenBatch, TokenSequence, collate
from sparse_opt.trainers.logprobs import completion_logprobs, linear_logprobs, selected_logprobs, token_logprobs

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


def plain_logprobs(model, batch: TokenBatch, temperature: float = 1.0) -> torch.Tensor:
    """What `token_logprobs` stands for, with all logits at once."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    table = (logits[:, batch.first_trained - 1 : -1].float() / temperature).log_softmax(-1)
    selected = table.gather(-1, batch.input_ids[:, batch.first_trained :, None])[..., 0]
    return torch.where(batch.completion_mask[:, batch.first_trained :], selected, 0.0)


class Head:
    """Hidden states, a weight and labels with their exact log-probabilities and gradients, in fp64."""

    def __init__(self, dtype: torch.dtype, temperature: float, n_words: int = 300, n_confident: int = 5):
        torch.manual_seed(0)
        self.weight = torch.randn(n_words, 24).to(dtype)
        self.labels = torch.randint(n_words, (4, 7))
        self.hidden = torch.randn(4, 7, 24)
        # A policy is often nearly certain: hidden states along a word's own weight make its probability 1 - 1e-6 or so.
        words = self.labels.view(-1)[:n_confident]
        self.hidden.view(-1, 24)[:n_confident] = temperature * 1.2 * self.weight[words].float()
        self.hidden = self.hidden.to(dtype)
        self.upstream = torch.randn(4, 7)
        exact = [tensor.double().requires_grad_() for tensor in (self.hidden, self.weight)]
        table = (exact[0] @ exact[1].T / temperature).log_softmax(-1)
        self.selected = table.gather(-1, self.labels[..., None])[..., 0]
        self.grads = torch.autograd.grad((self.selected * self.upstream).sum(), exact)
        self.temperature = temperature

    def run(self, logprobs) -> list[torch.Tensor]:
        """[log-probabilities, d hidden, d weight] of `logprobs(hidden, weight, labels, temperature)`."""
        leaves = [tensor.clone().requires_grad_() for tensor in (self.hidden, self.weight)]
        found = logprobs(*leaves, self.labels, self.temperature)
        return [found, *torch.autograd.grad((found * self.upstream).sum(), leaves)]


def with_logits(hidden, weight, labels, temperature):
    return selected_logprobs(hidden @ weight.T, labels, temperature)


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


def test_a_certain_label_keeps_its_small_gradient():
    head = Head(torch.bfloat16, 1.0, n_confident=28)
    _, grad_hidden, _ = head.run(linear_logprobs)
    true = head.grads[0].view(28, 24)
    tiny = true.norm(dim=1) < 2**-9 * head.weight.double().norm(dim=1).mean()
    assert tiny.sum() > 5
    # Had 1 - p been a difference of rounded weights, the error would be the weights' rounding, more than these
    # gradients are. Logits of 16 to 64 are off by up to 1/8 in bf16, and so each of the other words' probabilities.
    errors = (grad_hidden.view(28, 24) - true).norm(dim=1) / true.norm(dim=1)
    assert errors[tiny].max() <= 0.25


def test_linear_logprobs_wants_one_dtype():
    with pytest.raises(
        ValueError, match=r"hidden states are torch.float32 and the output layer's weight torch.bfloat16"
    ):
        linear_logprobs(torch.zeros(2, 4), torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))


def grads_of(model, logprobs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def small(config_class, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 211, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if config_class not in (GPT2Config, GPTJConfig):
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2}
    config = config_class(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1, **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def assert_same_gradients(ours, theirs):
    for name, grad in theirs.items():
        # Sums over some 100 positions and 211 words, accumulated in different orders.
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=200 * 2**-23 * grad.abs().max().item(), msg=name)


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
        model.enable_input_require_grads()  # the reentrant kind wants an input with a gradient
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
        lambda logits: logits[0, 0].tolist(),
        lambda logits: logits.detach().cpu().numpy().sum(),
        lambda logits: torch.zeros(logits.shape).copy_(logits),
        lambda logits: torch._C._nn.log_sigmoid(logits),
    ],
    ids=["a mean", "in a list", "numbers", "numpy", "a copy", "below the Python functions"],
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


def test_a_model_may_ask_what_its_logits_are_like(all_logits):
    def ask(x):
        sizes = (tuple(x.shape), tuple(x.size()), x.size(-1), x.ndim, x.dim(), x.numel(), len(x), x.is_contiguous())
        kinds = (x.dtype, x.device, x.layout, x.is_cuda, x.requires_grad, x.is_floating_point(), torch.is_tensor(x))
        return *sizes, *kinds

    model = with_logits_in(small(LlamaConfig), ask)
    batch = collate(random_sequences(3, 211), pad_id=0)
    model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    true = model.kept
    token_logprobs(model, batch)
    assert model.kept == true
    assert not all_logits
    with torch.no_grad():
        token_logprobs(model, batch)
    assert model.kept == tuple(False if answer is True and at == 12 else answer for at, answer in enumerate(true))


def test_other_threads_have_their_output_layer(all_logits):
    hidden = torch.randn(3, 32)
    products = []

    def multiply(_):
        thread = threading.Thread(target=lambda: products.append(model.lm_head(hidden)))
        thread.start()
        thread.join()

    model = with_logits_in(small(LlamaConfig), multiply)
    batch = collate(random_sequences(3, 211), pad_id=0)
    found = token_logprobs(model, batch)
    torch.testing.assert_close(products[0], F.linear(hidden, model.lm_head.weight))
    assert not all_logits  # what another thread does with the layer says nothing about the model
    torch.testing.assert_close(found, plain_logprobs(model, batch), rtol=0, atol=30 * 8 * EPS[torch.float32])


def test_two_threads_with_one_model(all_logits, caplog):
    both = threading.Barrier(2, timeout=30)

    def meet(module, args):
        both.wait()

    model = small(LlamaConfig)
    batch = collate(random_sequences(3, 211), pad_id=0)
    expected = plain_logprobs(model, batch).detach()
    model.model.register_forward_pre_hook(meet)  # both are in the model at once
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


def test_an_output_layer_is_taken_out_once():
    head = torch.nn.Linear(2, 3, bias=False)
    with logprobs_module._taken_out(head) as seen:
        with logprobs_module._taken_out(head) as again:  # as a thread that came at the same time
            assert again is None
        head(torch.zeros(1, 2))
        assert len(seen) == 1
    assert "forward" not in vars(head)


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
    assert record.levelno == logging.WARNING and record.name == logprobs_module.__name__
    assert "LlamaForCausalLM" in record.message and "memory" in record.message and "\n" not in record.message


def test_a_refused_model_is_let_go():
    model = small(CohereConfig, logit_scale=0.25)
    token_logprobs(model, collate(random_sequences(3, 211), pad_id=0))
    assert model in logprobs_module._REFUSED
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


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
        wanted = expected[name].view(-1)[mask[name].long()]
        torch.testing.assert_close(compact, wanted, rtol=0, atol=200 * 2**-23 * expected[name].abs().max().item())


def test_frozen_output_layer_gets_no_gradient():
    model = small(LlamaConfig, tie_word_embeddings=False)
    model.lm_head.weight.requires_grad_(False)
    token_logprobs(model, collate(random_sequences(3, 211), pad_id=0)).sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad is not None


def test_a_second_backward_pass_of_a_kept_graph_gives_the_same():
    model = small(LlamaConfig)
    loss = token_logprobs(model, collate(random_sequences(3, 211), pad_id=0)).sum()
    loss.backward(retain_graph=True)
    first = model.lm_head.weight.grad.clone()
    model.zero_grad()
    loss.backward()
    assert torch.equal(model.lm_head.weight.grad, first)
