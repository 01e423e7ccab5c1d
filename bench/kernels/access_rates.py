"""`AccessRates`: how fast a GPU copies memory and writes scattered pieces of it; bandwidth bounds follow from them.

`bench/probes/scattered_access.cu` measures the writes: random units of 32 to 1024 bytes in ascending order, each a
given share of all. It is compiled with nvcc when it is needed, and its rows become a part of the results.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

# In a checkout, from its root; a wheel has no sources.
PROBE = Path("bench/probes/scattered_access.cu")
COMPILE_LIMIT_S, RUN_LIMIT_S = 300.0, 120.0

ProbeRow = Mapping[str, float]  # unit_bytes, share, and the rates read_, write_, read_write_ and part_gb_per_s


class NotMeasured(Exception):
    """Why the rates of scattered writes could not be measured."""


class AccessRates(NamedTuple):
    """Rates of one GPU, in bytes per second."""

    copy: float  # read plus written
    # Contiguous bytes of one write -> (share of all such units that is written, rate), by ascending share. Empty if
    # the rates were not measured.
    write: Mapping[int, Sequence[tuple[float, float]]]

    @classmethod
    def of(cls, copy: float, rows: Sequence[ProbeRow]) -> AccessRates:
        """From the copy rate and the rows of the probe."""
        write: dict[int, list[tuple[float, float]]] = {}
        for row in sorted(rows, key=lambda row: row["share"]):
            write.setdefault(int(row["unit_bytes"]), []).append((row["share"], 1e9 * row["write_gb_per_s"]))
        return cls(copy, write)

    @classmethod
    def of_report(cls, kernels: Mapping[str, Any]) -> AccessRates:
        """From the report of a kernel table, in which `write_rates` are the rows or the reason why there are none."""
        rows = kernels.get("write_rates", "")
        return cls.of(1e9 * kernels["copy_gb_per_s"], [] if isinstance(rows, str) else rows)

    def write_rate(self, unit: int, share: float) -> float | None:
        """The rate of writes to scattered units, or None if it was not measured.

        Between measured shares the rate is interpolated linearly; outside of them it is that of the nearest one.

        Args:
            unit: contiguous bytes of one write; the rates are those of the largest measured unit that is not larger.
            share: share of all units that is written.
        """
        if not self.write:
            return None
        found = self.write[max((size for size in self.write if size <= unit), default=min(self.write))]
        share = min(max(share, found[0][0]), found[-1][0])
        for (low, low_rate), (high, high_rate) in itertools.pairwise(found):
            if share < high:
                return low_rate + (high_rate - low_rate) * (share - low) / (high - low)
        return found[-1][1]


def measure(device: torch.device, probe: Path = PROBE) -> list[ProbeRow]:
    """Compile the probe for the device and run it; takes 5 GiB of its memory.

    Raises:
        NotMeasured: the device is not an NVIDIA GPU, nvcc or the probe was not found, or one of the two failed.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise NotMeasured(f"{device} is not an NVIDIA GPU")
    if not probe.is_file():
        raise NotMeasured(f"{probe}: no such file; run from the repository's root, or name it with --probe")
    compiler = nvcc()
    if compiler is None:
        raise NotMeasured("nvcc was not found in CUDA_HOME, on PATH or in /usr/local/cuda")
    major, minor = torch.cuda.get_device_capability(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    with tempfile.TemporaryDirectory(prefix="sparse_opt_probe_") as folder:
        program = str(Path(folder) / probe.stem)
        _output([compiler, "-O3", "-std=c++17", f"-arch=sm_{major}{minor}", str(probe), "-o", program], COMPILE_LIMIT_S)
        printed = _output([program, "--json", "--device", str(index)], RUN_LIMIT_S)
    try:
        return parse(printed)
    except ValueError as error:
        raise NotMeasured(f"{probe.stem}: {error}") from error


def nvcc() -> str | None:
    """The path of nvcc, found as torch's extensions find it."""
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    paths = [*(f"{home}/bin" for home in homes), None, "/usr/local/cuda/bin"]  # None: PATH
    return next((found for path in paths if (found := shutil.which("nvcc", path=path))), None)


def _output(command: Sequence[str], limit_s: float) -> str:
    """What the command prints; NotMeasured if it fails."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"{name} took more than {limit_s:.0f} s") from error
    except OSError as error:
        raise NotMeasured(f"{name} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:]
        raise NotMeasured(f"{name} ended with exit code {done.returncode}: {errors[0] if errors else 'no message'}")
    return done.stdout


def parse(printed: str) -> list[ProbeRow]:
    """The rows that the probe prints with --json.

    Raises:
        ValueError: the text is not JSON, there is no row, or a value is missing or not a positive number.
    """
    rows = json.loads(printed)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"found {printed[:100]!r}, expected a JSON array of rows")
    for row in rows:
        for key in ("unit_bytes", "share", "write_gb_per_s"):
            value = row.get(key) if isinstance(row, dict) else None
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{key} is {value} in {row}, expected a positive number")
    return rows


def line(kernels: Mapping[str, Any]) -> str:
    """One line on the write rates of a kernel table's report: their ranges, or why there are none; else empty."""
    found = kernels.get("write_rates", "")
    if isinstance(found, str):
        return f"write_rates: {found}" if found else ""
    rates = AccessRates.of_report(kernels).write
    ranges = [
        f"{unit} bytes {min(rate for _, rate in of_unit) / 1e9:.0f} to {max(rate for _, rate in of_unit) / 1e9:.0f}"
        for unit, of_unit in sorted(rates.items())
    ]
    return f"scattered writes, GB/s: {', '.join(ranges)}"
