"""SparseSGD: SGD over the active elements of a mask."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..masks.mask_set import MaskSet, RandomMask
from .options import SharedOptions
from .sparse_optimizer import Params, SparseOptimizer


class SparseSGD(SparseOptimizer):
    """SGD with optional momentum that trains the active elements of a mask; its cost scales with their number.

    Equals `torch.optim.SGD` with gradients multiplied by the mask and decay applied to active elements only.

    Args:
        lr, momentum, dampening, weight_decay, nesterov: as in `torch.optim.SGD`. The momentum buffer is allocated when
            the optimizer is built, if `momentum` is not 0 then.
        Others: as in `SparseAdamW`; `state_dtype` is the dtype of the momentum buffer.

    Raises:
        ValueError, MaskError, BackendUnavailable: as in `SparseAdamW`.
    """

    _op = "indexed_sgd_"

    def __init__(
        self,
        params: Params,
        mask: MaskSet | RandomMask | float,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, mask, defaults, **shared)
