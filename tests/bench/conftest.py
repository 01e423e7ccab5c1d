"""Fixtures of the benchmark tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launch import run_module

sys.path.append(str(Path(__file__).parent / "kernels"))  # sanitize_ops


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
                return subprocess.CompletedProcess(command, module.main(command[3:]))
            if module.__name__ in command:
                return subprocess.CompletedProcess(command, run_module(command, kwargs["env"]))
            return start_process(command, **kwargs)

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))

    return arrange
