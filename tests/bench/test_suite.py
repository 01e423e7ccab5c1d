"""`pytest bench`: it collects every op, checks before it times, and its JSON carries bytes and rates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launch import Ended, run_script

from sparse_opt import backends

CHECKOUT = Path(__file__).parents[2]


# One case of half a second or less; slower by some hundred times, no burst of a neighbour's work explains it.
ONE_CASE = ["-k", "test_op and cpu and indexed_swap_ and bf16 and 0.1", "--bench_numel", "20000", "--bench_rounds", "5"]
SPOILED = """
import time
from sparse_opt import ops

true_op = ops.indexed_swap_

def {kind}(dense, *others, backend, **options):
    if backend != "reference":
        {action}
    true_op(dense, *others, backend=backend, **options)

ops.indexed_swap_ = {kind}
"""


def run_suite(*arguments: str, plugins: Path | None = None) -> Ended:
    """`pytest bench` in a process that is forked from one with torch, whose import takes longer than a case."""
    # The suite draws nothing by hypothesis, whose plugin takes as long to import as a case takes to run.
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    words = ["bench", "-q", *without, "--bench_device", "cpu", *arguments]
    # pytest-benchmark measures nothing in a worker of pytest-xdist.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    variables["PYTHONPATH"] = "" if plugins is None else str(plugins)
    return run_script(Path(pytest.__file__).with_name("__main__.py"), words, variables, cwd=CHECKOUT)


@pytest.fixture(scope="module", autouse=True)
def needs_the_plugin():
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark: pip install 'sparse-opt[test]'")


@pytest.fixture(scope="module")
def collection():
    """What `--collect-only` prints."""
    done = run_suite("--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_op_is_collected_on_every_backend_but_an_interpreted_one(collection):
    for op in backends.OPS:
        for backend in set(backends.available("cpu")) - {"triton"}:
            assert collection.count(f"test_op[{backend}-{op}-") == 2 * 3, (op, backend)
            assert collection.count(f"test_sparse_adamw_step[{backend}-") == 2 * 3 * 2, backend
    assert "[triton" not in collection


def test_results_carry_bytes_rates_and_the_machine(tmp_path):
    path = tmp_path / "bench.json"
    options = ["--bench_numel", "20000", "--bench_rounds", "2", "--benchmark-json", str(path)]
    done = run_suite("-k", "reference and bf16 and 0.1", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert len(report["benchmarks"]) == len(backends.OPS) + 2  # SparseAdamW.step from dense and compact gradients
    assert "commit" in report["machine_info"]["sparse_opt"]
    for found in report["benchmarks"]:
        info = found["extra_info"]
        assert info["gb_per_s"] == pytest.approx(info["bytes"] / (1e9 * found["stats"]["median"]))
        assert info["share_of_floor"] == pytest.approx(info["gb_per_s"] / info["copy_gb_per_s"])
        assert found["stats"]["rounds"] == 2


@pytest.fixture(scope="module")
def needs_extension():
    if "cpu" not in backends.available("cpu"):
        pytest.skip("needs the extension: " + backends.why_unavailable("cpu", "cpu"))


def test_a_wrong_result_is_not_timed(tmp_path, needs_extension):
    (tmp_path / "spoiled.py").write_text(SPOILED.format(kind="wrong", action="dense[0].zero_()"))
    path = tmp_path / "bench.json"
    options = ["-p", "spoiled", *ONE_CASE, "--benchmark-json", str(path)]
    done = run_suite(*options, plugins=tmp_path)
    assert done.returncode == 1
    assert "WrongResult: indexed_swap_ on backend cpu" in done.stdout
    assert not path.is_file() or json.loads(path.read_text() or '{"benchmarks": []}')["benchmarks"] == []


COMPARISON = "--benchmark-compare-fail=median:100%"


def write_with_median(path: Path, report: Any, seconds: float) -> Path:
    """Write a results file in which every case has taken so long: how busy the machine is does not matter then."""
    for case in report["benchmarks"]:
        case["stats"]["median"] = seconds
    path.write_text(json.dumps(report))
    return path


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, needs_extension):
    """The results file of some cases, and the words that run them."""
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    cases = ["-k", "test_op and indexed_swap_ and bf16 and 0.1", "--bench_numel", "20000", "--bench_rounds", "5"]
    assert run_suite(*cases, "--benchmark-json", str(path)).returncode == 0
    return path, cases


def test_a_slower_op_fails_the_comparison(tmp_path, baseline):
    path, cases = baseline
    path = write_with_median(tmp_path / "baseline.json", json.loads(path.read_text()), 0.01)
    (tmp_path / "spoiled.py").write_text(SPOILED.format(kind="slow", action="time.sleep(0.1)"))
    slow = run_suite("-p", "spoiled", *cases, f"--benchmark-compare={path}", COMPARISON, plugins=tmp_path)
    assert slow.returncode != 0
    assert "Performance has regressed" in slow.stdout + slow.stderr


def test_cases_that_are_as_fast_pass_the_comparison(tmp_path, baseline):
    path, cases = baseline
    path = write_with_median(tmp_path / "baseline.json", json.loads(path.read_text()), 10.0)
    compared = run_suite(*cases, f"--benchmark-compare={path}", COMPARISON)
    assert compared.returncode == 0 and "Comparing against benchmarks from:" in compared.stdout + compared.stderr


def test_every_case_of_the_committed_run_exists(needs_extension, collection):
    collected = {line for line in collection.splitlines() if line.startswith("bench/")}
    (path,) = sorted((CHECKOUT / "bench" / "results" / "pytest").glob("*/*_cpu.json"))[-1:]
    assert {bench["fullname"] for bench in json.loads(path.read_text())["benchmarks"]} <= collected
