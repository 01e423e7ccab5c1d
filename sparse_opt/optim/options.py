"""The options of the sparse optimizers: keyword arguments that all share, and checks of a parameter group's options."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from ..ops.step_ops import StepOp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

# The first number that the ops cannot take: their scalars are fp32.
NUMBER_LIMIT = math.nextafter(torch.finfo(torch.float32).max, math.inf)
# The high word of an op's seed, of 63 bits, is the number of the bucket. The ops mix both words into 32 bits: up to
# 29,000 buckets whose seeds are less than 100,000 apart have different streams.
SEED_LIMIT = 2**32


class SharedOptions(TypedDict, total=False):
    """The keyword arguments that all sparse optimizers have; `SparseAdamW` documents them."""

    grads: Literal["compact", "dense"]
    max_grad_norm: float | None
    state_dtype: torch.dtype
    grad_dtype: torch.dtype
    master_weights: bool
    stochastic_rounding: bool
    seed: int
    freeze_inactive: bool
    keep_base_weights: bool
    offload_base_weights: bool
    compact_weights: bool
    amp_scaling: bool
    model: nn.Module | None
    tile_backward: bool | None
    backend: str | None
    process_group: ProcessGroup | Literal[False] | None


def is_number(value: Any, minimum: float = 0.0, below: float = NUMBER_LIMIT) -> bool:
    """Whether `value` is a number, including numpy's, with minimum <= value < below."""
    compared: Any = value  # numbers.Real is not typed as ordered
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and bool(minimum <= compared < below)


def is_lr(value: Any) -> bool:
    """Whether `value` is a learning rate. The value of a tensor is not checked, because it may be on a device."""
    if not isinstance(value, Tensor):
        return is_number(value)
    return value.numel() == 1 and value.is_floating_point() and value.layout == torch.strided and not value.is_meta


def are_betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(is_number(beta, 0.0, 1.0) for beta in value)


def is_seed(value: Any) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and 0 <= int(value) < SEED_LIMIT


_NUMBER = "a finite number >= 0 in the range of fp32"
# The check of each option of a parameter group, and what it expects.
VALIDATORS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (is_lr, f"{_NUMBER}, or a tensor of one floating-point element"),
    "betas": (are_betas, "two numbers, 0 <= beta < 1"),
    "eps": (is_number, _NUMBER),
    "weight_decay": (is_number, _NUMBER),
    "momentum": (is_number, _NUMBER),
    "dampening": (functools.partial(is_number, minimum=-math.inf), "a finite number in the range of fp32"),
    "nesterov": (lambda value: isinstance(value, bool), "True or False"),
    "seed": (is_seed, "an integer, 0 <= seed < 2**32"),
}


def require_valid(op: StepOp, group: Mapping[str, Any], names: Iterable[str], where: str = "") -> None:
    """Raise a ValueError if one of the options of a parameter group in `names` is out of range.

    Args:
        where: put before the message.
    """
    for name in names:
        is_valid, expected = VALIDATORS[name]
        if not is_valid(group[name]):
            raise ValueError(f"{where}{name} is {shown(group[name])}, expected {expected}")
    if reason := op.why_invalid(op_options(op, group)):
        raise ValueError(where + reason)


def require_max_norm(name: str, value: Any, expected: str, *, positive: bool = False) -> float:
    """Return the norm to which gradients are clipped: a number in the range of fp32, or infinity.

    torch's `clip_grad_norm_` clips to NaN too, and the step then makes all weights NaN.

    Raises:
        ValueError: `value` is no number, negative or NaN, or 0 with `positive`; says what was `expected`.
    """
    is_norm = is_number(value) or (isinstance(value, numbers.Real) and value == math.inf)
    if not is_norm or (positive and value == 0):
        raise ValueError(f"{name} is {shown(value)}, expected {expected}, in the range of fp32 or infinite")
    return float(value)


def shown(value: object) -> str:
    """Return `value` as text for an error message of one line."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 100 else text[:97] + "..."


def op_options(op: StepOp, group: Mapping[str, Any]) -> dict[str, float | bool]:
    """Return the options of `op` with the values of a parameter group, whose `betas` are its beta1 and beta2."""
    values = {**group, **dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))}
    return {name: values[name] for name in op.options}
