"""The Makefile's release targets, with stand-ins for the programs that compile, install and check."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest

WHEEL = "sparse_opt-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl"
CUDA_WHEEL = "sparse_opt-0.1.0+cu130-cp311-abi3-manylinux_2_34_x86_64.whl"
# Each program writes its command to the log; Python also runs .ci/release_check.py.
LOGS = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
"""
PROGRAMS = {
    "python": '[ "$1" != .ci/release_check.py ] || exec {python} "$@"\n',
    "auditwheel": 'for folder; do [ "$folder" != dist ] || {{ mkdir -p dist; touch dist/{wheel}; }}; done\n',
    "abi3audit": "",
    "twine": "",
}


@pytest.fixture
def make(checkout, tmp_path, python) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]:
    """`make("wheel", "test-wheel")` in a clean tree -> its result, and the commands of the programs."""
    for file in ("Makefile", ".ci/release_check.py", "CHANGELOG.md", "sparse_opt/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(checkout / file, tmp_path / file)
    for file in ("constraints.txt", ".venv/.python", "build/release/.installed"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    log = tmp_path / "log"
    programs = [(".venv/bin", "python"), *(("build/release/bin", name) for name in PROGRAMS)]
    programs.append(("build/wheel-test/2.10.0/bin", "python"))
    for folder, name in programs:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        text = LOGS + PROGRAMS[name]
        (tmp_path / folder / name).write_text(text.format(log=log, wheel=WHEEL, python=shutil.which("python3")))
        (tmp_path / folder / name).chmod(0o755)
    # `.ci/step.py TITLE COMMAND...` runs the command; the environments are there already.
    step = tmp_path / "step"
    step.write_text('#!/bin/sh\n[ "$1" = .ci/step.py ] || exit 0\nshift 2\nexec "$@"\n')
    step.chmod(0o755)

    def run(*words: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        command = ["make", f"PYTHON={step}", "TORCHES=2.10.0", *words]
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
        return done, log.read_text().splitlines() if log.exists() else []

    return run


def test_a_wheel_is_built_and_tested_in_one_call(make):
    # -j: the tests wait for the wheel.
    done, commands = make("-j2", "wheel", "test-wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    built = next(i for i, command in enumerate(commands) if command.startswith("auditwheel repair"))
    (installed,) = (i for i, command in enumerate(commands) if f"--no-deps dist/{WHEEL}" in command)
    assert built < installed and "pytest" in commands[-1]


def test_there_is_nothing_to_test_before_a_wheel_is_built(make):
    done, commands = make("test-wheel")
    assert done.returncode != 0 and "run make wheel first" in done.stdout and commands == []


def test_a_release_has_the_cuda_wheel_if_there_is_one(make, tmp_path):
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/sparse_opt-0.1.0.tar.gz").touch()
    done, commands = make("release-check")
    assert done.returncode == 0, done.stdout + done.stderr
    checked = next(command for command in commands if command.startswith("twine"))
    assert checked == f"twine check --strict dist/{WHEEL} dist/sparse_opt-0.1.0.tar.gz"
    assert "has no CUDA wheel" in done.stdout

    (tmp_path / "dist/cuda").mkdir()
    (tmp_path / "dist/cuda" / CUDA_WHEEL).touch()
    done, commands = make("release-check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert commands[-2].startswith("twine") and commands[-2].endswith(f"dist/cuda/{CUDA_WHEEL}")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (WHEEL, "has the version 0.1.0, expected 0.1.0+cu and a version of CUDA"),
        (CUDA_WHEEL.replace("0.1.0", "0.0.9"), "has the version 0.0.9+cu130, expected 0.1.0+cu"),
        (CUDA_WHEEL.replace("manylinux_2_34", "linux"), "is not a manylinux abi3 wheel"),
    ],
)
def test_a_cuda_wheel_that_may_not_be_published(make, tmp_path, name, problem):
    (tmp_path / "dist/cuda").mkdir(parents=True)
    (tmp_path / "dist/sparse_opt-0.1.0.tar.gz").touch()
    (tmp_path / "dist/cuda" / name).touch()
    done, _ = make("release-check")
    assert done.returncode != 0 and f"cuda/{name} {problem}" in done.stdout
