"""Peers: AdamW implementations of torch and of other packages, timed in the same run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..peers import Peer
from .cases import WrongResult
from .optimizers import LR, WEIGHT_DECAY, Named

FUSED = "torch.optim.AdamW(fused=True).step"
FOREACH = "torch.optim.AdamW(foreach=True).step"
MASKED = "grad *= mask, torch.optim.AdamW(fused=True).step"
STATE_ITEMSIZE = 1  # bytes of a moment of every peer; the scales of its blocks are not counted


def adamw(name: str, package: str, module: str, optimizer: str, **options: Any) -> Peer:
    """A dense AdamW of another package for GPUs, with options besides learning rate and weight decay."""

    def make(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        found = getattr(importlib.import_module(module), optimizer)
        made: torch.optim.Optimizer = found(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
        return made

    return Peer(name, (package,), package, "cuda", make)


# https://github.com/pytorch/ao (torchao.optim), https://github.com/bitsandbytes-foundation/bitsandbytes,
# https://github.com/databricks/flashoptim. All use 8-bit moments.
PEERS = (
    adamw("torchao AdamW8bit.step", "torchao", "torchao.optim", "AdamW8bit"),
    adamw("bitsandbytes AdamW8bit.step", "bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
    # Without its extra weight bits: bf16 weights only, like the other peers.
    adamw("FlashAdamW.step", "flashoptim", "flashoptim", "FlashAdamW", master_weight_bits=None),
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
