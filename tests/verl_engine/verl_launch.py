"""Starts the processes of a test in which verl runs on the CPU with gloo, or on GPUs with NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launch import launch

from sparse_opt.bench.verl import ENVIRONMENTS


def launch_verl(function: Callable[..., Any], n: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """As `launch`, with verl's platform for the devices of `backend`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENTS["cuda" if backend == "nccl" else "cpu"].items():
            patch.setenv(name, value)
        return launch(function, n, *args, backend=backend)
