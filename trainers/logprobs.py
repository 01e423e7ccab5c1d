"""Log-probabilities of completions under a causal language model.

The logits of one pair of 512 tokens over 128k words are 0.26 GB in bf16, and several copies of them, in fp32 and as
gradients, would be alive in a step. Where a model's logits are nothing but its output layer's product, they are made a
slice of the vocabulary at a time from the hidden states and never stand together, forward or backward
(`linear_logprobs`). Every other model's are taken as it gives them (`selected_logprobs`). Which of the two holds is
found out, not assumed: see `_hidden_states`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .encoding import TokenBatch
from .models import skip_padding_masks

logger = logging.getLogger(__name__)

# Logits alive at once: 2^24 elements are 64 MiB in fp32.
_CHUNK_ELEMENTS = 1 << 24
# Narrower slices would read the hidden states more often than the products cost.
_LEAST_WORDS = 2048


def completion_logprobs(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Sum of the log-probabilities of each sequence's trained tokens: [B] fp32."""
    return token_logprobs(model, batch).sum(dim=1)


def token_logprobs(model: nn.Module, batch: TokenBatch, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the tokens from position `first_trained` on: [B, T - first_trained] fp32.

    0 at tokens that are not trained. The logits are divided by `temperature`; log-softmax is fp32 whatever the model's
    dtype, over logits of the model's dtype. The padding of a `TokenBatch` stands on the right, so a model that can
    (`make_masks_skippable`) attends without a mask.
    """
    labels = batch.input_ids[:, batch.first_trained :]
    n_positions = labels.shape[1] + 1  # position t predicts token t + 1; the last one predicts nothing
    takes_positions = _takes(getattr(model.forward, "__func__", model.forward), "logits_to_keep")
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "use_cache": False,
        **({"logits_to_keep": n_positions} if takes_positions else {}),
    }
    head = _plain_head(model)
    weight_grad = None if head is None else _WeightGrad.of(head.weight)
    hidden = None if head is None else _hidden_states(model, head, inputs)
    if head is None or hidden is None:
        with skip_padding_masks():
            logits = model(**inputs).logits[:, -n_positions:]  # [B, P, V]
        # Labels are padded instead of cutting the logits, which would copy them.
        logprobs = selected_logprobs(logits, F.pad(labels, (0, 1)), temperature)[:, :-1]
    else:
        rows = hidden[:, -n_positions:-1]
        logprobs = _linear_logprobs(rows, head.weight, labels, temperature, weight_grad)
    return torch.where(batch.completion_mask[:, batch.first_trained :], logprobs, 0.0)


@functools.lru_cache(maxsize=64)
def _takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function names the argument; looked up once, as signatures are slow to make."""
    return argument in inspect.signature(function).parameters


# From logits


def selected_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log_softmax(logits / temperature)[..., labels] in fp32: [...] for logits [..., V] and int64 labels [...].

    Equals `torch.log_softmax(logits.float() / temperature, -1).gather(-1, labels)` and its gradient, without ever
    holding the fp32 logits or probabilities of more than a chunk of rows.
    """
    flat: Tensor = _SelectedLogprobs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), temperature)
    return flat.view(labels.shape)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        log_norm = logits.new_empty(len(logits), dtype=torch.float32)
        selected = torch.empty_like(log_norm)
        for rows in _row_chunks(logits):
            chunk = logits[rows].float()
            if temperature != 1.0:
                chunk = chunk / temperature
            torch.logsumexp(chunk, dim=1, out=log_norm[rows])
            selected[rows] = chunk.gather(1, labels[rows, None])[:, 0] - log_norm[rows]
        ctx.save_for_backward(logits, labels, log_norm)
        ctx.temperature = temperature
        return selected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_selected: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_norm = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            grad_logits[rows] = _grad_logits(
                logits[rows], labels[rows], log_norm[rows], grad_selected[rows], ctx.temperature
            )
        return grad_logits, None, None


def _row_chunks(logits: Tensor) -> list[slice]:
    n_rows, vocabulary = logits.shape
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + size) for start in range(0, n_rows, size)]


def _grad_logits(
    logits: Tensor, labels: Tensor, log_norm: Tensor, grad_selected: Tensor, temperature: float, first_word: int = 0
) -> Tensor:
    """d selected / d logits = (onehot(label) - softmax) / temperature, times the gradient: [N, W] fp32.

    Args:
        logits: [N, W], of the words from `first_word` on.
        labels: [N] int64, counted from word 0.
        log_norm: [N] fp32, log of the sum over all words.
        grad_selected: [N] fp32.
    """
    factor = (grad_selected / temperature)[:, None]
    exponent = logits.float() / temperature if temperature != 1.0 else logits
    probabilities = torch.sub(exponent, log_norm[:, None]).exp_()  # fp32, as log_norm is
    local, inside = _positions(labels, first_word, logits.shape[1])
    return probabilities.mul_(-factor).scatter_add_(1, local, torch.where(inside, factor, 0.0))


def _positions(labels: Tensor, first_word: int, n_words: int) -> tuple[Tensor, Tensor]:
    """[N, 1] the labels' columns in a slice of the vocabulary, and whether they lie in it (column 0 if they don't)."""
    local = labels[:, None] - first_word
    inside = (local >= 0) & (local < n_words)
    return torch.where(inside, local, 0), inside


# From hidden states


def linear_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log_softmax(hidden @ weight.T / temperature)[..., labels] without ever holding the logits: [...] fp32.

    The logits are made a slice of the vocabulary at a time, rounded to the inputs' dtype as a linear layer rounds them,
    and folded into a running maximum and sum in fp32 (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). The
    gradient of the hidden states is found in the same pass, but for its factor, as in flash attention:

        d logprob / d hidden = (1 - p(label)) weight[label] - sum over the other words of p(word) weight[word]

    with 1 - p(label) summed from the others' probabilities, so that it stays exact where the label is nearly certain.
    The products add up in fp32 (adding up slices in bf16 biases training, as TRL found:
    https://github.com/huggingface/trl, kernels/chunked_logprob.py) and are rounded once. The gradient of the weight is
    made from logits computed once more, a slice of words at a time and over all positions at once, so each of its
    elements is one product with one rounding, as in a linear layer. It is the last thing a backward pass computes: see
    `_WeightGrad`. Libraries' fused losses keep that gradient in fp32, twice a bf16 weight's size, from the start of the
    backward pass or earlier.

    Args:
        hidden: [..., H] bf16, fp16 or fp32.
        weight: [V, H] of the same dtype.
        labels: [...] int64.
        temperature: the logits are divided by it.

    Raises:
        ValueError: the dtypes of hidden and weight differ.
    """
    return _linear_logprobs(hidden, weight, labels, temperature, _WeightGrad.of(weight))


