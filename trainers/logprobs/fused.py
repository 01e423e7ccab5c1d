"""Compiled work on logits between two matrix products, and `OneSlice`: log-probabilities from all logits at once.

The functions for torch.compile have no in-place writes and no scatters. In all of them, logits are [N, W] of any dtype,
and the temperature is a [] fp32 tensor, so that one kernel serves every value.

The gradients of `OneSlice` are those of `chunked.linear_logprobs`, with e(w) = exp((logit(w) - largest logit) /
temperature) over `total`, its sum, as the probabilities; `others` is the sum without the label. The forward pass keeps
the terms e, rounded once, with -others in the label's place. With factor = incoming gradient / (total temperature),

    gradient of the hidden states = (others weight[label] - sum over the other words of e(w) weight[w]) factor
    gradient of the weight = terms.T @ (-factor hidden), whose second operand is rounded to the hidden states' dtype
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .output_layer import WeightGrad

# Slices of at least so many words have kernels for their width, of which there are two at most.
WIDE = 8192


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch.compile, for any number of rows."""
    return torch.compile(function, dynamic=True)


def of_static_width(logits: Tensor) -> Tensor:
    """The logits, marked so that kernels are compiled for their width if it is large.

    Kernels for any width divide each element's index by it, and load element by element: they take twice as long.
    """
    if logits.shape[1] >= WIDE:
        torch._dynamo.mark_static(logits, 1)
    return logits


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device)


# Of a slice of the vocabulary


def fold(
    logits: Tensor, local: Tensor, top: Tensor, own: Tensor, others: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The work of `chunked.linear_logprobs` on a slice's logits.

    Args:
        local: [N, 1] int64, the labels' columns in the slice; outside 0 to W - 1 if a label is not in it.
        top, own, others: [N, 1] fp32, of the previous slices.

    Returns:
        [N, W] exp((logit - top) / temperature) of the logits' dtype, 0 at the label; then top, own and others including
        this slice, and exp((previous top - top) / temperature), the factor of the previous sums.
    """
    n_words = logits.shape[1]
    inside = (local >= 0) & (local < n_words)
    own = torch.where(inside, logits.gather(1, local.clamp(0, n_words - 1)).float(), own)
    before, top = top, torch.maximum(top, logits.amax(dim=1, keepdim=True).float())
    exponentials = ((logits.float() - top) / temperature).exp()
    exponentials = torch.where(_columns(logits) == local, 0.0, exponentials)
    shrink = ((before - top) / temperature).exp()
    others = others * shrink + exponentials.sum(dim=1, keepdim=True)
    return exponentials.to(logits.dtype), top, own, others, shrink


def fold_sums(*found: Tensor) -> tuple[Tensor, ...]:
    """top, own and others of `fold`, for a forward pass without gradient."""
    return fold(*found)[1:4]


def grad_logits(logits: Tensor, local: Tensor, log_norm: Tensor, factor: Tensor, temperature: Tensor) -> Tensor:
    """(onehot(label) - softmax) times the factor, rounded to the logits' dtype: [N, W].

    Args:
        local: as in `fold`.
        log_norm, factor: [N, 1] fp32: log of the sum over all words; the gradient over the temperature.
    """
    probabilities = (logits.float() / temperature - log_norm).exp()
    return (((_columns(logits) == local).float() - probabilities) * factor).to(logits.dtype)


# Of all words


def terms_of(logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_softmax(logits / temperature)[label], and what its gradients need.

    Args:
        labels: [N, 1] int64.

    Returns:
        [N, W] exp((logit - largest) / temperature) of the logits' dtype, 0 at the label; then [N, 1] fp32 each: their
        sum before they are rounded, that sum including the label's, and the log-probability.
    """
    nothing = logits.new_zeros(len(logits), 1, dtype=torch.float32)
    terms, top, own, others, _ = fold(logits, labels, nothing - torch.inf, nothing, nothing, temperature)
    exponent = (own - top) / temperature
    total = exponent.exp() + others
    return terms, others, total, exponent - total.log()


def logprobs_of(*found: Tensor) -> Tensor:
    """The log-probabilities of `terms_of`, [N, 1] fp32, for a forward pass without gradient."""
    return terms_of(*found)[3]


def hidden_gradient(weight: Tensor, labels: Tensor, mixed: Tensor, others: Tensor, factor: Tensor) -> Tensor:
    """The gradient of the hidden states: [N, H] of the weight's dtype.

    Args:
        weight: [V, H].
        labels: [N] int64.
        mixed: [N, H] fp32, the product of the terms and the weight.
        others, factor: [N, 1] fp32: see `terms_of`; the incoming gradient over total and temperature.
    """
    return ((weight[labels].float() * others - mixed) * factor).to(weight.dtype)


def weight_operand(hidden: Tensor, factor: Tensor) -> Tensor:
    """[N, H] of the hidden states' dtype, for the weight's gradient: see `OneSlice`."""
    return (hidden.float() * -factor).to(hidden.dtype)


# The second product


def addmm_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b for an fp32 total, without rounding the product to a 16-bit dtype first."""
    if total.device.type == "cuda" and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


# All words at once


class OneSlice(torch.autograd.Function):
    """[N] fp32, see `chunked.linear_logprobs`. Not for fp16, whose range the sum of the terms can exceed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        token: Tensor | None,
        labels: Tensor,  # [N]
        temperature: float,
        weight_grad: WeightGrad | None,
    ) -> Tensor:
        logits = of_static_width(hidden @ weight.T)
        column, scale = labels[:, None], hidden.new_full((), temperature, dtype=torch.float32)
        needs_grad = ctx.needs_input_grad[0]
        if not needs_grad and weight_grad is None:
            found: Tensor = compiled(logprobs_of)(logits, column, scale)
            return found[:, 0]
        terms, others, total, logprobs = compiled(terms_of)(logits, column, scale)
        del logits
        mixed = of_hidden = None
        if needs_grad:
            mixed, of_hidden = torch.zeros_like(hidden, dtype=torch.float32), weight
            addmm_(mixed, terms, weight)
        if weight_grad is not None:
            terms.scatter_(1, column, -others.to(terms.dtype))
        of_weight = None if weight_grad is None else terms
        ctx.save_for_backward(hidden, of_hidden, labels, mixed, others, total, of_weight)
        ctx.n_words = len(weight)
        ctx.temperature, ctx.weight_grad = temperature, weight_grad
        return logprobs[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        hidden, weight, labels, mixed, others, total, terms = ctx.saved_tensors
        factor = grad_logprobs[:, None] / (total * ctx.temperature)
        grad_hidden = grad_token = None
        if mixed is not None:
            grad_hidden = compiled(hidden_gradient)(weight, labels, mixed, others, factor)
        if ctx.weight_grad is not None:
            operand = compiled(weight_operand)(hidden, factor)
            ctx.weight_grad.work = [slice(0, ctx.n_words)], lambda _: terms, operand
            grad_token = hidden.new_zeros(())
        return grad_hidden, None, grad_token, None, None, None
