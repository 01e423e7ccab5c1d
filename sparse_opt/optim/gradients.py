"""Computation of compact gradients, from dense gradients or from the operands of tile products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops.checks import FLOAT_DTYPES
from .buckets import Bucket


def gather_(bucket: Bucket, i: int, grad: Tensor, found_inf: Tensor | None) -> None:
    """Add `grad`, the gradient of parameter i, to the bucket's compact gradient, or start it."""
    assert bucket.grad is not None
    if bucket.native is not None:
        bucket.native.gather_(i, grad, bucket.grad, bucket.sum_sq, found_inf)
        return
    if grad.numel() != bucket.numels[i]:
        raise ValueError(
            f"the gradient of {bucket.names[i]!r} has {grad.numel()} elements, but the parameter had "
            f"{bucket.numels[i]} when its mask was bound"
        )
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
        **bucket.layout([i]),
    )
    bucket.mark_received(i)


def tiles_(bucket: Bucket, i: int, left: Tensor, right: Tensor, found_inf: Tensor | None) -> None:
    """Add the active tiles of left^T @ right, the gradient of parameter i, to the compact gradient, or start it."""
    assert bucket.grad is not None and bucket.tiles is not None
    if bucket.native is not None:
        bucket.native.tile_grad_(i, left, right, bucket.grad, bucket.sum_sq, found_inf)
        return
    bucket.ops.tile_weight_grad_(
        bucket.grad,
        [left.contiguous()],
        [right.contiguous()],
        bucket.tiles.table,
        bucket.tiles.starts[i : i + 1],
        bucket.tiles.ends[i : i + 1],
        tile_size=bucket.tiles.tile_size,
        scale=None,
        accumulate=bucket.received[i],
        sum_sq=bucket.sum_sq[i : i + 1],
        found_inf=found_inf,
    )
    bucket.mark_received(i, by_tiles=True)


def tile_rows(bucket: Bucket, i: int, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> Tensor:
    """Compute the active tiles of left^T @ right, with left [tokens, rows] in parts: fp32 [slots of parameter i].

    The compact gradient does not change; `Bucket.add_values_` adds the result to it.

    Args:
        parts: (first row, [tokens, rows from it on]), together all rows. Each part is released before the next one.
        right: [tokens, columns].
    """
    assert bucket.tiles is not None
    start, end = bucket.starts[i], bucket.ends[i]
    values = torch.zeros(end - start, dtype=torch.float32, device=bucket.device)
    right = right.contiguous()
    for first_row, left in parts:
        tiles = bucket.tiles.of_rows(i, first_row, first_row + left.shape[1])
        tiles[:, 2] -= start
        bucket.ops.tile_weight_grad_(
            values,
            [left.contiguous()],
            [right],
            tiles,
            [0],
            [len(tiles)],
            tile_size=bucket.tiles.tile_size,
            scale=None,
            accumulate=False,
            sum_sq=None,
            found_inf=None,
        )
        del left  # free it before the next part is computed
    return values


def check_dense(bucket: Bucket) -> None:
    """Raise an error that names the parameter if a dense gradient cannot be read at the indices."""
    first = None
    for name, param in zip(bucket.names, bucket.params, strict=True):
        grad = param.grad
        if grad is None:
            continue
        what = f"the gradient of {name!r}"
        if grad.layout != torch.strided:
            raise RuntimeError(f"{what} is {grad.layout}, expected a strided tensor")
        if grad.shape != param.shape:
            raise ValueError(f"{what} has shape {list(grad.shape)}, expected {list(param.shape)}")
        if grad.device != bucket.device:
            raise ValueError(f"{what} is on {grad.device}, expected {bucket.device}")
        if grad.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{what} is {grad.dtype}, expected bfloat16, float16 or float32")
        first = first or (name, grad.dtype)
        if grad.dtype != first[1]:
            raise ValueError(f"{what} is {grad.dtype}, but that of {first[0]!r} is {first[1]}; expected one dtype")


def gather_all_(bucket: Bucket) -> None:
    """Gather every dense gradient of the bucket in one call; parameters without one count as not received."""
    assert bucket.grad is not None
    present = [i for i, p in enumerate(bucket.params) if p.grad is not None]
    sum_sq = bucket.sum_sq if len(present) == len(bucket.params) else torch.zeros_like(bucket.sum_sq[: len(present)])
    if present:
        bucket.ops.masked_grad_gather_(
            bucket.grad,
            # parameters in `present` have a gradient
            [bucket.params[i].grad.contiguous() for i in present],  # type: ignore[union-attr]
            bucket.indices,
            [bucket.starts[i] for i in present],
            [bucket.ends[i] for i in present],
            scale=None,
            accumulate=False,
            sum_sq=sum_sq,
            found_inf=None,
            **bucket.layout(present),
        )
    if len(present) < len(bucket.params):
        bucket.sum_sq.zero_()
        bucket.sum_sq[to_device(present, torch.int64, bucket.device)] = sum_sq
    bucket.received = [p.grad is not None for p in bucket.params]


def to_device(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a small tensor on the device, without a synchronization."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
