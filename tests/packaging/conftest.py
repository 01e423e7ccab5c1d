from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = ("sparse_opt", "triton_kernels", "trainers", "bench", "csrc", "tests")
FILES = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "constraints.txt",
    "Makefile",
    ".ci/step.py",
)

# Settings and functions of the build.
BUILD = runpy.run_path(str(CHECKOUT / "csrc/build_native.py"))
RULES = CHECKOUT / "csrc/kernels/rules"
GENERATED = CHECKOUT / BUILD["GENERATED"]
generate = runpy.run_path(str(RULES / "generate.py"))["generate"]

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def checkout() -> Path:
    return CHECKOUT


@pytest.fixture(scope="session")
def clean_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources without build outputs, so that a build starts clean and leaves the checkout unchanged."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        shutil.copytree(CHECKOUT / folder, copy / folder, ignore=ignore)
    for file in FILES:
        (copy / file).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / file, copy / file)
    return copy


@pytest.fixture(scope="session")
def python() -> Python:
    """Run this interpreter with the given arguments and environment variables; None unsets a variable."""

    def run(*arguments: str | Path, cwd: Path, **variables: str | None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **variables}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={name: value for name, value in environment.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