def _linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, weight_grad: _WeightGrad | None
) -> Tensor:
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden states are {hidden.dtype} and the output layer's weight {weight.dtype}, wanted one")
    flat: Tensor = _LinearLogprobs.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight.detach(),
        None if weight_grad is None else weight_grad.token,
        labels.reshape(-1),
        temperature,
        weight_grad,
    )
    return flat.view(labels.shape)


class _WeightGrad:
    """Puts the output layer's weight gradient at the end of the backward pass.

    Autograd runs the youngest of the nodes that are ready. The node made here, before the model's forward pass, is
    older than all of the model's, so it runs when they are done and their activations freed: the gradient, 0.73 GiB for
    128k words of 3072, never stands beside them. With tied embeddings it meets the embedding's there, and the sum
    arrives at the parameter once.
    """

    def __init__(self, weight: Tensor):
        self.work: tuple[Tensor, Tensor, Tensor, Tensor, float] | None = None
        self.token: Tensor = _WeightGradNode.apply(weight, self)

    @classmethod
    def of(cls, weight: Tensor) -> _WeightGrad | None:
        return cls(weight) if weight.requires_grad and torch.is_grad_enabled() else None


class _WeightGradNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, owner: _WeightGrad) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.owner = weakref.ref(owner)  # owner.token leads back here
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_token: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        owner = ctx.owner()
        (hidden, labels, log_norm, grad_selected, temperature), owner.work = owner.work, None
        grad_weight = torch.empty_like(weight)
        for words in _word_slices(len(hidden), len(weight)):
            grad_logits = _grad_logits(
                hidden @ weight[words].T, labels, log_norm, grad_selected, temperature, words.start
            )
            torch.mm(grad_logits.to(weight.dtype).T, hidden, out=grad_weight[words])
        return grad_weight, None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        token: Tensor | None,
        labels: Tensor,  # [N]
        temperature: float,
        weight_grad: _WeightGrad | None,
    ) -> Tensor:
        wants_grad = ctx.needs_input_grad[0]
        top = hidden.new_full((len(hidden), 1), -torch.inf, dtype=torch.float32)  # the largest logit so far
        own = torch.zeros_like(top)  # the label's logit
        others = torch.zeros_like(top)  # sum of exp(logit - top) over the other words
        mixed = torch.zeros_like(hidden, dtype=torch.float32) if wants_grad else None  # the same sum of their weights
        for words in _word_slices(len(hidden), len(weight)):
            logits = hidden @ weight[words].T
            local, inside = _positions(labels, words.start, logits.shape[1])
            own = torch.where(inside, logits.gather(1, local), own)
            before, top = top, torch.maximum(top, logits.amax(dim=1, keepdim=True))
            exponentials = torch.sub(logits, top)  # fp32, as top is
            del logits
            shrink = before.sub_(top)
            if temperature != 1.0:
                exponentials.div_(temperature)
                shrink.div_(temperature)
            exponentials.exp_()
            shrink.exp_()
            exponentials.scatter_(1, local, torch.where(inside, 0.0, exponentials.gather(1, local)))
            others.mul_(shrink).add_(exponentials.sum(dim=1, keepdim=True))
            if mixed is not None:
                mixed.mul_(shrink)
                _addmm_(mixed, exponentials.to(weight.dtype), weight[words])
        exponent = own.sub_(top).div_(temperature)
        total = exponent.exp() + others
        log_total = total.log()
        grad_hidden = None
        if mixed is not None:
            grad_hidden = weight[labels].float().mul_(others / total).sub_(mixed.div_(total)).div_(temperature)
        log_norm = log_total + top / temperature
        ctx.save_for_backward(hidden, labels, log_norm[:, 0], grad_hidden)
        ctx.temperature, ctx.weight_grad, ctx.token = temperature, weight_grad, token is not None
        return (exponent - log_total)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_selected: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        hidden, labels, log_norm, grad_hidden = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_selected[:, None] * grad_hidden).to(hidden.dtype)
        grad_token = None
        if ctx.weight_grad is not None:
            ctx.weight_grad.work = (hidden.detach(), labels, log_norm, grad_selected, ctx.temperature)
            grad_token = hidden.new_zeros(())
        return grad_hidden, None, grad_token, None, None, None


