"""Checks of what masks are made of; errors name the tensor, the value found and the value expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MaskError
from ..tensors import sharing_parameters
from .patterns import broken_unit

_FIRST_INT64_NUMEL = 2**31


def index_dtype(numel: int) -> torch.dtype:
    """Return the dtype of the positions in a parameter of `numel` elements."""
    return torch.int32 if numel < _FIRST_INT64_NUMEL else torch.int64


def checked_positions(name: str, tensor: Tensor, shape: Sequence[int], pattern: str) -> Tensor:
    """Check one tensor's positions and return a private CPU copy, or raise a MaskError that names the tensor."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
        found = f"{tensor.dtype} of {tensor.dim()} dimensions" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise MaskError(f"positions of {name} are {found}, expected int32 or int64 of one dimension")
    if any(int(size) < 0 for size in shape):
        raise MaskError(f"shape of {name} is {list(shape)}, expected sizes of 0 or more")
    numel = math.prod(map(int, shape))
    positions = tensor.detach().cpu()
    if positions.numel():
        if not bool((positions[1:] > positions[:-1]).all()):
            raise MaskError(f"positions of {name} are not strictly ascending, expected sorted and unique")
        first, last = int(positions[0]), int(positions[-1])
        if first < 0 or last >= numel:
            raise MaskError(f"positions of {name} run from {first} to {last}, expected 0 to {numel - 1}")
        broken = broken_unit(positions, shape, pattern)
        if broken is not None:
            raise MaskError(f"positions of {name} take a part of {pattern} unit {broken}, expected all or none of it")
        return positions.to(index_dtype(numel), copy=True).contiguous()
    # Not a copy: a copy of a tensor made from an empty numpy array would keep its stride of 0.
    return torch.empty(0, dtype=index_dtype(numel), device="cpu")


def positions_of_bool(name: str, mask: Tensor) -> Tensor:
    """Return the positions where a bool tensor is True, or raise a MaskError that names the tensor."""
    if not isinstance(name, str):
        raise MaskError(f"a mask has the name {name!r}, expected a parameter's name")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(f"mask of {name} is {found}, expected a bool tensor")
    if mask.layout != torch.strided or mask.is_meta:
        what = "on the meta device" if mask.is_meta else str(mask.layout)
        raise MaskError(f"mask of {name} is {what}, expected a dense tensor with values")
    return mask.detach().cpu().reshape(-1).nonzero().view(-1).to(index_dtype(mask.numel()))


def require_own_memory(params: Mapping[str, Tensor], active: Iterable[str]) -> None:
    """Raise a MaskError if a parameter named in `active` shares memory with another parameter; names both."""
    ids = {id(params[name]) for name in active if name in params}
    for first, second in sharing_parameters(params):
        if id(params[first]) in ids or id(params[second]) in ids:
            raise MaskError(
                f"{first} and {second} are different parameters that share memory; tie them by using one Parameter for "
                "both, or give each its own"
            )
