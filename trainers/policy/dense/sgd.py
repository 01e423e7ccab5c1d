"""`DenseSGD`: `torch.optim.SGD` with clipping and master weights as in SparseSGD."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .optimizer import DenseOptimizer


class DenseSGD(DenseOptimizer, torch.optim.SGD):
    """SGD without momentum over all given weights; other arguments as in `DenseAdamW`. It has no state."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ):
        super().__init__(
            self.set_weights(params, max_grad_norm, master_weights=master_weights),
            lr=lr,
            weight_decay=weight_decay,
            fused=True,
        )
