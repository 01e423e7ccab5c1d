"""StateLog: what the analyses and the mask finding read, whatever files the states of a run are in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import DeltaLogError
from .state import StateLayout, TensorSpec


class StateLog(Protocol):
    """The states of a run at its logged steps, read tensor by tensor.

    All methods raise a DeltaLogError that names file and step if a step is not logged or a file is damaged.
    """

    directory: Path

    @property
    def steps(self) -> tuple[int, ...]:
        """The logged steps, ascending; the first one is the base W0."""

    @property
    def layout(self) -> StateLayout:
        """The tensors of the logged state."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata stored with the log, including `model` if it is known."""

    def digest(self, step: int) -> str:
        """Return a digest of the state at a step, 32 hex digits."""

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, the named tensor at that step), on the CPU, for ascending logged steps.

        Holds one tensor for any number of steps: a yielded tensor is valid until the next one is requested.
        """


def require_logged(directory: Path, step: int, logged: Collection[int]) -> None:
    """Raise a DeltaLogError unless `step` is one of the logged steps; says which are."""
    if step not in logged:
        near = min(logged, key=lambda other: abs(other - step))
        among = f"{len(logged)} are, {min(logged)} to {max(logged)}; the nearest is {near}"
        raise DeltaLogError(f"{directory}: step {step} is not logged; {among}")


def floating_parameters(log: StateLog) -> dict[str, TensorSpec]:
    """Return name -> spec of a log's floating-point parameters, without buffers, tied ones once, in model order."""
    layout = log.layout
    return {
        spec.name: spec
        for spec in layout.tensors
        if spec.name not in layout.buffers and getattr(torch, spec.dtype).is_floating_point
    }


def step_states(log: StateLog, steps: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (step, the state's tensors by their first names), on the CPU, for ascending logged steps.

    Holds one state, which is valid until the next one is requested. Raises as `StateLog.tensor_states`.
    """
    readers = {name: log.tensor_states(name, steps) for name in log.layout.names}
    for step in steps:
        yield step, {name: next(reader)[1] for name, reader in readers.items()}
