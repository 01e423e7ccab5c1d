from __future__ import annotations

import importlib

import pytest

from sparse_opt.cli.bench import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_there_and_has_help(sparse_opt, name):
    assert callable(importlib.import_module(f"sparse_opt.bench.{BENCHMARKS[name][0]}").main)
    assert sparse_opt("bench", name, "--help").done().startswith("usage: ")


def test_hands_over_arguments_and_exit_code(sparse_opt, monkeypatch):
    seen = []
    monkeypatch.setattr("sparse_opt.bench.kernels.table.main", lambda argv: seen.append(argv) or 1)
    assert sparse_opt("bench", "kernels", "--seed", 1).code == 1
    assert seen == [["--seed", "1"]]


def test_unknown_benchmark(sparse_opt):
    assert "kernels" in sparse_opt("bench", "kernel").failed_in_one_line(2)
