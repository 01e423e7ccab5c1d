import importlib
import os
import subprocess
import sys

import pytest

from sparse_opt.cli import doctor
from sparse_opt.cli.bench import BENCHMARKS
from sparse_opt.cli.main import main
from sparse_opt.errors import ConfigError, SparseOptError


def failing_with(error: BaseException):
    def run(argv):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SparseOptError("the work failed"), 1, "sparse-opt: error: the work failed\n"),
        (ConfigError("the call was wrong"), 2, "sparse-opt: error: the call was wrong\n"),
        (OSError("two\nlines"), 1, "sparse-opt: error: two lines\n"),
        (KeyboardInterrupt(), 130, "sparse-opt: interrupted\n"),
        (ModuleNotFoundError("No module named 'torch._C'", name="torch._C"), 1, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_expected_failures_are_one_line(sparse_opt, monkeypatch, error, code, line):
    monkeypatch.setattr(doctor, "run", failing_with(error))
    outcome = sparse_opt("doctor")
    assert outcome.code == code
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    if line is not None:
        assert outcome.err == line


def test_missing_extra_says_how_to_get_it(sparse_opt, monkeypatch):
    # None in sys.modules is what import sees where a package is not installed.
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(doctor, "run", lambda argv: __import__("datasets"))
    line = sparse_opt("doctor").failed_in_one_line(1)
    assert "package datasets" in line
    assert "pip install 'sparse-opt[train]'" in line


def test_unexpected_failures_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(doctor, "run", failing_with(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])
    monkeypatch.setattr(doctor, "run", failing_with(ModuleNotFoundError("No module named 'mine'", name="mine")))
    with pytest.raises(ModuleNotFoundError):
        main(["doctor"])


def test_debug_variable_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("SPARSE_OPT_DEBUG", "1")
    monkeypatch.setattr(doctor, "run", failing_with(SparseOptError("shown")))
    with pytest.raises(SparseOptError):
        main(["doctor"])


def test_unknown_commands_and_options_name_the_nearest(sparse_opt):
    assert "option 'jsn' (from '--jsn'); the nearest is 'json'" in sparse_opt("doctor", "--jsn").failed_in_one_line(2)
    assert "'doctr'; the nearest is 'doctor'" in sparse_opt("doctr").failed_in_one_line(2)


def test_no_command_shows_the_help_and_is_a_wrong_call(sparse_opt):
    outcome = sparse_opt()
    assert outcome.code == 2
    assert "usage: sparse-opt COMMAND" in outcome.err


def test_python_m_runs_it(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "sparse_opt", "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("sparse-opt ")


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sparse_opt", "--help"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert result.stderr == ""


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
