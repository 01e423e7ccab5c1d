"""All checks on a machine with a GPU: the build, the tests, the memory checker, and the speed of the kernels.

Prints the result of each part, the table of kernels with its targets last, and writes everything as JSON. The exit code
is 1 if a check failed. Missed targets are shown and counted, and fail the run only with --strict. An interrupted run
continues with --resume.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from sparse_opt import backends
from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import ConfigError

from ..common.harness import Benchmark, Report
from ..common.report import write_json
from .table import main as kernels

SANITIZER = "compute-sanitizer"
SANITIZER_TOOLS = ("memcheck", "racecheck")
# Markers and paths of tests, and paths to leave out, in parts that run in parallel. ops/test_large.py and delta/codec
# need much of a GPU's memory.
STEPS, COMPILE = "ops/test_steps.py", "ops/test_compile.py"
GPU_TESTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpu and triton", (STEPS,), ()),
    ("gpu and not triton", (STEPS,), ()),
    ("gpu", (COMPILE,), ()),
    ("gpu", ("ops",), (STEPS, COMPILE)),
    ("gpu", ("optim",), ()),
    ("gpu", ("distributed", "bench", "test_backends.py", "test_l2_fetch.py"), ()),
    ("gpu", ("masks", "mask_finding", "analysis", "delta"), ()),
)
CPU_TESTS = (("", ("ops",), ()),)
# Seconds that a part may take before it counts as failed.
TESTS_LIMIT_S, SANITIZER_LIMIT_S = 900, 200


def options(parser: CommandParser) -> None:
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="folder of the tests (%(default)s)")
    parser.add_argument("--pytest_options", default="", help="pytest's options, except -m: --pytest_options='-n 8'")
    parser.add_argument("--skip_tests", action="store_true", help="leave the tests out")
    parser.add_argument("--skip_sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--skip_kernels", action="store_true", help="leave the table out")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what --output has of the same commit, machine and versions: tests and compute-sanitizer's checks "
        "that passed, and complete parts of the table",
    )
    kernels.add_options(parser)


def problem(args: Namespace) -> str:
    if not args.skip_tests and not args.tests.is_dir():
        return f"tests folder {args.tests}: not found; run from the repository's root, or name it with --tests"
    return kernels.why_wrong(args)


def check(args: Namespace, report: Report) -> None:
    """Run all parts, and write the report after each."""
    device, failures = torch.device(args.device), report.setdefault("failures", [])
    earlier = passed_before(args.output, report["environment"]) if args.resume else {}
    report.update({name: earlier[name] for name in ("tests", "sanitizer") if name in earlier})
    failures += _build(report, device)
    if not args.skip_kernels and "kernels" in earlier and earlier["build_info"] == report["build_info"]:
        report["kernels"] = earlier["kernels"]
    if not args.skip_tests and "tests" not in report:
        failures += _tests(report, args, device)
        write_json(args.output, report)
    if not args.skip_sanitizer and "sanitizer" not in report:
        failures += _sanitizer(report, device)
        write_json(args.output, report)
    if not args.skip_kernels:
        _title("kernels")
        failures += kernels.run_table(report, args, lambda: write_json(args.output, report))


def passed_before(output: Path, here: Report) -> Report:
    """What an earlier run of the same commit, machine and versions has: tests and checks that passed, build and table.

    Raises:
        ConfigError: `output` is not valid JSON.
    """
    try:
        report: Report = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"--resume: {output} is not JSON: {error}") from error
    then, commit = report.get("environment", {}), here["commit"]
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
    return done | {name: report[name] for name in ("build_info", "kernels") if name in report}


def _build(report: Report, device: torch.device) -> list[str]:
    """Check that every fast backend of the device is available."""
    _title("build")
    module, cause = backends.native_module()
    expected = ("triton", "cuda") if device.type == "cuda" else (device.type,)
    missing = {name: backends.why_unavailable(name, device) for name in expected}
    report["build_info"] = module.build_info() if module is not None else None
    for key, value in (report["build_info"] or {"extension": cause}).items():
        print(f"{key}: {value}")
    print(f"backends on {device}: {', '.join(backends.available(device))}")
    return [f"backend {name} cannot run: {cause}" for name, cause in missing.items() if cause]


def _tests(report: Report, args: Namespace, device: torch.device) -> list[str]:
    """Run the tests marked `gpu` that need only torch and pytest; on a CPU, the tests of the ops."""
    _title("tests")
    parts = GPU_TESTS if device.type == "cuda" else CPU_TESTS
    options = ["-q", "-p", "no:cacheprovider", *shlex.split(args.pytest_options)]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{k}.xml" for k in range(len(parts))]

        def run(k: int) -> tuple[int | None, float]:
            markers, names, left_out = parts[k]
            named = [str(args.tests / name) for name in names]
            named += [f"--ignore={args.tests / name}" for name in left_out]
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


def _sanitizer(report: Report, device: torch.device) -> list[str]:
    _title(SANITIZER)
    if device.type != "cuda" or shutil.which(SANITIZER) is None:
        why = f"{device} is not a GPU" if device.type != "cuda" else f"{SANITIZER} is not on PATH"
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


def text(report: Report) -> str:
    lines = [kernels.text(report)] if "kernels" in report else []
    lines += [f"FAILED: {failure}" for failure in report["failures"]]
    return "\n".join([*lines, "gpu-check: FAILED" if report["failures"] else "gpu-check: all checks passed"])


main = Benchmark(
    name="gpu_check",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=check,
    text=text,
    failures=kernels.failures,
    partial=lambda args: args.skip_kernels,
    device="cuda",
    output="bench/results/gpu_check.json",
).main

if __name__ == "__main__":
    sys.exit(main())
