"""Peers: torch's AdamW on all weights, timed in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .optimizers import LR, WEIGHT_DECAY, Named

FUSED = "torch.optim.AdamW(fused=True).step"
FOREACH = "torch.optim.AdamW(foreach=True).step"
MASKED = "grad *= mask, torch.optim.AdamW(fused=True).step"


def torch_adamw_step(params: Named, grads: Sequence[Tensor], *, fused: bool) -> Callable[[], object]:
    """The step of torch's AdamW, fused or foreach, with states in the dtype of the parameters."""
    _hold(params, grads)
    return torch.optim.AdamW(params.values(), lr=LR, weight_decay=WEIGHT_DECAY, fused=fused, foreach=not fused).step


def masked_adamw_step(params: Named, grads: Sequence[Tensor], masks: Sequence[Tensor]) -> Callable[[], object]:
    """Sparse training without sparse kernels: multiply the gradients by bool masks, then make a dense step.

    The gradients are multiplied in place, so pass copies.
    """
    step = torch_adamw_step(params, grads, fused=True)

    def masked_step() -> None:
        for grad, mask in zip(grads, masks, strict=True):
            grad.mul_(mask)
        step()

    return masked_step


def _hold(params: Named, grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params.values(), grads, strict=True):
        param.grad = grad
