"""`Recorder`: checks the works of the kernel table, times them in turns, and keeps their rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sparse_opt import backends

from ...common.harness import WrongResult
from ...common.timing import Prepared, Timing, measure
from ..access_rates import AccessRates
from ..bounds import Traffic
from ..cases import Case, check

Row = dict[str, Any]

TORCH = "torch"  # the backend of a peer
FAST_BACKENDS = ("triton", "cuda")


class Work(NamedTuple):
    """A call to time, and the description of its row."""

    name: str
    backend: str
    density: float | None  # None if the work does not depend on it
    call: Callable[[], object] | Prepared
    traffic: Traffic | None  # minimum memory traffic
    is_auto: bool = False  # whether `auto` selects this backend
    bytes_per_active: float | None = None  # bytes of indices and moments, for optimizers
    changed: float | None = None  # share of active weights whose bits a step changes


def row_of(work: Work, timing: Timing, rates: AccessRates) -> Row:
    """The measurements of a work; its bandwidth bound is the time of its traffic at these rates."""
    traffic = work.traffic
    floor_ms = None if traffic is None else 1e3 * traffic.seconds(rates)
    write_rate = None if traffic is None else traffic.write_rate(rates)
    return {
        "work": work.name,
        "backend": work.backend,
        "is_auto": work.is_auto,
        "density": work.density,
        **timing.as_dict(),
        "bytes": None if traffic is None else traffic.bytes,
        "scattered_bytes": None if traffic is None else traffic.scattered,  # of them, written at scattered places
        "write_gb_per_s": None if write_rate is None else write_rate / 1e9,  # measured rate of these
        "floor_ms": floor_ms,
        "share_of_floor": None if floor_ms is None else floor_ms / timing.ms,  # 1 is the bandwidth bound
        "bytes_per_active": work.bytes_per_active,
        "changed": work.changed,
    }


@dataclass
class Recorder:
    """The rows of the kernel table so far.

    Args:
        device: the device of all tensors.
        backends: the backends to time.
        n_rounds: timed calls of each row.
        on_row: called with each row when it is measured.
        on_failure: called with each failed check; failed works are not timed.
        rates: the rates that bandwidth bounds follow from; `time_copy` sets the copy rate.
    """

    device: torch.device
    backends: Sequence[str]
    n_rounds: int = 20
    on_row: Callable[[Row], None] = lambda row: None
    on_failure: Callable[[str], None] = lambda failure: None
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # rows that were not timed -> reason
    peer_versions: dict[str, str] = field(default_factory=dict)
    rates: AccessRates = field(default_factory=lambda: AccessRates(0.0, {}))
    part: str = ""  # part of the table that new rows belong to

    def auto(self, op: str) -> str:
        """The backend that `auto` selects."""
        return backends.choose(op, self.device)

    def passes(self, name: str, run_check: Callable[[], object]) -> bool:
        """Run a check; record its failure."""
        try:
            run_check()
        except WrongResult as error:
            self.failures.append(f"{name}: {error}")
            self.on_failure(self.failures[-1])
            return False
        return True

    def time(self, works: Sequence[Work], n_rounds: int | None = None) -> None:
        """Time the works in turns."""
        calls = {str(i): work.call for i, work in enumerate(works)}
        timings = measure(calls, device=self.device, n_rounds=n_rounds or self.n_rounds)
        for work, timing in zip(works, timings.values(), strict=True):
            self._add(work, timing)

    def _add(self, work: Work, timing: Timing) -> None:
        self.rows.append({"part": self.part, **row_of(work, timing, self.rates)})
        self.left_out.pop(work.name, None)  # of an earlier run that was interrupted
        self.on_row(self.rows[-1])

    def time_cases(
        self,
        cases: Mapping[str, Case],
        density: float,
        others: Sequence[Work] = (),
        before: Callable[[], object] | None = None,
        only: str | None = None,
    ) -> None:
        """Check the cases on each backend, then time those that pass, and the other works, in turns.

        Args:
            before: called before each call of a case, untimed.
            only: check and time only this backend.
        """
        works = []
        for name, case in cases.items():
            for backend in self.backends:
                if only in (None, backend) and self.passes(name, functools.partial(check, case, backend)):
                    run = functools.partial(case.run, backend)
                    call = run if before is None else Prepared(before, run)
                    works.append(Work(name, backend, density, call, case.traffic, backend == self.auto(case.op)))
        self.time([*works, *others])

    def time_copy(self, numel: int, generator: torch.Generator) -> None:
        """Time a copy of a bf16 tensor, whose rate is a part of the bandwidth bounds of all rows."""
        source = torch.randn(numel, dtype=torch.bfloat16, device=self.device, generator=generator)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        timing = measure({"copy": copy}, device=self.device, n_rounds=self.n_rounds)["copy"]
        traffic = Traffic(2.0 * source.nbytes)
        self.rates = self.rates._replace(copy=traffic.bytes / (1e-3 * timing.ms))
        self._add(Work("copy", TORCH, None, copy, traffic), timing)
