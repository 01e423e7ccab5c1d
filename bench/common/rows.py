"""One line of the kernels' table, and what is timed for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .timing import Prepared, Timing

TORCH = "torch"  # the backend of a peer
FAST_BACKENDS = ("triton", "cuda")


class Work(NamedTuple):
    """What is timed, and its row's description."""

    name: str
    backend: str
    density: float | None
    call: Callable[[], object] | Prepared
    nbytes: float | None
    is_auto: bool = False
    bytes_per_active: float | None = None
    changed: float | None = None


@dataclass(frozen=True)
class Row:
    """What was measured of one work."""

    work: str
    backend: str
    density: float | None  # None where the work does not depend on it
    timing: Timing
    nbytes: float | None  # the fewest that the work needs to move
    floor_ms: float | None
    is_auto: bool = False  # the backend is the one that is taken where none is named
    bytes_per_active: float | None = None  # of indices and moments, where an optimizer holds them
    changed: float | None = None  # share of active weights whose bits a step changes

    @property
    def share_of_floor(self) -> float | None:
        """Floor over time: 1 is as fast as memory allows."""
        return None if self.floor_ms is None else self.floor_ms / self.timing.ms

    def as_dict(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "backend": self.backend,
            "is_auto": self.is_auto,
            "density": self.density,
            **self.timing.as_dict(),
            "bytes": self.nbytes,
            "floor_ms": self.floor_ms,
            "share_of_floor": self.share_of_floor,
            "bytes_per_active": self.bytes_per_active,
            "changed": self.changed,
        }


def row_of(work: Work, timing: Timing, copy_rate: float) -> Row:
    """The row of a work that was timed; its floor is its bytes over the copy rate, in bytes a second."""
    floor_ms = None if work.nbytes is None else 1e3 * work.nbytes / copy_rate
    return Row(
        work.name,
        work.backend,
        work.density,
        timing,
        work.nbytes,
        floor_ms,
        work.is_auto,
        work.bytes_per_active,
        work.changed,
    )
