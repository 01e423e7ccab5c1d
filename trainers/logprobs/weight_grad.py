"""The output layer's weight gradient, computed at the end of the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparse_opt.optim.gradients.tile_backward import Route


class WeightGrad:
    """Computes the output layer's weight gradient at the end of the backward pass.

    Autograd runs the most recently created of the ready nodes. The node created here, before the model's forward pass,
    is older than all nodes of the model, so it runs when they have finished and their activations are freed: the
    gradient, 0.73 GiB for 128k words of 3072, is never held together with them. With tied embeddings it is added there
    to that of the embedding, and the parameter receives the sum once. If an optimizer uses only the weight's active
    tiles, only these are computed, one slice of words at a time.
    """

    def __init__(self, weight: Tensor, route: Route | None):
        self.route = route
        # Set by the backward pass of the log-probabilities: slices of words, a function that computes [N, words] of a
        # slice, and an [N, H]. The product of the former, transposed, and the latter is the gradient of these words.
        self.work: tuple[list[slice], Callable[[slice], Tensor], Tensor] | None = None
        self.token: Tensor = _WeightGradNode.apply(weight, self)

    @classmethod
    def of(cls, weight: Tensor, route: Route | None) -> WeightGrad | None:
        """The weight's gradient computation; None if no gradient is needed."""
        return cls(weight, route) if weight.requires_grad and torch.is_grad_enabled() else None


class _WeightGradNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, owner: WeightGrad) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.owner = weakref.ref(owner)  # a weak reference, because owner.token refers back to this node
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_token: Tensor) -> tuple[Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        owner = ctx.owner()
        (slices, first, second), owner.work = owner.work, None
        if len(slices) == 1:  # without fp32 sums of all active elements between the product and the compact gradient
            left = first(slices[0])
            if owner.route is not None and owner.route.add_whole_product(left, second):
                return None, None
            return torch.mm(left.T, second), None
        parts = ((words.start, first(words)) for words in slices)
        if owner.route is not None and owner.route.add_product_rows(parts, second):
            return None, None
        grad_weight = torch.empty_like(weight)
        for words in slices:
            torch.mm(first(words).T, second, out=grad_weight[words])
        return grad_weight, None
