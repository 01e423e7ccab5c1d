"""A log in a forked process: it reads, refuses to write, and leaves the files and the lock to the process before."""

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_opt import DeltaLog
from sparse_opt import files as atomic_files
from sparse_opt.errors import DeltaLogError

SECONDS = 20  # a child that hangs is killed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def in_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked process, and fail if it raises, hangs or dies."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(SECONDS)
            torch.set_num_threads(1)  # OpenMP's threads are not forked
            work()
            status = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != -signal.SIGALRM, "the child hangs"
    assert status == 0, said


@pytest.fixture
def state():
    return {"w": torch.zeros(4000)}


@pytest.fixture
def log(tmp_path, state):
    """Step 1 is on disk; the thread that writes is there."""
    with DeltaLog.create(tmp_path / "log", state) as log:
        state["w"][:9] += 1
        log.append(1).wait()
        yield log


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("call", ["append", "flush"])
def test_writing_is_refused(log, state, same_bits, call):
    parent, before = os.getpid(), contents(log.directory)
    calls: dict[str, Callable[[], object]] = {"append": lambda: log.append(2), "flush": log.flush}

    def work() -> None:
        message = f"{log.directory}: .*opened for writing in process {parent}, this is process {os.getpid()}"
        for _ in range(3):  # more often than steps may wait
            with pytest.raises(DeltaLogError, match=message):
                calls[call]()

    in_child(work)
    assert contents(log.directory) == before
    state["w"][:9] += 1
    assert log.append(2).wait().parent_step == 1
    same_bits(log.load(2), state)
    assert log.verify() == []


def test_waiting_for_a_step_of_the_parent_process_is_refused(log, state, monkeypatch):
    gate, save_file = threading.Event(), atomic_files.save_file

    def save_later(*args: Any, **kwargs: Any) -> None:
        assert gate.wait(SECONDS)
        save_file(*args, **kwargs)

    monkeypatch.setattr(atomic_files, "save_file", save_later)
    state["w"][:9] += 1
    handed = [log.append(2), log.append(3)]

    def work() -> None:
        assert not handed[0].done()
        with pytest.raises(DeltaLogError, match=r"step 2: .*opened for writing in process \d+, this is process"):
            handed[0].wait()
        assert log.steps == (0, 1)  # reading does not wait for the other process
        log.close()

    try:
        in_child(work)
    finally:
        gate.set()
    assert [one.wait().step for one in handed] == [2, 3]


def test_reading_continues(log, state, same_bits):
    def work() -> None:
        same_bits(log.load(1), state)
        assert log.steps == (0, 1) and log.last_step == 1 and log.step_of(state) == 1
        assert [step for step, _ in log.tensor_states("w", log.steps)] == [0, 1]
        assert log.verify() == [] and len(log.info()) == 2

    in_child(work)


@pytest.mark.parametrize("end", ["close", "with", "del"])
def test_closing_in_a_child_leaves_the_directory_to_its_parent(log, state, end):
    before = contents(log.directory)

    def work() -> None:
        if end == "close":
            log.close()
            log.close()
            with pytest.raises(DeltaLogError, match="another writer has this delta log open"):
                log.append(2)
        elif end == "with":
            with log:
                pass
        else:
            log._writing = None  # as when nothing refers to it any more

    in_child(work)
    assert contents(log.directory) == before
    with pytest.raises(DeltaLogError, match="another writer has this delta log open"):
        DeltaLog.open(log.directory, state).append(2)
    state["w"][:9] += 1
    assert log.append(2).wait().step == 2


def test_a_child_that_exits_in_the_ordinary_way(tmp_path):
    """With every exit handler of the interpreter, while a step is being written."""
    script = """
import os, sys, torch
from sparse_opt import DeltaLog
state = {"w": torch.zeros(1000)}
log = DeltaLog.create(sys.argv[1], state)
for step in range(1, 4):
    state["w"][:9] += 1
    log.append(step)
    child = os.fork()
    if not child:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
log.close()
assert log.steps == tuple(range(4)) and log.verify() == []
"""
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
