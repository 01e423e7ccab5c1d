"""`StepTimer`: the time of each section of a step, measured without synchronizing with the GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Times the named sections of a step; a section entered more than once adds up.

    On CUDA a section's time is GPU time between two events on the current stream, for which `read` waits, so that
    timing changes nothing it measures. On a CPU it is wall time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to section `name`."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        yield
        end.record(stream)
        self._events.append((name, start, end))

    def read(self) -> dict[str, float]:
        """Seconds per section since the last read. On CUDA, it waits for the end of the sections."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds
