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


def is_number(value: Any, minimum: float, below: float) -> bool:
    """Whether `value` is a number, including numpy's, with minimum <= value < below."""
    compared: Any = value  # numbers.Real is not typed as ordered
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and bool(minimum <= compared < below)


def require_number(where: str, name: str, value: Any, *, minimum: float = 0.0, below: float = NUMBER_LIMIT) -> None:
    """Raise a ValueError unless `value` is a number, minimum <= value < below. `where` is put before the message.

    Without `below`, the number has to be in the range of fp32.
    """
    if is_number(value, minimum, below):
        return
    bound = "" if minimum == -math.inf else f" >= {minimum:g}"
    bound += " in the range of fp32" if below == NUMBER_LIMIT else f" and < {below:g}"
    raise ValueError(f"{where}{name} is {shown(value)}, expected a finite number{bound}")


def require_lr(where: str, name: str, lr: Any) -> None:
    """Raise a ValueError unless a learning rate is a number >= 0 or a floating-point tensor of one element.

    The value of a tensor is not checked, because it may be on a device.
    """
    if not isinstance(lr, Tensor):
        require_number(where, name, lr)
    elif lr.numel() != 1 or not lr.is_floating_point() or lr.layout != torch.strided or lr.is_meta:
        raise ValueError(
            f"{where}{name} is a {lr.dtype} tensor of shape {list(lr.shape)} on {lr.device}, "
            "expected one floating-point element"
        )


def require_max_norm(name: str, value: Any, expected: str, *, positive: bool = False) -> float:
    """Return the norm to which gradients are clipped: a number in the range of fp32, or infinity.

    torch's `clip_grad_norm_` clips to NaN too, and the step then makes all weights NaN.

    Raises:
        ValueError: `value` is no number, negative or NaN, or 0 with `positive`; says what was `expected`.
    """
    is_norm = is_number(value, 0.0, NUMBER_LIMIT) or (isinstance(value, numbers.Real) and value == math.inf)
    if not is_norm or (positive and value == 0):
        raise ValueError(f"{name} is {shown(value)}, expected {expected}, in the range of fp32 or infinite")
    return float(value)


def require_betas(where: str, name: str, betas: Any) -> None:
    """Raise a ValueError unless `betas` are two numbers, 0 <= beta < 1."""
    pair = betas if isinstance(betas, (tuple, list)) and len(betas) == 2 else ()
    if not pair or not all(is_number(beta, 0.0, 1.0) for beta in pair):
        raise ValueError(f"{where}{name} are {shown(betas)}, expected two numbers, 0 <= beta < 1")


def require_bool(where: str, name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{where}{name} is {shown(value)}, expected True or False")


def require_seed(where: str, name: str, seed: Any) -> None:
    """Raise a ValueError unless `seed` is an integer, 0 <= seed < 2**32."""
    is_integer = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not is_integer or not 0 <= int(seed) < SEED_LIMIT:
        raise ValueError(f"{where}{name} is {shown(seed)}, expected an integer, 0 <= seed < 2**32")


def shown(value: object) -> str:
    """Return `value` as text for an error message of one line."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a {value.dtype} tensor of shape {list(value.shape)}"
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 100 else text[:97] + "..."


# The check of each option of a parameter group.
VALIDATORS: dict[str, Callable[[str, str, Any], None]] = {
    "lr": require_lr,
    "betas": require_betas,
    "eps": require_number,
    "weight_decay": require_number,
    "momentum": require_number,
    "dampening": functools.partial(require_number, minimum=-math.inf),
    "nesterov": require_bool,
    "seed": require_seed,
}


def op_options(op: StepOp, group: Mapping[str, Any]) -> dict[str, float | bool]:
    """Return the options of `op` with the values of a parameter group, whose `betas` are its beta1 and beta2."""
    values = {**group, **dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))}
    return {name: values[name] for name in op.options}


def require_valid(op: StepOp, group: Mapping[str, Any], names: Iterable[str], where: str = "") -> None:
    """Raise a ValueError if one of the options of a parameter group in `names` is missing or out of range.

    Args:
        where: put before the message.
    """
    for name in names:
        VALIDATORS[name](where, name, group[name])
    if reason := op.why_invalid(op_options(op, group)):
        raise ValueError(where + reason)
