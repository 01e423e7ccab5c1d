"""`pytest bench`: every op, and SparseAdamW's step, on every backend of a device, over densities and dtypes.

Each case is checked against the reference before it is timed: after a warm-up, and on a GPU with device time and
buffers rotated past the L2 (see `timing`). pytest-benchmark records these times. `extra_info` holds the minimum traffic
of the work in bytes (see `bounds`), the rate that follows from the median, and its share of the device's copy rate.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from sparse_opt import SparseAdamW, backends

from .kernels.cases import Case, check, random_active, random_case, random_tensors
from .kernels.optimizers import Gradients, check_first_step, mask_of, parameters, sparse_adamw, step_again, step_traffic
from .shapes import LLAMA_64M, SUITE_NUMEL, scaled
from .timing import measure, n_buffer_sets, samples

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DENSITIES = [0.025, 0.1]


CLOCK = [0.0]  # of pytest-benchmark: it advances by the measured times
pytestmark = pytest.mark.benchmark(timer=lambda: CLOCK[0])


class Session(NamedTuple):
    """Shared by the tests; the copy rate is in bytes per second, read plus written."""

    device: torch.device
    numel: int
    n_rounds: int
    copy_rate: float


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    option, threads = request.config.getoption, torch.get_num_threads()
    torch.set_num_threads(option("--bench_threads"))
    device = torch.device(option("--bench_device"))
    # Buffers much larger than every cache.
    source = torch.ones(1 << 29 if device.type == "cuda" else 1 << 25, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    copy_ms = measure({"copy": copy}, device=device, n_rounds=10)["copy"].ms
    numel = option("--bench_numel") or SUITE_NUMEL[device.type]
    yield Session(device, numel, option("--bench_rounds"), 2 * source.nbytes / (1e-3 * copy_ms))
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device(metafunc.config.getoption("--bench_device"))
    names = [name for name in backends.available(device) if not (name == "triton" and device.type == "cpu")]
    metafunc.parametrize("backend", names)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("op", backends.OPS)
def test_op(benchmark: BenchmarkFixture, session: Session, op: str, density: float, dtype: str, backend: str) -> None:
    benchmark.group = f"{op} {dtype} {density:.1%} on {session.device.type}"

    def make(seed: int) -> Case:
        generator = torch.Generator(session.device).manual_seed(seed)
        return random_case(op, scaled(LLAMA_64M, session.numel), DTYPES[dtype], density, generator)

    first = make(0)
    check(first, backend)
    n_sets = n_buffer_sets(int(first.traffic.bytes), session.device)
    cases = [first, *(make(seed) for seed in range(1, n_sets))]
    _time(benchmark, session, [functools.partial(case.run, backend) for case in cases], first.traffic.bytes)


@pytest.mark.parametrize("grads", ["dense", "compact"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", DENSITIES)
def test_sparse_adamw_step(
    benchmark: BenchmarkFixture, session: Session, density: float, dtype: str, grads: Gradients, backend: str
) -> None:
    benchmark.group = f"SparseAdamW.step, {grads} gradients, {dtype} {density:.1%} on {session.device.type}"
    shapes = scaled(LLAMA_64M, session.numel)

    def make(seed: int) -> SparseAdamW:
        generator = torch.Generator(session.device).manual_seed(seed)
        weights, gradients = (
            dict(zip(shapes, random_tensors(shapes, DTYPES[dtype], generator, scale), strict=True))
            for scale in (0.02, 1e-3)
        )
        active = random_active(list(weights.values()), density, generator)
        named = parameters(weights)
        optimizer = sparse_adamw(named, gradients, mask_of(weights, active), grads, backend)
        check_first_step(optimizer, named, gradients, active)
        return optimizer

    first = make(0)
    nbytes = step_traffic(first, param_itemsize=DTYPES[dtype].itemsize, dense_grads=grads == "dense").bytes
    n_sets = n_buffer_sets(int(nbytes), session.device)
    optimizers = [first, *(make(seed) for seed in range(1, n_sets))]
    _time(benchmark, session, [functools.partial(step_again, optimizer) for optimizer in optimizers], nbytes)


def _time(benchmark: BenchmarkFixture, session: Session, calls: Sequence[Callable[[], object]], nbytes: float) -> None:
    """Time the calls in rotation, and pass the times to pytest-benchmark, with the derived rates as extra_info."""
    found = samples({"": calls}, device=session.device, n_rounds=session.n_rounds)[""]
    times = iter(found)

    def pass_time() -> None:
        CLOCK[0] += 1e-3 * next(times)[0]

    benchmark.pedantic(pass_time, rounds=len(found))
    median = 1e-3 * statistics.median(ms for ms, _, _ in found)
    benchmark.extra_info |= {
        "bytes": nbytes,
        "gb_per_s": nbytes / (1e9 * median),
        "copy_gb_per_s": session.copy_rate / 1e9,
        "share_of_floor": nbytes / session.copy_rate / median,
        "host_ms": statistics.median(host for _, host, _ in found),
        "numel": session.numel,
        "threads": torch.get_num_threads(),
    }
