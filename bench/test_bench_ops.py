"""`pytest bench`: every op, and SparseAdamW's step, on every backend of a device, over densities and dtypes.

Each case is checked against the reference before it is timed. All backends of a case are timed in turns (see `timing`)
when its first test runs: after a warm-up, and on a GPU with device time and buffers rotated past the L2.
pytest-benchmark records these times. `extra_info` holds the minimum traffic of the work in bytes (see `bounds`), the
rate that follows from the median, and its share of the device's copy rate.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from sparse_opt import backends

from .kernels.cases import Case, check
from .kernels.inputs import random_active, random_case, random_tensors
from .kernels.optimizers import (
    Gradients,
    check_first_step,
    mask_of,
    parameters,
    sparse_adamw,
    step_again,
    step_traffic,
)
from .shapes import LLAMA_64M, SUITE_NUMEL, scaled
from .timing import n_buffer_sets, samples

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DENSITIES = [0.025, 0.1]


class Ticker:
    """A clock for pytest-benchmark that advances by the measured times."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


TICKER = Ticker()
pytestmark = pytest.mark.benchmark(timer=TICKER)


class Measured(NamedTuple):
    """The times of one backend."""

    seconds: list[float]
    host_seconds: list[float]
    nbytes: float


class Session:
    """Shared by the tests: the device, the copy rate, and the times of the measured cases."""

    def __init__(self, config: pytest.Config, selected: dict[tuple[object, ...], list[str]]) -> None:
        self.device = torch.device(config.getoption("--bench_device"))
        self.numel: int = config.getoption("--bench_numel") or SUITE_NUMEL[self.device.type]
        self.n_rounds: int = config.getoption("--bench_rounds")
        self.selected = selected  # test and its parameters without the backend -> the backends that were selected
        self.found: dict[tuple[object, ...], dict[str, Measured]] = {}

    @functools.cached_property
    def copy_rate(self) -> float:
        """Copy rate in bytes per second, read plus written, between buffers much larger than every cache."""
        source = torch.ones(1 << 29 if self.device.type == "cuda" else 1 << 25, device=self.device)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        times = samples({"copy": copy}, device=self.device, n_rounds=10)["copy"]
        return 2 * source.nbytes / (1e-3 * statistics.median(ms for ms, _, _ in times))

    def measure(
        self, calls: Mapping[str, Sequence[Callable[[], object]]], nbytes: Mapping[str, float]
    ) -> dict[str, Measured]:
        """Time the backends in turns; return the times by backend."""
        times = samples(calls, device=self.device, n_rounds=self.n_rounds)
        return {
            name: Measured([1e-3 * ms for ms, _, _ in found], [1e-3 * host for _, host, _ in found], nbytes[name])
            for name, found in times.items()
        }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device(metafunc.config.getoption("--bench_device"))
    names = [name for name in backends.available(device) if not (name == "triton" and device.type == "cpu")]
    metafunc.parametrize("backend", names)


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    selected: dict[tuple[object, ...], list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "backend" in item.callspec.params:
            selected.setdefault(_key(item), []).append(str(item.callspec.params["backend"]))
    threads = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("--bench_threads"))
    yield Session(request.config, selected)
    torch.set_num_threads(threads)


def _key(item: pytest.Function) -> tuple[object, ...]:
    others = sorted((name, value) for name, value in item.callspec.params.items() if name != "backend")
    return item.originalname, *others


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("op", backends.OPS)
def test_op(
    benchmark: BenchmarkFixture,
    request: pytest.FixtureRequest,
    session: Session,
    op: str,
    density: float,
    dtype: str,
    backend: str,
) -> None:
    benchmark.group = f"{op} {dtype} {density:.1%} on {session.device.type}"
    key = _key(request.node)
    if key not in session.found:
        session.found[key] = _measured_op(session, op, density, dtype, session.selected[key])
    _report(benchmark, session, session.found[key][backend])


@pytest.mark.parametrize("grads", ["dense", "compact"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", DENSITIES)
def test_sparse_adamw_step(
    benchmark: BenchmarkFixture,
    request: pytest.FixtureRequest,
    session: Session,
    density: float,
    dtype: str,
    grads: Gradients,
    backend: str,
) -> None:
    benchmark.group = f"SparseAdamW.step, {grads} gradients, {dtype} {density:.1%} on {session.device.type}"
    key = _key(request.node)
    if key not in session.found:
        session.found[key] = _measured_step(session, density, dtype, grads, session.selected[key])
    _report(benchmark, session, session.found[key][backend])


def _measured_op(session: Session, op: str, density: float, dtype: str, names: Sequence[str]) -> dict[str, Measured]:
    def make(seed: int) -> Case:
        generator = torch.Generator(session.device).manual_seed(seed)
        return random_case(op, scaled(LLAMA_64M, session.numel), DTYPES[dtype], density, generator)

    first = make(0)
    for name in names:
        check(first, name)
    n_sets = n_buffer_sets(int(first.bound_bytes), session.device)
    cases = [first, *(make(seed) for seed in range(1, n_sets))]
    calls = {name: [functools.partial(case.run, name) for case in cases] for name in names}
    return session.measure(calls, dict.fromkeys(names, first.bound_bytes))


def _measured_step(
    session: Session, density: float, dtype: str, grads: Gradients, names: Sequence[str]
) -> dict[str, Measured]:
    shapes = scaled(LLAMA_64M, session.numel)
    calls: dict[str, list[Callable[[], object]]] = {name: [] for name in names}
    nbytes, n_sets, seed = 0.0, 1, 0
    while seed < n_sets:
        generator = torch.Generator(session.device).manual_seed(seed)
        weights, gradients = (
            dict(zip(shapes, random_tensors(shapes, DTYPES[dtype], generator, scale), strict=True))
            for scale in (0.02, 1e-3)
        )
        active = random_active(list(weights.values()), density, generator)
        mask = mask_of(weights, active)
        for name in names:
            named = parameters({key: weight.clone() for key, weight in weights.items()})
            optimizer = sparse_adamw(named, gradients, mask, grads, name)
            check_first_step(optimizer, named, gradients, active)
            calls[name].append(functools.partial(step_again, optimizer))
        if seed == 0:
            itemsize = DTYPES[dtype].itemsize
            nbytes = step_traffic(optimizer, param_itemsize=itemsize, dense_grads=grads == "dense").bytes
            n_sets = n_buffer_sets(int(nbytes), session.device)
        seed += 1
    return session.measure(calls, dict.fromkeys(names, nbytes))


def _report(benchmark: BenchmarkFixture, session: Session, found: Measured) -> None:
    """Pass the measured times to pytest-benchmark, with the derived rates as extra_info."""
    times = iter(found.seconds)

    def pass_time() -> None:
        TICKER.now += next(times)

    benchmark.pedantic(pass_time, rounds=len(found.seconds))
    median = statistics.median(found.seconds)
    benchmark.extra_info |= {
        "bytes": found.nbytes,
        "gb_per_s": found.nbytes / (1e9 * median),
        "copy_gb_per_s": session.copy_rate / 1e9,
        "share_of_floor": found.nbytes / session.copy_rate / median,
        "host_ms": 1e3 * statistics.median(found.host_seconds),
        "numel": session.numel,
        "threads": torch.get_num_threads(),
    }
