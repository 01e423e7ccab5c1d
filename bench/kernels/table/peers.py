"""Peers: AdamW implementations of other packages, timed in the same run.

A peer that is not installed, or does not support the device, is listed with this reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import floors
from ..cases import WrongResult
from ..optimizers import LR, WEIGHT_DECAY, Named

FUSED = "torch.optim.AdamW(fused=True).step"
FOREACH = "torch.optim.AdamW(foreach=True).step"
MASKED = "grad *= mask, torch.optim.AdamW(fused=True).step"


@dataclass(frozen=True)
class Peer:
    """A dense AdamW from another package.

    Args:
        name: name in the table.
        package: name for pip and `import`.
        module, optimizer: module and name of the class.
        options: arguments in addition to learning rate and weight decay.
        state_itemsize: bytes of a moment, for the minimum traffic of a step.
    """

    name: str
    package: str
    module: str
    optimizer: str
    options: Mapping[str, Any]
    state_itemsize: int

    def why_absent(self, device: torch.device) -> str:
        """Empty if the peer can run on the device, else the reason why not."""
        if importlib.util.find_spec(self.package) is None:
            return "not installed"
        return "" if device.type == "cuda" else f"made for a GPU, this is {device.type}"

    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def make(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer; errors of the package propagate."""
        found = getattr(importlib.import_module(self.module), self.optimizer)
        optimizer: torch.optim.Optimizer = found(params, lr=LR, weight_decay=WEIGHT_DECAY, **self.options)
        return optimizer

    def nbytes(self, numel: int) -> float:
        return floors.dense_adamw_bytes(numel, param_itemsize=2, state_itemsize=self.state_itemsize)


# https://github.com/pytorch/ao (torchao.optim), https://github.com/bitsandbytes-foundation/bitsandbytes,
# https://github.com/databricks/flashoptim. All use 8-bit moments; the scales of their blocks are not counted.
PEERS = (
    Peer("torchao AdamW8bit.step", "torchao", "torchao.optim", "AdamW8bit", {}, 1),
    Peer("bitsandbytes AdamW8bit.step", "bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {}, 1),
    # Without its extra weight bits: bf16 weights only, like the other peers.
    Peer("FlashAdamW.step", "flashoptim", "flashoptim", "FlashAdamW", {"master_weight_bits": None}, 1),
)


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


def peer_step(peer: Peer, params: Named, grads: Sequence[Tensor]) -> Callable[[], object]:
    """The peer's step, after one trial step that must change the weights and keep them finite.

    Raises:
        WrongResult: the weights did not change or are not finite.
    """
    _hold(params, grads)
    before = [param.detach().view(-1)[:64].clone() for param in params.values()]
    step = peer.make(list(params.values())).step
    step()
    for (name, param), old in zip(params.items(), before, strict=True):
        if not bool(param.isfinite().all()):
            raise WrongResult(f"{peer.name}: {name} is not finite after a step")
        if torch.equal(param.detach().view(-1)[:64], old):
            raise WrongResult(f"{peer.name}: a step left the first elements of {name} as they were")
    return step


def _hold(params: Named, grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params.values(), grads, strict=True):
        param.grad = grad
