"""Every op on every backend of a device, over densities and dtypes: `pytest bench`.

Each case is checked against the reference before it is timed. `extra_info` carries the bytes that the work has to move
(see `floors`) and the rate that follows from the median; on a GPU the device's own time, without launches, beside it.
"""

from __future__ import annotations

import functools

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from sparse_opt import backends

from .cases import Case, check
from .inputs import random_case
from .shapes import LLAMA_64M, scaled
from .timing import measure, n_buffer_sets

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device(metafunc.config.getoption("--bench_device"))
    names = [name for name in backends.available(device.type) if not (name == "triton" and device.type == "cpu")]
    metafunc.parametrize("backend", names)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.025, 0.1])
@pytest.mark.parametrize("op", backends.OPS)
def test_op(
    benchmark: BenchmarkFixture,
    op: str,
    density: float,
    dtype: str,
    backend: str,
    device: torch.device,
    numel: int,
    n_rounds: int,
) -> None:
    make = functools.partial(_case, op, density, dtype, device, numel)
    first = make(seed=0)
    check(first, backend)

    n_sets = n_buffer_sets(int(first.floor_bytes), device)
    cases = [first, *(make(seed=seed) for seed in range(1, n_sets))]
    calls = [functools.partial(case.run, backend) for case in cases]
    benchmark.group = f"{op} {dtype} {density:.1%} on {device.type}"
    benchmark.extra_info |= {"bytes": first.floor_bytes, "numel": numel, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        timing = measure({backend: calls}, device=device, n_rounds=n_rounds)[backend]
        benchmark.extra_info |= {"gpu": timing.as_dict(), "gb_per_s": first.floor_bytes / (1e6 * timing.ms)}
    turns = iter(calls * (-(-(n_rounds + 1) // n_sets)))

    def run() -> None:
        next(turns)()
        if device.type == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(run, rounds=n_rounds, warmup_rounds=1)
    if device.type == "cpu" and benchmark.stats is not None:  # None under --benchmark-disable
        benchmark.extra_info["gb_per_s"] = first.floor_bytes / (1e9 * benchmark.stats.stats.median)


def _case(op: str, density: float, dtype: str, device: torch.device, numel: int, *, seed: int) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    return random_case(op, scaled(LLAMA_64M, numel), DTYPES[dtype], density, generator)
