"""Interleaved timing of several variants of a call.

Each round calls every variant once, in a random order that is the same in every run, so that clock changes and other
load affect all variants, and no variant always follows the same other one. Results are medians with the 20th and 80th
percentile.

On a GPU three times are kept. The device time is read with events; the device spins before the first event while the
host enqueues the work, so that launch time is excluded. The host time ends when the call returns, starting with an idle
device; the wall time ends when the device has finished the work.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .rows import percentiles

# Longer than the launches of any timed variant take.
_LONGEST_SPIN_MS = 200.0


@dataclass(frozen=True)
class Prepared:
    """A call with an untimed preparation before each run, such as the forward pass before a backward pass."""

    before: Callable[[], object]
    call: Callable[[], object]

    def __call__(self) -> object:
        return self.call()


Variant = Callable[[], object] | Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one variant."""

    ms: float  # median time of the work, on the GPU if there is one
    p20_ms: float
    p80_ms: float
    host_ms: float  # median time until the call returned; without a GPU the same as ms
    wall_ms: float  # median time until the work was done, including launches; without a GPU the same as ms
    n_rounds: int


# Runs a call and returns its device, host and wall time in milliseconds. The preparation of a `Prepared` call is run
# first and not timed.
Clock = Callable[[Callable[[], object]], tuple[float, float, float]]


def measure(variants: Mapping[str, Variant], **options: Any) -> dict[str, Timing]:
    """Time the variants in turns; name -> Timing. The options are those of `samples`."""
    found = {}
    for name, times in samples(variants, **options).items():
        device, host, wall = zip(*times, strict=True)
        p20, median, p80 = percentiles(device)
        found[name] = Timing(median, p20, p80, statistics.median(host), statistics.median(wall), len(times))
    return found


def samples(
    variants: Mapping[str, Variant],
    *,
    device: torch.device | str = "cpu",
    n_warmup: int = 3,
    n_rounds: int = 20,
    clock: Clock | None = None,
) -> dict[str, list[tuple[float, float, float]]]:
    """Time the variants in turns; name -> the clock's result of every timed call.

    Args:
        variants: name -> a callable without arguments; or several that do the same work on different buffers, taken in
            rotation, which keeps small buffers from staying in a cache (see ``n_buffer_sets``). Each may be `Prepared`.
        device: where the work runs; a GPU is timed with events.
        n_warmup: untimed calls of each variant.
        n_rounds: timed calls of each variant.
        clock: times a call; by default the clock of the device.
    """
    rotations = {
        name: itertools.cycle([variant] if callable(variant) else variant) for name, variant in variants.items()
    }
    for rotation in rotations.values():
        for call in itertools.islice(rotation, n_warmup):
            _prepare(call)
            call()
    device = torch.device(device)
    clock = clock or (_cpu_clock if device.type == "cpu" else functools.partial(_cuda_clock, device))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in variants}
    names = list(variants)
    orders = random.Random(0)
    for _ in range(n_rounds):
        orders.shuffle(names)
        for name in names:
            times[name].append(clock(next(rotations[name])))
    return times


def n_buffer_sets(nbytes: int, device: torch.device | str) -> int:
    """The number of buffer sets of ``nbytes`` in a rotation, so that no set is still in the GPU's L2 when it is reused.

    1 on a CPU, where each set must be larger than the caches.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    # Three times the cache size, because the L2 does not strictly evict the oldest data.
    return max(1, -(-3 * l2 // max(nbytes, 1)))


def _prepare(call: Callable[[], object]) -> None:
    if isinstance(call, Prepared):
        call.before()


def _cpu_clock(call: Callable[[], object]) -> tuple[float, float, float]:
    _prepare(call)
    began = time.perf_counter()
    call()
    ms = 1e3 * (time.perf_counter() - began)
    return ms, ms, ms


def _cuda_clock(device: torch.device, call: Callable[[], object]) -> tuple[float, float, float]:
    with torch.cuda.device(device):
        _prepare(call)
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        host_ms = 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - began)

        _prepare(call)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Twice the host time, so that all launches are queued before the device reaches them. A call that synchronizes
        # takes as long as its work, for which this is enough.
        torch.cuda._sleep(int(_spin_cycles_per_ms(device) * min(2.0 * host_ms + 0.1, _LONGEST_SPIN_MS)))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end), host_ms, wall_ms


@functools.cache
def _spin_cycles_per_ms(device: torch.device) -> float:
    cycles = 4_000_000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):  # the first calls also raise the clock of an idle GPU
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / start.elapsed_time(end)
