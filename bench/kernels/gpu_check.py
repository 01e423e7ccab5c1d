"""What has to hold on a machine with a GPU: the build, the tests, the memory checker, and the kernels' speed.

Prints each part as it ends, the kernels' table with its targets last, and writes all of it as JSON. Ends with 1 if
anything was wrong; what is too slow is shown and counted. A run that was cut short goes on with --resume.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sparse_opt import backends

from ..common.environment import environment
from ..common.report import why_unwritable, write_json
from . import table as kernels

SANITIZER = "compute-sanitizer"
SANITIZER_TOOLS = ("memcheck", "racecheck")
# Markers and folders of tests, in parts that run in parallel. tests/ops/test_large.py of both parts, and delta/codec in
# the last part, need much of a GPU's memory.
GPU_TESTS = (
    ("gpu and triton", ("ops",)),
    ("gpu and not triton", ("ops",)),
    ("gpu", ("optim", "bench", "test_backends.py", "test_l2_fetch.py")),
    ("gpu", ("masks", "mask_finding", "analysis", "delta")),
)
CPU_TESTS = (("", ("ops",)),)
# Seconds that a part may take before it counts as failed.
TESTS_LIMIT_S, SANITIZER_LIMIT_S = 450, 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; return 0 if every check passed, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    if problem := kernels.why_wrong(args):
        parser.error(problem)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"device {device}: torch {torch.__version__} finds no CUDA device here")
    if not args.skip_tests and not args.tests.is_dir():
        parser.error(f"tests folder {args.tests}: not found; run from the repository's root, or name it with --tests")
    if problem := why_unwritable(args.output):
        parser.error(problem)
    report: dict[str, Any] = {"benchmark": "gpu_check", "environment": environment(device), "completed": False}
    try:
        done = _done_before(args.output, report["environment"]) if args.resume else {}
    except ValueError as error:
        parser.error(f"--resume: {args.output} is no JSON: {error}")
    report.update(done)
    failures: list[str] = []
    try:
        failures += _build(report, device)
        if not args.skip_tests and "tests" not in done:
            failures += _tests(report, args, device)
            _keep(report, failures, args.output)
        if not args.skip_sanitizer and "sanitizer" not in done:
            failures += _sanitizer(report, device)
            _keep(report, failures, args.output)
        if not args.skip_kernels:
            _title("kernels")
            failures += kernels.run_table(report, args, device)
            report["completed"] = True
    finally:  # keep the results obtained before an error
        _keep(report, failures, args.output)
        print(f"\nresults: {args.output}")
    for failure in failures:
        print(f"FAILED: {failure}")
    print("gpu-check: FAILED" if failures else "gpu-check: all checks passed")
    return 1 if failures or (args.strict and kernels.missed(report["kernels"])) else 0


def _keep(report: dict[str, Any], failures: Sequence[str], output: Path) -> None:
    """Write the report so far, from which --resume continues if the machine is lost in the next part."""
    report["failures"] = list(failures)
    write_json(output, report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparse-opt bench gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("bench/results/gpu_check.json"), help="JSON (%(default)s)")
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="folder of the tests (%(default)s)")
    parser.add_argument("--pytest_options", default="", help="more words for pytest but -m: --pytest_options='-n 8'")
    parser.add_argument("--skip_tests", action="store_true", help="leave the tests out")
    parser.add_argument("--skip_sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--skip_kernels", action="store_true", help="leave the table out")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the tests and compute-sanitizer's checks that --output says ended well, of the same commit, machine "
        "and versions",
    )
    parser.add_argument("--device", default="cuda", help="a CPU runs the same code, to try it out (%(default)s)")
    kernels.add_options(parser)
    return parser


def _done_before(output: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The tests and checks that passed in an earlier run of the same commit, machine and versions.

    Raises:
        ValueError: `output` is not valid JSON.
    """
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    then = report.get("environment", {})
    commit = here["commit"]
    if not commit or commit.endswith("-dirty") or any(then.get(key) != here[key] for key in here if key != "date"):
        return {}
    results = {
        "tests": [report.get("tests")],
        "sanitizer": [report.get("sanitizer", {}).get(t) for t in SANITIZER_TOOLS],
    }
    done = {
        name: report[name] for name, found in results.items() if all(one and one["exit_code"] == 0 for one in found)
    }
    for name, found in done.items():
        print(f"{name}: done on {then['date']}: {found}")
    return done


