"""`DenseOptimizer`: clipping and master weights as in SparseOptimizer, for torch's optimizers of all weights.

With `master_weights` the optimizer updates fp32 copies, which are rounded into the 16-bit weights, as in
mixed-precision training. For AdamW that is 16 bytes per parameter during a step (4 master, 8 moments, 4 for the fp32
gradient) in addition to 2 for the weight. Without them it updates the 16-bit weights, for AdamW with 16-bit moments: 4
bytes per parameter, and updates below half a unit in the last place are lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..sharding import shard_of


class DenseOptimizer(torch.optim.Optimizer):
    """A mixin that is listed before one of torch's optimizers. The subclass's `__init__` passes the result of
    `set_weights` to that optimizer.

    The weights may be sharded by FSDP2 (DTensors).

    `grad_norm` is the norm of the last step before clipping, a device scalar, or None without clipping.
    """

    def set_weights(
        self, params: Iterable[nn.Parameter], max_grad_norm: float | None, *, master_weights: bool
    ) -> list[Any]:
        """Keep the weights to train, with fp32 copies if `master_weights`; return the tensors to update."""
        self.weights = list(params)
        self.masters = [weight.detach().float().clone() for weight in self.weights] if master_weights else None
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        return list(self.masters or self.weights)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, update, and with master weights round them into the weights; takes no closure."""
        if closure is not None:
            raise ValueError(f"{type(self).__name__}.step takes no closure")
        if self.max_grad_norm is not None:
            norm = nn.utils.get_total_norm(weight.grad for weight in self.weights if weight.grad is not None)
            self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            nn.utils.clip_grads_with_norm_(self.weights, self.max_grad_norm, self.grad_norm)
        if self.masters is None:
            super().step()
            return
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        super().step()
        for master in self.masters:
            master.grad = None
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of the weights."""
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None

    def nbytes(self) -> dict[str, int]:
        """Bytes of this process by purpose, with the names of `SparseOptimizer.nbytes`.

        grad is the memory of the gradients during a step: fp32 with master weights, else of the weights' dtype.
        """
        states = [tensor for state in self.state.values() for tensor in state.values()]
        return {
            "state": _nbytes(states),
            "master": _nbytes(self.masters or ()),
            "indices": 0,
            "grad": _nbytes(self.masters or self.weights),
            "base": 0,
        }

    def state_dict(self) -> dict[str, Any]:
        """torch's state and the master weights."""
        return {**super().state_dict(), "masters": self.masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict()`; master weights are copied in place, bit for bit.

        If the weights are sharded, the state may also be that of whole weights: each rank takes its part.
        """
        masters = state_dict["masters"]
        if (masters is None) != (self.masters is None):
            saved, expected = (value is not None for value in (masters, self.masters))
            raise ValueError(f"the state was saved with master_weights={saved}, this optimizer has {expected}")
        states = {
            key: {name: _part(value, self.weights[key]) for name, value in state.items()}
            for key, state in state_dict["state"].items()
        }
        super().load_state_dict({**{k: v for k, v in state_dict.items() if k != "masters"}, "state": states})
        if self.masters is not None:
            with torch.no_grad():
                for master, saved in zip(self.masters, masters, strict=True):
                    master.copy_(_part(saved, master))


def _part(saved: Tensor, weight: Tensor) -> Tensor:
    """A saved tensor of the weight's shape as the weight is sharded; any other as it is."""
    if isinstance(weight, DTensor) and not isinstance(saved, DTensor) and saved.shape == weight.shape:
        return shard_of(saved, weight)
    return saved


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)
