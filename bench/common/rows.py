"""`Work` and `Row`: a timed call of the kernel table, and its measured line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .timing import Prepared, Timing

TORCH = "torch"  # the backend of a peer
FAST_BACKENDS = ("triton", "cuda")


class Work(NamedTuple):
    """A call to time, and the description of its row."""

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
    """The measurements of one work."""

    work: str
    backend: str
    density: float | None  # None if the work does not depend on it
    timing: Timing
    nbytes: float | None  # minimum memory traffic of the work
    floor_ms: float | None
    is_auto: bool = False  # whether `auto` selects this backend
    bytes_per_active: float | None = None  # bytes of indices and moments, for optimizers
    changed: float | None = None  # share of active weights whose bits a step changes

    @property
    def share_of_floor(self) -> float | None:
        """Floor over time; 1 is the bandwidth bound."""
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
    """The row of a timed work; its floor is its bytes over the copy rate in bytes per second."""
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
