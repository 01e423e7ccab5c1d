"""`DenseAdamW`, the dense baseline: `torch.optim.AdamW` with clipping and master weights as in SparseAdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .optimizer import DenseOptimizer


class DenseAdamW(DenseOptimizer, torch.optim.AdamW):
    """AdamW over all given weights, with `max_grad_norm` and `master_weights` as in SparseAdamW.

    Args:
        params: the weights to train.
        max_grad_norm: clip the global gradient norm to this before each step; None disables clipping.
        master_weights: keep fp32 copies of the weights and round them into the weights after each step.
        fused: one pass over memory, the fastest AdamW that torch has on CPU and CUDA; else the one that torch takes by
            default, a few operations over lists of tensors (CUDA) or per tensor (CPU).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        fused: bool = True,
    ):
        super().__init__(
            self.set_weights(params, max_grad_norm, master_weights=master_weights),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True if fused else None,
        )
