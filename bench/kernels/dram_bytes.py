"""The bytes that the ops really move, counted by Nsight Compute, beside those that `floors` says they must.

Runs itself under `ncu`: each op once on each GPU backend, on the matrices of a 3B model (what a kernel leaves in the L2
is not counted as written, so the tensors have to be many times its size). Every result is checked first, outside of the
profile. Copies of one short kernel stand between the calls, by which the profile is cut.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparse_opt import backends

from ..common.environment import environment
from ..common.report import table, why_unwritable, write_json
from ..common.shapes import LLAMA_3_2_3B, scaled
from . import floors, inputs
from .cases import Case, WrongResult, check

NCU = "ncu"
READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
DENSITIES = (0.025, 0.1)
DELTA_NUMEL = 2**30
# The kernel of torch.cuda._sleep, used as a marker because no op launches it.
MARKER = "spin_kernel"
NCU_LIMIT_S = 500
HEADERS = ("op", "backend", "density", "kernels", "GB read", "GB written", "GB", "floor GB", "x floor", "ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print and write; return 0 if every result was correct."""
    parser = argparse.ArgumentParser(prog="python -m sparse_opt.bench.kernels.dram_bytes", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench/results/dram_bytes.json"), help="JSON (%(default)s)")
    parser.add_argument("--numel", type=int, help="elements of all matrices (default: the 3.21 B of a 3B model)")
    parser.add_argument("--delta_numel", type=int, default=DELTA_NUMEL, help="of the encoded tensor (%(default)s)")
    parser.add_argument("--profiled", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # the run under ncu
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error(f"dram_bytes needs a CUDA GPU, and torch {torch.__version__} sees none")
    if args.profiled is not None:
        return _profiled(args)
    if shutil.which(NCU) is None:
        parser.error(f"{NCU} (Nsight Compute) is not on PATH; it comes with the CUDA toolkit")
    if problem := why_unwritable(args.output):
        parser.error(problem)
    with tempfile.TemporaryDirectory(prefix="sparse_opt_dram_bytes_") as folder:
        log, calls = Path(folder) / "ncu.csv", Path(folder) / "calls.json"
        done = subprocess.run(ncu_command(log, _child(calls, args)), check=False, timeout=NCU_LIMIT_S)
        if done.returncode != 0:
            print(f"{NCU} ended with exit code {done.returncode}", file=sys.stderr)
            if log.is_file():
                print(log.read_text(encoding="utf-8")[-2000:], file=sys.stderr)
            return 1
        rows = counted(json.loads(calls.read_text(encoding="utf-8")), parse(log.read_text(encoding="utf-8")))
    report = {
        "benchmark": "dram_bytes",
        "environment": environment("cuda"),
        "floor_counting": floors.COUNTING,
        "rows": rows,
    }
    write_json(args.output, report)
    print(f"{text(rows)}\n\nresults: {args.output}")
    return 0


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


def _child(calls: Path, args: argparse.Namespace) -> list[str]:
    numel = [] if args.numel is None else ["--numel", str(args.numel)]
    module = [sys.executable, "-m", "sparse_opt.bench.kernels.dram_bytes"]
    return [*module, *numel, "--delta_numel", str(args.delta_numel), "--profiled", str(calls)]


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
        wanted = {READ: "byte", WRITTEN: "byte", TIME: "ns"}.get(row["Metric Name"])
        if wanted is None:
            continue
        unit = row["Metric Unit"].replace("nsecond", "ns")
        if unit != wanted:
            raise ValueError(f"{row['Metric Name']} of {row['Kernel Name']} is in {unit!r}, wanted {wanted!r}")
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
        raise ValueError(f"{NCU} saw {len(parts)} markers, wanted one for each of {len(calls)} calls")
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


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The table: counted gigabytes, and their ratio to the floor."""
    return table(HEADERS, [cells(row) for row in rows], n_words=2)


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table, in the order of HEADERS."""
    total = row["bytes_read"] + row["bytes_written"]
    gigabytes = [row["bytes_read"], row["bytes_written"], total, row["floor_bytes"]]
    return [
        row["op"],
        row["backend"],
        f"{row['density']:.1%}",
        str(row["n_kernels"]),
        *(f"{nbytes / 1e9:.3f}" for nbytes in gigabytes),
        f"{total / row['floor_bytes']:.2f}",
        f"{row['ms']:.3f}",
    ]


def _profiled(args: argparse.Namespace) -> int:
    """The profiled process: check each op, then run it once inside the profile, after a marker."""
    shapes = LLAMA_3_2_3B if args.numel is None else scaled(LLAMA_3_2_3B, args.numel)
    calls = []
    for op in backends.OPS:
        sizes = {"weight": (args.delta_numel,)} if op.startswith("delta_") else shapes
        for density in DENSITIES:
            generator = torch.Generator("cuda").manual_seed(0)
            case = inputs.random_case(op, sizes, torch.bfloat16, density, generator)
            for backend in [name for name in backends.available("cuda") if name != "reference"]:
                try:
                    check(case, backend)
                except WrongResult as error:
                    print(f"WRONG RESULT, nothing was counted: {error}", file=sys.stderr)
                    return 1
                _profile(case, backend)
                calls.append({"op": op, "backend": backend, "density": density, "floor_bytes": case.floor_bytes})
            del case
    args.profiled.write_text(json.dumps(calls), encoding="utf-8")
    return 0


def _profile(case: Case, backend: str) -> None:
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        torch.cuda._sleep(1)
        case.run(backend)
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
