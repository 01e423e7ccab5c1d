"""What mask finding and analysis ask of a log of states, whichever files it is kept in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from .delta_state import StateLayout


class StateLog(Protocol):
    """The states of a run at its logged steps, read tensor by tensor.

    Every reader raises DeltaLogError, naming file and step, on a step that is not logged and on damage.
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
        """What was kept with the log, `model` among it where it is known."""

    def digest(self, step: int) -> str:
        """A digest of the state at a step, as 32 hex digits."""

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """(step, the named tensor at that step), on the CPU, for ascending logged steps.

        Holds one tensor, whatever the number of steps: a yielded tensor is good until the next one is asked for.
        """
