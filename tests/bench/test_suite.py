"""`pytest bench`: it collects every op, checks before it times, and its JSON carries bytes and rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_opt import backends

CHECKOUT = Path(__file__).parents[2]


def run_suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    # PYTHONSAFEPATH: the installed package is what is benched, not the folder of its name in the checkout.
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "no:cacheprovider", "--bench_device", "cpu"]
    variables = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=CHECKOUT, env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture(autouse=True)
def needs_the_plugin():
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark: pip install 'sparse-opt[test]'")


def test_every_op_is_collected_on_every_backend_but_an_interpreted_one():
    done = run_suite("--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr
    for op in backends.OPS:
        for backend in set(backends.available("cpu")) - {"triton"}:
            assert done.stdout.count(f"test_op[{backend}-{op}-") == 2 * 3, (op, backend)
    assert "test_op[triton" not in done.stdout


def test_results_carry_bytes_rates_and_the_machine(tmp_path):
    path = tmp_path / "bench.json"
    options = ["--bench_numel", "20000", "--bench_rounds", "2", "--benchmark-json", str(path)]
    done = run_suite("-k", "reference and bf16 and 0.1", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert len(report["benchmarks"]) == len(backends.OPS)
    assert "commit" in report["machine_info"]["sparse_opt"]
    for found in report["benchmarks"]:
        info = found["extra_info"]
        assert info["gb_per_s"] == pytest.approx(info["bytes"] / (1e9 * found["stats"]["median"]))
