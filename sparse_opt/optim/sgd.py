"""SparseSGD: SGD over the active elements of a mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..masks.mask_set import MaskSet
from . import options
from .buckets import Bucket
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
        mask: MaskSet,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        grads: Literal["compact", "dense"] = "compact",
        max_grad_norm: float | None = None,
        state_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        freeze_inactive: bool = True,
        keep_base_weights: bool = True,
        amp_scaling: bool = False,
        model: nn.Module | None = None,
        tile_backward: bool | None = None,
        backend: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "seed": seed,
        }
        super().__init__(
            params,
            mask,
            defaults,
            grads=grads,
            max_grad_norm=max_grad_norm,
            state_dtype=state_dtype,
            grad_dtype=grad_dtype,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            freeze_inactive=freeze_inactive,
            keep_base_weights=keep_base_weights,
            amp_scaling=amp_scaling,
            model=model,
            tile_backward=tile_backward,
            backend=backend,
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0.0 else ()

    def _check_options(self, group: dict[str, Any], where: str = "") -> None:
        super()._check_options(group, where)
        momentum, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
        options.require_number(where, "momentum", momentum)
        options.require_number(where, "dampening", dampening, minimum=-math.inf)
        options.require_number(where, "weight_decay", group["weight_decay"])
        if not isinstance(nesterov, bool):
            raise ValueError(f"{where}nesterov is {options.shown(nesterov)}, expected True or False")
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"{where}nesterov needs momentum > 0 and dampening 0, found momentum {momentum!r} and "
                f"dampening {dampening!r}"
            )

    def _update(self, bucket: Bucket, op: Callable[..., None], target: tuple[Any, ...], **arguments: Any) -> None:
        group = bucket.group
        if group["momentum"] != 0.0 and "momentum_buffer" not in bucket.state:
            raise RuntimeError(f"momentum is {group['momentum']}, but was 0 when the optimizer was built")
        op(
            *target,
            bucket.state.get("momentum_buffer"),
            arguments.pop("lr"),
            arguments.pop("steps"),
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            **arguments,
        )
