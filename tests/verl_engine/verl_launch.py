"""Starts the processes of a test in which verl runs on the CPU with gloo, or on GPUs with NCCL."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import launch

from sparse_opt.bench.verl.main import VERL_ON_GPUS

# Device -> environment variables that verl reads when it is imported. verl has no platform for the CPU, and registers
# its engines for GPUs alone, where VERL_ENGINE_DEVICE finds them.
ENVIRONMENTS = {
    "cpu": {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,sparse_opt.integrations.verl",
    },
    "cuda": VERL_ON_GPUS,
}


def launch_verl(function: Callable[..., Any], n: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """As `launch`, with verl's platform for the devices of `backend`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENTS["cuda" if backend == "nccl" else "cpu"].items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # for `cpu_platform`
        return launch(function, n, *args, backend=backend)
