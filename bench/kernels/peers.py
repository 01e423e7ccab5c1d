"""Other AdamW implementations, timed beside ours in the same run.

A peer that is not installed, or that is made for another device, is listed as that.
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

from . import floors
from .cases import WrongResult
from .optimizers import LR, WEIGHT_DECAY, Named

FUSED = "torch.optim.AdamW(fused=True).step"
FOREACH = "torch.optim.AdamW(foreach=True).step"
MASKED = "grad *= mask, torch.optim.AdamW(fused=True).step"


@dataclass(frozen=True)
class Peer:
    """A dense AdamW from another package.

    Args:
        name: in the table.
        package: as pip and `import` know it.
        module, optimizer: where the class stands.
        options: beside learning rate and weight decay.
        state_itemsize: bytes of a moment, for the bytes that a step has to move.
    """

    name: str
    package: str
    module: str
    optimizer: str
    options: Mapping[str, Any]
    state_itemsize: int

    def why_absent(self, device: torch.device) -> str:
        """Empty if it can be tried here, else the cause."""
        if importlib.util.find_spec(self.package) is None:
            return "not installed"
        return "" if device.type == "cuda" else f"made for a GPU, this is {device.type}"

    def version(self) -> str:
        return importlib.metadata.version(self.package)

    def make(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer; raises what the package raises."""
        found = getattr(importlib.import_module(self.module), self.optimizer)
        optimizer: torch.optim.Optimizer = found(params, lr=LR, weight_decay=WEIGHT_DECAY, **self.options)
        return optimizer

    def nbytes(self, numel: int) -> float:
        return floors.dense_adamw_bytes(numel, param_itemsize=2, state_itemsize=self.state_itemsize)


# https://github.com/pytorch/ao (torchao.optim), https://github.com/bitsandbytes-foundation/bitsandbytes,
# https://github.com/databricks/flashoptim. All keep 8-bit moments; the scales of their blocks are not counted.
PEERS = (
    Peer("torchao AdamW8bit.step", "torchao", "torchao.optim", "AdamW8bit", {}, 1),
    Peer("bitsandbytes AdamW8bit.step", "bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {}, 1),
    # Without its extra weight bits, as the others here: bf16 weights alone.
    Peer("FlashAdamW.step", "flashoptim", "flashoptim", "FlashAdamW", {"master_weight_bits": None}, 1),
)


def torch_adamw_step(params: Named, grads: Sequence[Tensor], *, fused: bool) -> Callable[[], object]:
    """The step of torch's AdamW, its states of the parameters' dtype: the fused implementation or the foreach one."""
    _hold(params, grads)
    return torch.optim.AdamW(params.values(), lr=LR, weight_decay=WEIGHT_DECAY, fused=fused, foreach=not fused).step


def masked_adamw_step(params: Named, grads: Sequence[Tensor], masks: Sequence[Tensor]) -> Callable[[], object]:
    """What sparse training costs without sparse kernels: gradients multiplied by bool masks, then a dense step.

    The gradients are multiplied in place: hand over copies.
    """
    step = torch_adamw_step(params, grads, fused=True)

    def masked_step() -> None:
        for grad, mask in zip(grads, masks, strict=True):
            grad.mul_(mask)
        step()

    return masked_step


def peer_step(peer: Peer, params: Named, grads: Sequence[Tensor]) -> Callable[[], object]:
    """The peer's step, tried once: weights have to move, and stay finite.

    Raises:
        WrongResult: they do not.
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
