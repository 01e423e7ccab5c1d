"""Compact gradients: hooks that gather each dense gradient as soon as autograd has made it, and free it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from .buckets import Bucket

if TYPE_CHECKING:
    from .sparse_optimizer import SparseOptimizer


class Carrier:
    """Lets `torch.amp.GradScaler` see compact gradients, which are not in any `.grad`.

    The scaler multiplies each `.grad` it finds in the parameter groups by 1/scale and looks for inf and NaN in it.
    The carrier is a parameter of one element that stands in the first group; its `.grad` starts at 1 in each
    accumulation, the gather turns it to inf when a gradient is not finite, and what the scaler leaves in it is the
    factor that the compact gradients still have to be multiplied by.
    """

    def __init__(self, device: torch.device) -> None:
        self.param = Parameter(torch.zeros(1, device=device))
        self.factor = torch.ones(1, device=device)

    def begin(self) -> None:
        if self.param.grad is None:
            self.factor.fill_(1.0)
            self.param.grad = self.factor

    def clear(self) -> None:
        self.param.grad = None


def hook(optimizer: weakref.ref[SparseOptimizer], bucket: weakref.ref[Bucket], i: int) -> Callable[[Tensor], None]:
    """For `register_post_accumulate_grad_hook` of the bucket's parameter i. Keeps neither alive."""

    def gather(param: Tensor) -> None:
        owner, target = optimizer(), bucket()
        if owner is not None and target is not None:
            owner._receive(target, i, param)

    return gather


def gather_(bucket: Bucket, i: int, grad: Tensor, found_inf: Tensor | None) -> None:
    """Add `grad`, the gradient of parameter i, to the bucket's compact gradient, or begin it."""
    assert bucket.grad is not None
    if bucket.bound is not None:
        bucket.bound.gather_(i, bucket.grad, bucket.received[i], bucket.sum_sq, found_inf)
    else:
        bucket.ops.masked_grad_gather_(
            bucket.grad,
            [grad.contiguous()],
            bucket.indices,
            bucket.starts[i : i + 1],
            bucket.ends[i : i + 1],
            scale=None,
            accumulate=bucket.received[i],
            sum_sq=bucket.sum_sq[i : i + 1],
            found_inf=found_inf,
        )
    bucket.received[i] = True


def gather_all_(bucket: Bucket) -> None:
    """Gather every dense gradient of the bucket in one call; parameters without one count as not received."""
    assert bucket.grad is not None
    present = [i for i, p in enumerate(bucket.params) if p.grad is not None]
    sum_sq = bucket.sum_sq if len(present) == len(bucket.params) else torch.zeros_like(bucket.sum_sq[: len(present)])
    if present:
        bucket.ops.masked_grad_gather_(
            bucket.grad,
            [bucket.params[i].grad.contiguous() for i in present],  # type: ignore[union-attr]
            bucket.indices,
            [bucket.starts[i] for i in present],
            [bucket.ends[i] for i in present],
            scale=None,
            accumulate=False,
            sum_sq=sum_sq,
            found_inf=None,
        )
    if len(present) < len(bucket.params):
        bucket.sum_sq.zero_()
        bucket.sum_sq[torch.tensor(present, dtype=torch.int64, device=bucket.device)] = sum_sq
    bucket.received = [p.grad is not None for p in bucket.params]
