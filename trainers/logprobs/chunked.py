"""Log-probabilities of labels without all fp32 logits at once, from logits or from hidden states.

`selected_logprobs` takes logits in chunks of rows. `linear_logprobs` computes the logits one slice of the vocabulary at
a time, and a second time in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from . import fused as fused_work
from .output_layer import WeightGrad

# Maximum number of logits held at once: 2^24 elements are 64 MiB in fp32.
_CHUNK_ELEMENTS = 1 << 24
# Each slice costs a pass over fp32 sums of the hidden states' shape, and narrow slices leave a GPU idle. A slice of
# this many words takes 32 KiB in fp32 per token, a hundredth of the activations of Llama-3.2-3B's layers.
_LEAST_WORDS = fused_work.WIDE
# If fused, up to this many logits are one slice, and as many values are kept: 256 MiB in bf16 (1046 tokens over 128k
# words), where Llama-3.2-3B's layers keep 3.5 GiB of activations. `bench baseline dpo --cuda_graphs` timed it.
_KEPT_ELEMENTS = 1 << 27


# From logits


def selected_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log_softmax(logits / temperature)[..., labels] in fp32: [...] for logits [..., V] and int64 labels [...].

    Equals `torch.log_softmax(logits.float() / temperature, -1).gather(-1, labels)` and its gradient, without ever
    holding the fp32 logits or probabilities of more than a chunk of rows.
    """
    size = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    rows = zip(logits.reshape(-1, logits.shape[-1]).split(size), labels.reshape(-1).split(size), strict=True)
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(_logprobs_of_rows, *part, temperature, **options) for part in rows]).view(labels.shape)


