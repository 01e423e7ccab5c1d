"""Options and fixtures of `pytest bench`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .environment import environment

# Small enough for a minute on two cores; past the caches of most CPUs, and rotated past the L2 of a GPU.
DEFAULT_NUMEL = 1 << 20


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sparse_opt.bench")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    group.addoption("--bench_device", default=default, help=f"where the ops are timed ({default})")
    group.addoption("--bench_numel", type=int, default=DEFAULT_NUMEL, help=f"elements of all tensors ({DEFAULT_NUMEL})")
    group.addoption("--bench_rounds", type=int, default=10, help="timed calls of each case (10)")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["sparse_opt"] = environment(config.getoption("--bench_device"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--bench_device"))


@pytest.fixture(scope="session")
def numel(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--bench_numel")


@pytest.fixture(scope="session")
def n_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--bench_rounds")