def _build(report: dict[str, Any], device: torch.device) -> list[str]:
    """Check that every fast backend of the device is available."""
    _title("build")
    module, cause = backends.native_module()
    wanted = ("triton", "cuda") if device.type == "cuda" else (device.type,)
    missing = {name: backends.why_unavailable(name, device) for name in wanted}
    report["build_info"] = module.build_info() if module is not None else None
    for key, value in (report["build_info"] or {"extension": cause}).items():
        print(f"{key}: {value}")
    print(f"backends on {device}: {', '.join(backends.available(device))}")
    return [f"backend {name} cannot run: {cause}" for name, cause in missing.items() if cause]


def _tests(report: dict[str, Any], args: argparse.Namespace, device: torch.device) -> list[str]:
    """Run the tests marked `gpu` that need only torch and pytest; on a CPU, the tests of the ops."""
    _title("tests")
    parts = GPU_TESTS if device.type == "cuda" else CPU_TESTS
    options = ["-q", "-p", "no:cacheprovider", *shlex.split(args.pytest_options)]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{k}.xml" for k in range(len(parts))]

        def run(k: int) -> tuple[int | None, float]:
            markers, folders = parts[k]
            named = [str(args.tests / name) for name in folders]
            command = [sys.executable, "-m", "pytest", *named, "-m", markers, *options, f"--junit-xml={results[k]}"]
            return _run(command, TESTS_LIMIT_S, output=results[k].with_suffix(".txt") if len(parts) > 1 else None)

        began = time.perf_counter()
        with ThreadPoolExecutor(len(parts)) as pool:
            codes = [code for code, _ in pool.map(run, range(len(parts)))]
        seconds = round(time.perf_counter() - began, 1)
        for path in sorted(Path(folder).glob("*.txt")):
            print(path.read_text(), flush=True)
        counts: Counter[str] = Counter()
        for path in results:
            counts += _junit_counts(path) if path.is_file() else Counter()
    found = {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
    code = next((code for code in codes if code != 0), 0)
    report["tests"] = {"exit_code": code, "seconds": seconds, **found}
    if code == 0 and counts["passed"] > 0:
        return []
    return [f"tests: exit code {code}, {found if counts else 'no results'} (see the output of pytest above)"]


def _junit_counts(results: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
    return counts


def _sanitizer(report: dict[str, Any], device: torch.device) -> list[str]:
    _title(SANITIZER)
    if device.type != "cuda" or shutil.which(SANITIZER) is None:
        why = f"{device} is no GPU" if device.type != "cuda" else f"{SANITIZER} is not on PATH"
        print(f"skipped: {why}")
        report["sanitizer"] = {"skipped": why}
        return []
    report["sanitizer"], failures = {}, []
    # Allocate each tensor separately: in torch's memory pool, an out-of-bounds access could hit a valid neighbour.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = [sys.executable, "-m", "sparse_opt.bench.kernels.sanitize_ops"]
    for tool in SANITIZER_TOOLS:
        print(f"{tool}:", flush=True)
        # torch probes for optional driver features; the resulting API errors do not come from a kernel.
        options = ["--tool", tool, "--error-exitcode", "1", "--print-limit", "20"]
        if tool == "memcheck":
            options += ["--report-api-errors", "no"]
        code, seconds = _run([SANITIZER, *options, *program], SANITIZER_LIMIT_S, variables)
        report["sanitizer"][tool] = {"exit_code": code, "seconds": seconds}
        if code != 0:
            failures.append(f"{SANITIZER} {tool}: exit code {code}")
    return failures


def _run(
    command: list[str], limit_s: float, variables: dict[str, str] | None = None, output: Path | None = None
) -> tuple[int | None, float]:
    """Run a command, its output to a file or to our stdout: (exit code, or None after a timeout; seconds)."""
    sys.stdout.flush()
    began = time.perf_counter()
    environ = {**os.environ, **(variables or {})}
    with ExitStack() as stack:
        file = stack.enter_context(output.open("w")) if output is not None else None
        try:
            code: int | None = subprocess.run(
                command, env=environ, timeout=limit_s, stdout=file, stderr=subprocess.STDOUT if file else None
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
            print(f"stopped after {limit_s:.0f} s", file=file)
    return code, round(time.perf_counter() - began, 1)


def _title(part: str) -> None:
    print(f"\n{part}\n{'-' * len(part)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
