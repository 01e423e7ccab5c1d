"""SparseLion: Lion over the active elements of a mask."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..masks.mask_set import MaskSet, RandomMask
from .options import SharedOptions
from .sparse_optimizer import Params, SparseOptimizer


class SparseLion(SparseOptimizer):
    """Lion that trains the active elements of a mask; its cost scales with their number.

    Equals Lion (Chen et al., https://arxiv.org/abs/2302.06675) with gradients multiplied by the mask and decay applied
    to active elements only: a step changes each of them by the learning rate, in the direction of an average of its
    gradients. It keeps one state per active element, where AdamW keeps two.

    Args:
        lr: as in `SparseAdamW`. The paper uses a learning rate 3 to 10 times smaller than AdamW's.
        betas: weights of `exp_avg` in the average whose sign is the update, and in its own next value.
        weight_decay: decoupled, as in `SparseAdamW`.
        Others: as in `SparseAdamW`; `state_dtype` is the dtype of `exp_avg`.

    Raises:
        ValueError, MaskError, BackendUnavailable: as in `SparseAdamW`.
    """

    _op = "indexed_lion_"

    def __init__(
        self,
        params: Params,
        mask: MaskSet | RandomMask | float,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, mask, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **shared)
