"""The environment of a measurement: machine, versions and commit."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from sparse_opt import __version__
from sparse_opt.cli.doctor import installed_version

COMMIT_VARIABLE = "SPARSE_OPT_COMMIT"
_PACKAGES = ("triton", "transformers", "safetensors", "pytest")


def environment(device: torch.device | str) -> dict[str, Any]:
    """Everything needed to reproduce a measurement made now on ``device``, as plain data for JSON."""
    device = torch.device(device)
    return {
        "date": now(),
        "commit": commit(),
        "machine": {
            "cpu": _cpu_model(),
            "logical_cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
            **({"gpu": _gpu(device)} if device.type == "cuda" else {}),
        },
        "versions": {
            "sparse_opt": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{package: installed_version(package) for package in _PACKAGES},
        },
    }


def now() -> str:
    """The time in UTC, to the second, as results have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """SPARSE_OPT_COMMIT if it is set, else the commit of the checkout, with "-dirty" appended if files differ from it.

    Files of results may differ, because a run that overwrites them does not change the measured code.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    folder = Path(__file__).resolve().parent
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return None
    code = ("--untracked-files=no", "--", ":(top)", ":(top,exclude)bench/results")
    return head + ("-dirty" if _git(folder, "status", "--porcelain", *code) else "")


def _git(folder: Path, *arguments: str) -> str:
    """The output of git; empty if there is no git, no repository or no commit."""
    if shutil.which("git") is None:
        return ""
    answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0].strip() or None if answer.returncode == 0 else None
