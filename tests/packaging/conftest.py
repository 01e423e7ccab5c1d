import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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
RULES = CHECKOUT / "csrc/step/rules"
GENERATED = CHECKOUT / BUILD["GENERATED"]
generate = runpy.run_path(str(RULES / "generate.py"))["generate"]

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker makes the copy of the checkout, and the process that builds are forked from."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("packaging"))


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


# Reads a JSON object a line, runs it in a forked process, and prints the exit code.
FORK = """
import json, os, runpy, sys, traceback
import setuptools, torch
for line in sys.stdin:
    job = json.loads(line)
    if not (child := os.fork()):
        code = 1
        try:
            os.environ.clear()
            os.environ.update(job["environment"])
            os.chdir(job["cwd"])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for name in ("stdout", "stderr"):
                os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), getattr(sys, name).fileno())
            sys.argv, sys.path[0] = job["arguments"], job["cwd"]
            if sys.argv[0] == "-c":
                exec(sys.argv.pop(1), {"__name__": "__main__"})
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    """As `python`, for a script or `-c`, in a process forked from one that has imported torch and setuptools.

    Importing them takes longer than a build of small sources. Variables that torch reads when it is imported are
    those of the tests.
    """
    output = tmp_path_factory.mktemp("forked")
    server = subprocess.Popen([sys.executable, "-c", FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None

    def run(*arguments: str | Path, cwd: Path, **variables: str | None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **variables}
        files = {name: str(output / name) for name in ("stdout", "stderr")}
        job = {
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd),
            "environment": {name: value for name, value in environment.items() if value is not None},
            **files,
        }
        server.stdin.write(f"{json.dumps(job)}\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        texts = (Path(file).read_text(errors="replace") for file in files.values())
        return subprocess.CompletedProcess(list(map(str, arguments)), code, *texts)

    yield run
    server.stdin.close()
    server.wait()
