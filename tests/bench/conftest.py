"""Fixtures of the benchmark tests."""

import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
from launch import run_module

from sparse_opt import backends


def run_again(module: ModuleType, arguments: Sequence[str]) -> object:
    """What `python -m module` does, in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module has been imported before
        patch.setattr(sys, "argv", [str(module.__file__), *arguments])
        try:
            runpy.run_module(module.__name__, run_name="__main__")
        except SystemExit as stopped:
            return stopped.code
    return 0


@pytest.fixture
def needs_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    if cause := backends.why_unavailable("cpu", "cpu"):
        pytest.skip(f"needs the extension: {cause}")
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """``run_here(module, unless=)``: run the `python -m module` commands of a benchmark in this process.

    Starting Python and importing transformers takes longer than the work. Those for which ``unless(command)`` is true
    run in a process of their own, and several ranks of torchrun in as many, which are forked; see launch.py. Other
    commands are started as usual.
    """
    start_process = subprocess.run

    def arrange(module: ModuleType, unless: Callable[[Sequence[str]], bool] = lambda command: False) -> None:
        def run(command: Sequence[str], **kwargs: Any) -> Any:
            if list(command[:3]) == [sys.executable, "-m", module.__name__] and not unless(command):
                return subprocess.CompletedProcess(command, run_again(module, command[3:]))
            if module.__name__ in command:
                return subprocess.CompletedProcess(command, run_module(command, kwargs["env"]))
            return start_process(command, **kwargs)

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))

    return arrange
