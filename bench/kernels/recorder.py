"""`Recorder`: makes the works of the kernel table, and times them in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparse_opt import backends

from ..harness import Work, time_works
from ..rows import Case as RowCase
from ..rows import Run
from ..timing import Prepared, measure
from .bounds import Rates, Traffic
from .cases import Case, check

TORCH = "torch"  # the backend of a peer
# Compared with each other, except that Triton's delta_encode reads its inputs twice.
FAST_BACKENDS = {"triton": "cuda", "cuda": "triton"}
NOT_COMPARED = ("delta_encode",)


@dataclass
class Recorder:
    """Times works and adds their rows to a run.

    Args:
        device: the device of all tensors.
        backends: the backends to time.
        n_rounds: timed calls of each work.
        common: what the cases of all rows have, such as the part of the table.
        rates: the rates that bandwidth bounds follow from; `time_copy` sets the copy rate.
    """

    run: Run
    device: torch.device
    backends: Sequence[str]
    n_rounds: int = 20
    common: RowCase = field(default_factory=dict)
    rates: Rates = field(default_factory=lambda: Rates(0.0, {}))

    def auto(self) -> str:
        """The backend that `auto` selects."""
        return backends.choose(self.device)

    def work(
        self,
        name: str,
        backend: str,
        density: float | None,
        call: Callable[[], object] | Prepared,
        traffic: Traffic | None = None,
        *,
        check: Callable[[], object] | None = None,
        peers: Mapping[str, RowCase] | None = None,
        **more: Any,
    ) -> Work:
        """A work with its bandwidth bound and its peers.

        Args:
            density: None if the work does not depend on it.
            traffic: minimum memory traffic. Without measured rates of its scattered writes, its bound is too low, and
                has another name, so that no target applies.
            more: other parts of the case.
        """
        found: dict[str, float | RowCase] = {}
        if traffic is not None:
            known = not traffic.scattered or bool(self.rates.write)
            found["bound" if known else "bound at the copy rate"] = 1e3 * traffic.seconds(self.rates)
        if name not in NOT_COMPARED and backend in FAST_BACKENDS:
            found["other backend"] = {"backend": FAST_BACKENDS[backend]}
        case = {"work": name, "backend": backend, "density": density, **more, **self.common}
        return Work(case, call, check, found | dict(peers or {}))

    def cases(
        self,
        cases: Mapping[str, Case],
        density: float,
        before: Callable[[], object] | None = None,
        peers: Mapping[str, RowCase] | None = None,
        only: str | None = None,
    ) -> list[Work]:
        """The works of cases by name, on each backend, or on `only` one.

        Args:
            before: called before each call of a case, untimed.
        """
        works = []
        for name, case in cases.items():
            for backend in self.backends if only is None else [only]:
                run = functools.partial(case.run, backend)
                call = run if before is None else Prepared(before, run)
                checked = functools.partial(check, case, backend)
                works.append(self.work(name, backend, density, call, case.traffic, check=checked, peers=peers))
        return works

    def time(self, works: Sequence[Work]) -> None:
        """Check the works, and time those with right results in turns."""
        time_works(self.run, "kernels", works, self.device, self.n_rounds)

    def time_copy(self, numel: int, generator: torch.Generator) -> None:
        """Time a copy of a bf16 tensor, whose rate is a part of the bandwidth bounds of all rows."""
        source = torch.randn(numel, dtype=torch.bfloat16, device=self.device, generator=generator)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        ms = measure({"copy": copy}, device=self.device, n_rounds=self.n_rounds)["copy"].ms
        traffic = Traffic(2.0 * source.nbytes)
        self.rates = Rates.of(traffic.bytes / (1e-3 * ms), self.device)
        self.time([self.work("copy", TORCH, None, copy, traffic)])