def _word_slices(n_rows: int, n_words: int) -> list[slice]:
    size = max(_LEAST_WORDS, _CHUNK_ELEMENTS // max(n_rows, 1))
    size -= size % min(size, 128)  # whole tiles of a matrix product
    return [slice(start, min(start + size, n_words)) for start in range(0, n_words, size)]


def _addmm_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b for an fp32 total, without rounding the product to a 16-bit dtype first."""
    if total.device.type == "cuda" and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


# Which of the two

# Models that were seen to do something to their output layer's product, with what they were like (`_state`).
_REFUSED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _plain_head(model: nn.Module) -> nn.Linear | None:
    """The model's output layer if it is a bare matrix product that may be taken out of the model; else None.

    It is not where it has a bias, hooks or an adapter, stands under autocast, is quantised or sharded, or where the
    model is compiled.
    """
    find = getattr(model, "get_output_embeddings", None)
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if find is None or compiled or torch.is_inference_mode_enabled():
        return None
    head = find()
    if type(head) is not nn.Linear or head.bias is not None or type(head.weight) is not nn.Parameter:
        return None
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    if any(hooks) or "forward" in vars(head) or torch.is_autocast_enabled(head.weight.device.type):
        return None
    if model in _REFUSED and _REFUSED[model] == _state(model, head):
        return None
    return head


def _hidden_states(model: nn.Module, head: nn.Linear, inputs: dict[str, Any]) -> Tensor | None:
    """What the model gives its output layer, [B, P, H]; None where its logits are not just that layer's product.

    The layer hands the model a stand-in for its logits. If the very same tensor comes out as the model's logits and
    nothing was computed with it, the model adds nothing: no soft-capping, no scale, no cast. A model that does has its
    forward pass run twice this once, and is remembered until its hooks change.
    """
    logits, why = None, "its logits are not its output layer's product"
    with _taken_out(head) as seen:
        if seen is None:
            return None
        try:
            with skip_padding_masks():
                logits = model(**inputs).logits
        except _LogitsAreUsedError as error:
            why = str(error)
    if len(seen) == 1:
        ((hidden, stand_in),) = seen
        if logits is stand_in and hidden.dtype == head.weight.dtype:
            return hidden
    if model not in _REFUSED:
        logger.warning(
            "%s: %s, so log-probabilities are taken from all logits at once, which needs more memory",
            type(model).__name__,
            why,
        )
    _REFUSED[model] = _state(model, head)
    return None


def _state(model: nn.Module, head: nn.Linear) -> tuple[Any, ...]:
    """What can turn a model into a plain one or back: its hooks, by their ids, which are not used twice."""
    hooks = (hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks))
    return head.weight.dtype, *hooks


@contextmanager
def _taken_out(head: nn.Linear) -> Iterator[list[tuple[Tensor, Tensor]] | None]:
    """Inside, in this thread, the layer notes its inputs and returns stand-ins for its outputs.

    Other threads' calls go to the layer. None where another thread has taken it out already.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    owner = threading.get_ident()

    def forward(input: Tensor) -> Tensor:
        if threading.get_ident() != owner:
            return type(head).forward(head, input)
        stand_in = _StandIn.of_product(input, head.weight)
        seen.append((input, stand_in))
        return stand_in

    if vars(head).setdefault("forward", forward) is not forward:  # looks and sets in one step
        yield None
        return
    try:
        yield seen
    finally:
        del head.forward


class _LogitsAreUsedError(Exception):
    """A model computes with its logits, which were not made."""


# What a stand-in knows: no more than shape, type and place.
_KNOWN = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")]
    + [getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "itemsize")]
    + [Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__]
    + [Tensor.element_size, Tensor.get_device, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)


class _StandIn(Tensor):
    """A tensor without elements: its shape, dtype and device can be read, everything else raises."""

    @classmethod
    def of_product(cls, input: Tensor, weight: Tensor) -> Tensor:
        """Stands for input @ weight.T: [..., V] for [..., H] and [V, H]."""
        stand_in: Tensor = cls._make_wrapper_subclass(
            cls,
            (*input.shape[:-1], len(weight)),
            dtype=input.dtype,
            device=input.device,
            requires_grad=torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad),
        )
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)
        raise _used_by(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _used_by(func)  # called where the Python functions are passed by


def _used_by(func: Any) -> _LogitsAreUsedError:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # an attribute's
        name = getattr(func.__self__, "__name__", name)
    return _LogitsAreUsedError(f"the model uses its logits itself ({name})")
