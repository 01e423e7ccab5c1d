"""Log-probabilities from hidden states where all logits are held at once, with compiled work between the products.

With e(w) = exp((logit(w) - largest logit) / temperature), the sum of e over the words without the label is `others`,
and over all words `total`. The gradient of a log-probability by the logits, times the temperature, is -e / total, and
at the label others / total. The forward pass keeps the terms e, rounded once, with -others in the label's place:

    gradient of the hidden states = (others weight[label] - sum over the other words of e(w) weight[w]) factor
    gradient of the weight = terms.T @ (-factor hidden)
    factor = incoming gradient / (total temperature)

So the backward pass has no work on [N, V] but the weight's product. Its second operand is rounded to the dtype of the
hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import fused
from .weight_grad import WeightGrad


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
        logits = fused.of_static_width(hidden @ weight.T)
        column, scale = labels[:, None], hidden.new_full((), temperature, dtype=torch.float32)
        needs_grad = ctx.needs_input_grad[0]
        if not needs_grad and weight_grad is None:
            found: Tensor = fused.compiled(fused.logprobs_of)(logits, column, scale)
            return found[:, 0]
        terms, others, total, logprobs = fused.compiled(fused.terms_of)(logits, column, scale)
        del logits
        mixed = of_hidden = None
        if needs_grad:
            mixed, of_hidden = torch.zeros_like(hidden, dtype=torch.float32), weight
            fused.addmm_(mixed, terms, weight)
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
            grad_hidden = fused.compiled(fused.hidden_gradient)(weight, labels, mixed, others, factor)
        if ctx.weight_grad is not None:
            operand = fused.compiled(fused.weight_operand)(hidden, factor)
            ctx.weight_grad.work = [slice(0, ctx.n_words)], lambda _: terms, operand
            grad_token = hidden.new_zeros(())
        return grad_hidden, None, grad_token, None, None, None
