"""`pytest bench`: it collects every op, checks before it times, and its JSON carries bytes and rates."""

import json
import os
from pathlib import Path

import pytest
from launch import Ended, run_script

from sparse_opt import backends

CHECKOUT = Path(__file__).parents[2]
ONE_CASE = ["-k", "test_op and cpu and indexed_swap_ and bf16 and 0.1", "--bench_numel", "20000", "--bench_rounds", "5"]
SPOILED = """
from sparse_opt import ops

true_op = ops.indexed_swap_

def wrong(dense, *others, backend, **options):
    if backend != "reference":
        dense[0].zero_()
    true_op(dense, *others, backend=backend, **options)

ops.indexed_swap_ = wrong
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


def test_a_wrong_result_is_not_timed(tmp_path, needs_extension):
    (tmp_path / "spoiled.py").write_text(SPOILED)
    path = tmp_path / "bench.json"
    options = ["-p", "spoiled", *ONE_CASE, "--benchmark-json", str(path)]
    done = run_suite(*options, plugins=tmp_path)
    assert done.returncode == 1
    assert "WrongResult: indexed_swap_ on backend cpu" in done.stdout
    assert not path.is_file() or json.loads(path.read_text() or '{"benchmarks": []}')["benchmarks"] == []


def test_every_case_of_the_committed_run_exists(needs_extension, collection):
    collected = {line for line in collection.splitlines() if line.startswith("bench/")}
    (path,) = sorted((CHECKOUT / "bench" / "results" / "pytest").glob("*/*_cpu.json"))[-1:]
    assert {bench["fullname"] for bench in json.loads(path.read_text())["benchmarks"]} <= collected
