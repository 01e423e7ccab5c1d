"""Options of `pytest bench`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .rows import environment
from .shapes import SUITE_NUMEL


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sparse_opt.bench")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    group.addoption("--bench_device", default=default, help=f"where the ops are timed ({default})")
    small, large = SUITE_NUMEL["cpu"], SUITE_NUMEL["cuda"]
    group.addoption("--bench_numel", type=int, help=f"elements of all tensors ({small}; on a GPU {large})")
    # With several threads, all wait at a barrier for a thread whose core another process uses.
    group.addoption("--bench_threads", type=int, default=1, help="CPU threads (1: the steadiest)")
    group.addoption("--bench_rounds", type=int, default=100, help="timed calls (100)")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    # Keep the host name and the long list of CPU flags out of committed files.
    machine_info.pop("node", None)
    machine_info.get("cpu", {}).pop("flags", None)
    machine_info["sparse_opt"] = environment(config.getoption("--bench_device"))
