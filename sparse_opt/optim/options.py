"""Checks of a parameter group's options, which users and schedulers may change at any time."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

# The first number that the ops cannot take: their scalars are fp32.
NUMBER_LIMIT = math.nextafter(torch.finfo(torch.float32).max, math.inf)
SEED_LIMIT = 2**62  # a bucket adds its number to the seed, and the sum must stay below 2**63


def is_number(value: Any, minimum: float, below: float) -> bool:
    """Whether `value` is a number, including numpy's, with minimum <= value < below."""
    compared: Any = value  # numbers.Real is not typed as ordered
    return isinstance(value, numbers.Real) and bool(minimum <= compared < below)


def require_number(where: str, name: str, value: Any, *, minimum: float = 0.0, below: float = NUMBER_LIMIT) -> None:
    """Raise a ValueError unless `value` is a number, minimum <= value < below. `where` is put before the message.

    Without `below`, the number has to be in the range of fp32.
    """
    if is_number(value, minimum, below):
        return
    bound = "" if minimum == -math.inf else f" >= {minimum:g}"
    bound += " in the range of fp32" if below == NUMBER_LIMIT else f" and < {below:g}"
    raise ValueError(f"{where}{name} is {shown(value)}, expected a finite number{bound}")


def require_lr(where: str, lr: Any) -> None:
    """Raise a ValueError unless `lr` is a number >= 0 or a floating-point tensor of one element.

    The value of a tensor is not checked, because it may be on a device.
    """
    if not isinstance(lr, Tensor):
        require_number(where, "lr", lr)
    elif lr.numel() != 1 or not lr.is_floating_point() or lr.layout != torch.strided or lr.is_meta:
        raise ValueError(
            f"{where}lr is a {lr.dtype} tensor of shape {list(lr.shape)} on {lr.device}, "
            "expected one floating-point element"
        )


def require_seed(where: str, seed: Any) -> None:
    """Raise a ValueError unless `seed` is an integer, 0 <= seed < 2**62."""
    if not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < SEED_LIMIT:
        raise ValueError(f"{where}seed is {shown(seed)}, expected an integer, 0 <= seed < 2**62")


def shown(value: object) -> str:
    """Return `value` as text for an error message of one line."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a {value.dtype} tensor of shape {list(value.shape)}"
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 100 else text[:97] + "..."
