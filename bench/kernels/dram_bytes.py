"""The bytes that the ops move, counted by Nsight Compute, next to their bandwidth bounds (see `bounds`).

The program runs itself under `ncu`: each op once on each GPU backend, on the matrices of a 3B model (data that stays in
the L2 is not counted as written, so the tensors must be many times its size). Every result is checked first, outside of
the profile. A short marker kernel before each call separates the calls in the profile.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparse_opt import backends
from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import SparseOptError

from ..common.harness import Benchmark, Report
from ..common.report import Columns, render
from ..common.shapes import LLAMA_3_2_3B, scaled
from . import bounds, inputs
from .cases import Case, check

NCU = "ncu"
MODULE = "sparse_opt.bench.kernels.dram_bytes"
READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
DENSITIES = (0.025, 0.1)
DELTA_NUMEL = 2**30
# The kernel of torch.cuda._sleep, used as a marker because no op launches it.
MARKER = "spin_kernel"
NCU_LIMIT_S = 500
COLUMNS: Columns = {
    "op": "{op}",
    "backend": "{backend}",
    "density": "{density:.1%}",
    "kernels": "{n_kernels}",
    "GB read": lambda row: f"{row['bytes_read'] / 1e9:.3f}",
    "GB written": lambda row: f"{row['bytes_written'] / 1e9:.3f}",
    "GB": lambda row: f"{_total(row) / 1e9:.3f}",
    "bound GB": lambda row: f"{row['floor_bytes'] / 1e9:.3f}",
    "x bound": lambda row: f"{_total(row) / row['floor_bytes']:.2f}",
    "ms": "{ms:.3f}",
}


def _total(row: Mapping[str, Any]) -> float:
    return float(row["bytes_read"] + row["bytes_written"])


def options(parser: CommandParser) -> None:
    parser.add_argument("--numel", type=int, help="elements of all matrices (default: the 3.21 B of a 3B model)")
    parser.add_argument("--delta_numel", type=int, default=DELTA_NUMEL, help="of the encoded tensor (%(default)s)")
    parser.add_argument("--profiled", type=Path, metavar="FILE", help=SUPPRESS)  # the run under ncu


def problem(args: Namespace) -> str:
    if not torch.cuda.is_available():
        return f"dram_bytes needs a CUDA GPU, and torch {torch.__version__} finds none"
    if args.profiled is None and shutil.which(NCU) is None:
        return f"{NCU} (Nsight Compute) is not on PATH; it comes with the CUDA toolkit"
    return ""


def count(args: Namespace, report: Report) -> None:
    """Count the bytes of every call; in the profiled process, make the calls."""
    if args.profiled is not None:
        _make_calls(args)
        return
    with tempfile.TemporaryDirectory(prefix="sparse_opt_dram_bytes_") as folder:
        log, calls = Path(folder) / "ncu.csv", Path(folder) / "calls.json"
        numel = [] if args.numel is None else ["--numel", str(args.numel)]
        child = [sys.executable, "-m", MODULE, *numel, "--delta_numel", str(args.delta_numel), "--profiled", str(calls)]
        # The child writes no report; its --output only keeps it from using the default file.
        done = subprocess.run(
            ncu_command(log, [*child, "--output", str(calls.with_suffix(".report"))]), check=False, timeout=NCU_LIMIT_S
        )
        if done.returncode != 0:
            end = log.read_text(encoding="utf-8")[-2000:] if log.is_file() else "no log"
            raise SparseOptError(f"{NCU} ended with exit code {done.returncode}: {end}")
        report["floor_counting"] = bounds.BYTE_COUNTING
        report["rows"] = counted(json.loads(calls.read_text(encoding="utf-8")), parse(log.read_text(encoding="utf-8")))


def ncu_command(log: Path, program: Sequence[str]) -> list[str]:
    """The ncu command for a program that starts and stops profiling itself; the counts are written to ``log``.

    The clocks are not locked, because the bytes do not depend on them and the machine may be shared.
    """
    return [
        NCU,
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join((READ, WRITTEN, TIME)),
        "--print-units",
        "base",
        "--csv",
        "--log-file",
        str(log),
        *program,
    ]


def parse(log: str) -> list[dict[str, Any]]:
    """Parse ncu's CSV into one dictionary per kernel, in launch order: name, bytes read and written, nanoseconds.

    Raises:
        ValueError: the log has no table, or a metric is missing or has another unit.
    """
    lines = log.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise ValueError(f"no table in {NCU}'s output, which begins with {log[:200]!r}")
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines[header:] if line.startswith('"')):
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        expected = {READ: "byte", WRITTEN: "byte", TIME: "ns"}.get(row["Metric Name"])
        if expected is None:
            continue
        unit = row["Metric Unit"].replace("nsecond", "ns")
        if unit != expected:
            raise ValueError(f"{row['Metric Name']} of {row['Kernel Name']} is in {unit!r}, expected {expected!r}")
        kernel[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    for kernel in kernels.values():
        missing = [metric for metric in (READ, WRITTEN, TIME) if metric not in kernel]
        if missing:
            raise ValueError(f"{kernel['kernel']} has no {', '.join(missing)}")
    return list(kernels.values())


def counted(calls: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call with the sums over its kernels, which are those after its marker.

    Raises:
        ValueError: the numbers of markers and calls differ.
    """
    parts: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if MARKER in kernel["kernel"]:
            parts.append([])
        elif parts:
            parts[-1].append(kernel)
    if len(parts) != len(calls):
        raise ValueError(f"{NCU} saw {len(parts)} markers, expected one for each of {len(calls)} calls")
    return [
        {
            **call,
            "n_kernels": len(part),
            "bytes_read": sum(kernel[READ] for kernel in part),
            "bytes_written": sum(kernel[WRITTEN] for kernel in part),
            "ms": 1e-6 * sum(kernel[TIME] for kernel in part),
        }
        for call, part in zip(calls, parts, strict=True)
    ]


def _make_calls(args: Namespace) -> None:
    """Check each op, then run it once inside the profile, after a marker."""
    shapes = LLAMA_3_2_3B if args.numel is None else scaled(LLAMA_3_2_3B, args.numel)
    calls = []
    for op in backends.OPS:
        sizes = {"weight": (args.delta_numel,)} if op.startswith("delta_") else shapes
        for density in DENSITIES:
            generator = torch.Generator("cuda").manual_seed(0)
            case = inputs.random_case(op, sizes, torch.bfloat16, density, generator)
            for backend in [name for name in backends.available("cuda") if name != "reference"]:
                check(case, backend)
                _profile(case, backend)
                calls.append({"op": op, "backend": backend, "density": density, "floor_bytes": case.bound_bytes})
            del case
    args.profiled.write_text(json.dumps(calls), encoding="utf-8")


def _profile(case: Case, backend: str) -> None:
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        torch.cuda._sleep(1)
        case.run(backend)
        torch.cuda.synchronize()


def text(report: Report) -> str:
    """The table: counted gigabytes, and their ratio to the bandwidth bound."""
    return render(COLUMNS, report.get("rows", []), n_words=2)


main = Benchmark(
    name="dram_bytes",
    command=f"python -m {MODULE}",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=count,
    text=text,
    output="bench/results/dram_bytes.json",
).main

if __name__ == "__main__":
    sys.exit(main())
