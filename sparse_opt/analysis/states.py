"""Helpers of the analyses: selection of tensors and steps, and distances of elements, computed in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..delta.state_log import StateLog, floating_parameters, require_logged
from ..errors import DataError
from ..masks.parameters import select_names
from ..tensors import as_bits

# Wraps the names that an analysis walks over: `lambda names: tqdm(names)`.
Progress = Callable[[Sequence[str]], Iterable[str]]

DEVICE_CPU = torch.device("cpu")
# Elements that are compared at a time, which bounds the temporary memory.
_BLOCK = 1 << 22


def no_progress(names: Sequence[str]) -> Iterable[str]:
    """A `Progress` that shows nothing."""
    return names


def chosen_names(
    log: StateLog, include: Sequence[str] | None, exclude: Sequence[str] | None, mlp_only: bool
) -> list[str]:
    """The floating-point parameters of a log that `masks.parameters.select_names` chooses, in the model's order.

    Raises:
        DataError: none is left.
    """
    names = select_names(
        floating_parameters(log), include=include, exclude=exclude, mlp_only=mlp_only, tied=log.layout.aliases
    )
    if not names:
        raise DataError(f"no tensor of {log.directory} is chosen by include, exclude and mlp_only")
    return names


def require_thresholds(name: str, values: Sequence[float]) -> None:
    """Raise a DataError that names the argument unless all of its values are at least 0."""
    for value in values:
        if not value >= 0:
            raise DataError(f"{name} is {value}, expected at least 0")


def chosen_steps(log: StateLog, steps: Sequence[int] | None) -> list[int]:
    """The given steps, ascending, or all after the base.

    Raises:
        DataError: a step is the base, or no step is logged after the base.
        DeltaLogError: a step is not logged.
    """
    logged = log.steps
    if len(logged) < 2:
        raise DataError(f"{log.directory}: no step after {logged[0]} to compare with it")
    for step in steps or ():
        require_logged(log.directory, step, logged)
        if step == logged[0]:
            raise DataError(f"{log.directory}: step {step} is the base, expected a later step")
    return sorted(set(steps)) if steps else list(logged[1:])


def base_and_states(log: StateLog, name: str, steps: Sequence[int]) -> tuple[Tensor, Iterator[tuple[int, Tensor]]]:
    """Return a copy of the base tensor, and (step, tensor) for the others, each valid until the next is requested."""
    states = log.tensor_states(name, [log.steps[0], *steps])
    # Copied: a yielded tensor is valid only until the next one is requested.
    return next(states)[1].clone(), states


def blocks(*tensors: Tensor, device: torch.device = DEVICE_CPU) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching flat pieces of tensors of one shape, on `device`."""
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _BLOCK):
        yield tuple(piece[start : start + _BLOCK].to(device) for piece in flat)


def common_dtype(base: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors in the dtype that holds the values of both exactly."""
    dtype = torch.promote_types(base.dtype, tensor.dtype)
    return base.to(dtype), tensor.to(dtype)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which differences are taken: fp32, of fp64 tensors fp64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def distances(base: Tensor, tensor: Tensor) -> Tensor:
    """abs(tensor - base) of each element of two flat tensors of one dtype, in `wide_dtype`.

    0 if no bit of the element changed, also for NaN; infinite if one changed and the difference is NaN or infinite.
    """
    wide = wide_dtype(tensor)
    moved = (tensor.to(wide) - base.to(wide)).abs_().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return moved.masked_fill_(as_bits(base) == as_bits(tensor), 0.0)


def threshold_text(value: float) -> str:
    """Format a tolerance or tau for headings and legends: `1e-5`, `2.5e-4`, `0`, `0.01`."""
    if value == 0 or value >= 0.01:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.6e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
