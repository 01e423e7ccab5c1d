"""SGD over the active elements of a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..masks import MaskSet
from .buckets import Bucket
from .sparse_optimizer import Params, SparseOptimizer


class SparseSGD(SparseOptimizer):
    """SGD, with momentum or without, that trains the active elements of a mask and pays only for them.

    Equals `torch.optim.SGD` whose gradients are multiplied by the mask and whose decay touches active elements only.

    Args:
        lr, momentum, dampening, weight_decay, nesterov: as in `torch.optim.SGD`. Whether there is a momentum buffer is
            settled when the optimizer is built.
        Others: as in `SparseAdamW`; `state_dtype` is that of the momentum buffer.

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
        if not 0 <= seed < 2**62:
            raise ValueError(f"seed is {seed}, wanted 0 <= seed < 2**62")
        if not isinstance(lr, Tensor) and not lr >= 0.0:
            raise ValueError(f"lr is {lr}, wanted >= 0")
        if not momentum >= 0.0 or not weight_decay >= 0.0:
            raise ValueError(f"momentum is {momentum} and weight_decay {weight_decay}, wanted >= 0")
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(f"nesterov wants momentum > 0 and no dampening, got {momentum} and {dampening}")
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