def _logprobs_of_rows(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return -F.cross_entropy(scaled, labels, reduction="none")


def _positions(labels: Tensor, first_word: int, n_words: int) -> tuple[Tensor, Tensor]:
    """[N, 1] the labels' columns in a slice of the vocabulary (0 if outside), and whether they are in it."""
    local = labels[:, None] - first_word
    inside = (local >= 0) & (local < n_words)
    return torch.where(inside, local, 0), inside


# From hidden states


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    weight_grad: WeightGrad | None = None,
    fused: bool = False,
) -> Tensor:
    """log_softmax(hidden @ weight.T / temperature)[..., labels] without holding many logits: [...] fp32.

    The logits are computed one slice of the vocabulary at a time, rounded to the inputs' dtype as in a linear layer,
    and reduced to a running maximum and sum in fp32 (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). The
    gradient of the hidden states is computed in the same pass, except for its factor, as in flash attention:

        d logprob / d hidden = (1 - p(label)) weight[label] - sum over the other words of p(word) weight[word]

    where 1 - p(label) is the sum of the other probabilities, so that it stays accurate if the label is nearly certain.
    The products are accumulated in fp32 (accumulating slices in bf16 biases training, as TRL found:
    https://github.com/huggingface/trl, kernels/chunked_logprob.py) and rounded once. The gradient of the weight is
    computed from kept or recomputed values, one slice of words at a time and over all positions at once, so that each
    of its elements is one product with one rounding, as in a linear layer; when and where says `WeightGrad`.

    Args:
        hidden: [..., H] bf16, fp16 or fp32.
        weight: [V, H] of the same dtype.
        labels: [...] int64.
        temperature: divisor of the logits.
        weight_grad: computes the gradient of the weight; made before the model's forward pass, if that is part of the
            graph. None makes one here.
        fused: compile the work on a slice of logits between its two matrix products: one or two kernels read the
            logits and write the input of the second product. Up to 2^27 logits (not in fp16) are then one slice, of
            which that input is kept for the gradient of the weight: `fused.OneSlice`.

    Raises:
        ValueError: the dtypes of hidden and weight differ.
    """
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden states are {hidden.dtype} and the output layer's weight {weight.dtype}, expected one")
    weight_grad = weight_grad or WeightGrad.of(weight, None)
    flat: Tensor
    operands = (
        hidden.reshape(-1, hidden.shape[-1]),
        weight.detach(),
        None if weight_grad is None else weight_grad.token,
        labels.reshape(-1),
        temperature,
        weight_grad,
    )
    if fused and labels.numel() * len(weight) <= _KEPT_ELEMENTS and hidden.dtype != torch.float16:
        flat = fused_work.OneSlice.apply(*operands)
    else:
        flat = _LinearLogprobs.apply(*operands, fused)
    return flat.view(labels.shape)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        token: Tensor | None,
        labels: Tensor,  # [N]
        temperature: float,
        weight_grad: WeightGrad | None,
        fused: bool,
    ) -> Tensor:
        needs_grad = ctx.needs_input_grad[0]
        top = hidden.new_full((len(hidden), 1), -torch.inf, dtype=torch.float32)  # the largest logit so far
        own = torch.zeros_like(top)  # the label's logit
        others = torch.zeros_like(top)  # sum of exp(logit - top) over the other words
        mixed = torch.zeros_like(hidden, dtype=torch.float32) if needs_grad else None  # the same sum of their weights
        slices = _word_slices(len(hidden), len(weight), fused=fused)
        for words in slices:
            logits = hidden @ weight[words].T
            if fused:
                local, scale = labels[:, None] - words.start, top.new_full((), temperature)
                found = fused_work.of_static_width(logits), local, top, own, others, scale
                if mixed is None:
                    top, own, others = fused_work.compiled(fused_work.fold_sums)(*found)
                else:
                    terms, top, own, others, shrink = fused_work.compiled(fused_work.fold)(*found)
                    mixed.mul_(shrink)
                    fused_work.addmm_(mixed, terms, weight[words])
                    del terms
                del found, logits  # free before the next slice's are made
                continue
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
                fused_work.addmm_(mixed, exponentials.to(weight.dtype), weight[words])
            del exponentials  # free before the next slice's are made
        exponent = own.sub_(top).div_(temperature)
        total = exponent.exp() + others
        log_total = total.log()
        grad_hidden = None
        if mixed is not None:
            grad_hidden = weight[labels].float().mul_(others / total).sub_(mixed.div_(total)).div_(temperature)
        log_norm = log_total + top / temperature
        of_weight = None if weight_grad is None else weight
        ctx.save_for_backward(hidden, of_weight, labels, log_norm, grad_hidden)
        ctx.temperature, ctx.weight_grad, ctx.slices, ctx.fused = temperature, weight_grad, slices, fused
        return (exponent - log_total)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_selected: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None, None]:
        hidden, weight, labels, log_norm, grad_hidden = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_selected[:, None] * grad_hidden).to(hidden.dtype)
        grad_token = None
        if ctx.weight_grad is not None:
            temperature, fused = ctx.temperature, ctx.fused

            def grad_logits(words: slice) -> Tensor:
                logits = hidden @ weight[words].T
                factor = (grad_selected / temperature)[:, None]
                if fused:
                    found: Tensor = fused_work.compiled(fused_work.grad_logits)(
                        fused_work.of_static_width(logits),
                        labels[:, None] - words.start,
                        log_norm,
                        factor,
                        factor.new_full((), temperature),
                    )
                    return found
                exponent = logits.float() / temperature if temperature != 1.0 else logits
                probabilities = torch.sub(exponent, log_norm).exp_()  # fp32, as log_norm is
                local, inside = _positions(labels, words.start, logits.shape[1])
                found = probabilities.mul_(-factor).scatter_add_(1, local, torch.where(inside, factor, 0.0))
                return found.to(weight.dtype)

            ctx.weight_grad.work = ctx.slices, grad_logits, hidden.detach()
            grad_token = hidden.new_zeros(())
        return grad_hidden, None, grad_token, None, None, None, None


def _word_slices(n_rows: int, n_words: int, *, fused: bool) -> list[slice]:
    size = _LEAST_WORDS
    if not fused:
        size = max(size, _CHUNK_ELEMENTS // max(n_rows, 1))
        size -= size % min(size, 128)  # whole tiles of a matrix product
    return [slice(start, min(start + size, n_words)) for start in range(0, n_words, size)]
