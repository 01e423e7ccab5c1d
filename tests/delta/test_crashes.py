"""Killed, or out of disk space, at every call that changes a file: acknowledged steps are on disk, bit for bit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crash_driver import state_at

from sparse_opt import DeltaLog
from sparse_opt.errors import DeltaLogError

# One worker makes what the tests of this file share.
pytestmark = pytest.mark.xdist_group("crashes")

START = (0, 1, 2, 4, 5, 7)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a library that breaks off file calls")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def driver(faults):
    """One for all tests, because it imports torch."""
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("crash_driver.py")],
        env={**os.environ, "LD_PRELOAD": str(faults)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def run_driver(driver, tmp_path):
    """The driver's scenario; the steps acknowledged at each fault, without the run that had none."""

    def run(scenario: str, mode: str, keyframe_every: int | None = None) -> dict[int, tuple[int, ...]]:
        if scenario != "create":
            with DeltaLog.create(tmp_path / "start", state_at(0), keyframe_every=keyframe_every) as log:
                for step in START[1:]:
                    log.append(step, state_at(step))
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write(f"{tmp_path} {scenario} {mode}\n")
        driver.stdin.flush()
        acknowledged: dict[int, tuple[int, ...]] = {}
        for n, what, *steps in map(str.split, driver.stdout):
            if what == "done":
                assert int(n) >= 6, f"{scenario} changed files in {int(n) - 1} calls only"
                return {k: acknowledged.get(k, ()) for k in range(1, int(n))}
            acknowledged[int(n)] = (*acknowledged.get(int(n), ()), *map(int, steps))
        pytest.fail(f"the driver ended with code {driver.wait()}")

    return run


@pytest.mark.parametrize(
    ("scenario", "keyframe_every"),
    [("append", None), ("append", 6), ("queue", None)],
    ids=["patch", "keyframe", "queue"],
)
def test_killed_at_every_call_of_an_append(run_driver, tmp_path, same_bits, scenario, keyframe_every):
    for n, acknowledged in run_driver(scenario, "killed", keyframe_every).items():
        log = DeltaLog.open(tmp_path / str(n))
        assert set(log.steps) >= {*START, *acknowledged}, n
        assert log.verify() == []
        for step in log.steps:
            same_bits(log.load(step), state_at(step))
        # The killed writer's lock is released, and its unfinished files are removed.
        assert log.append(10, state_at(10)).wait().step == 10
        same_bits(log.load(10), state_at(10))
        log.close()
        assert not [path for path in (tmp_path / str(n)).iterdir() if ".tmp" in path.name]


def test_killed_at_every_call_of_a_creation(run_driver, tmp_path, same_bits):
    for n, acknowledged in run_driver("create", "killed").items():
        assert not acknowledged
        if list(tmp_path.glob(f"{n}/step_*")):
            log = DeltaLog.open(tmp_path / str(n))
        else:
            with pytest.raises(DeltaLogError, match="holds no delta log"):
                DeltaLog.open(tmp_path / str(n))
            log = DeltaLog.create(tmp_path / str(n), state_at(0))
        assert log.verify() == []
        same_bits(log.load(0), state_at(0))
        log.append(1, state_at(1))
        same_bits(log.load(1), state_at(1))
        log.close()


def test_a_full_disk_at_every_call(run_driver, tmp_path, same_bits):
    for n, acknowledged in run_driver("append", "full").items():
        log = DeltaLog.open(tmp_path / str(n))
        assert acknowledged == (10, 11)
        assert log.verify() == []
        assert set(log.steps) >= {0, 1, 5, 7, 10, 11}
        for step in log.steps:
            same_bits(log.load(step), state_at(step))
