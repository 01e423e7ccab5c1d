"""A step that cannot be written: how it is reported, what remains on disk, and how the log continues."""

import copy
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_opt import DeltaLog
from sparse_opt import files as atomic_files
from sparse_opt.delta import writer as delta_writer
from sparse_opt.errors import DeltaLogError


class Disk:
    """A simulated disk: full or not, with a gate that delays writes."""

    def __init__(self) -> None:
        self.full = False
        self.gate = threading.Event()
        self.gate.set()
        self._save_file = atomic_files.save_file

    def save_file(self, tensors: Any, path: Path, metadata: Any) -> None:
        assert self.gate.wait(30)
        if self.full:
            Path(path).write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        self._save_file(tensors, path, metadata)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(atomic_files, "save_file", disk.save_file)
    yield disk
    disk.gate.set()


@pytest.fixture
def state(device):
    return {"w": torch.zeros(4000, device=device)}


FULL = "step {}: cannot be written: No space left on device"


@pytest.mark.parametrize("broken_call", ["save_file", "fsync", "link"])
@pytest.mark.parametrize("step_before", [7, 8], ids=["patch", "keyframe"])
def test_a_failed_write_loses_nothing_and_the_log_continues_after_close(
    logged, same_bits, states, monkeypatch, broken_call, step_before
):
    if step_before == 7:
        logged.file(8).unlink()
    state = states.change(logged.states[step_before])
    log = DeltaLog.open(logged.directory, state)
    before = sorted(os.listdir(logged.directory))

    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files if broken_call == "save_file" else os, broken_call, disk_full)
        with pytest.raises(DeltaLogError, match=FULL.format(20)):
            log.append(20).wait()
    assert sorted(os.listdir(logged.directory)) == before
    assert log.verify() == []
    log.close()
    # Also under the number that was not logged.
    assert log.append(20).wait().changed is not None
    same_bits(log.load(20), state)
    later = states.change(state, 0.05)
    assert log.append(21, later).wait().step == 21
    same_bits(log.load(21), later)
    assert log.verify() == []


def until_written(handed: delta_writer.Append) -> None:
    """Wait without asking for the failure, as `wait` does."""
    while not handed.done():
        time.sleep(0.001)


@pytest.mark.parametrize("call", ["append", "flush", "close", "wait"])
def test_a_failure_ends_the_log_until_it_is_closed(tmp_path, disk, state, call):
    log = DeltaLog.create(tmp_path / "log", state)
    disk.full = True
    state["w"][:9] += 1
    handed = log.append(1)
    until_written(handed)
    calls: dict[str, Callable[[], Any]] = {
        "append": lambda: log.append(2),
        "flush": log.flush,
        "close": log.close,
        "wait": handed.wait,
    }
    with pytest.raises(DeltaLogError, match=FULL.format(1)):
        calls[call]()
    disk.full = False
    if call != "close":
        for again in (log.flush, lambda: log.append(2)):
            with pytest.raises(DeltaLogError, match=FULL.format(1)):
                again()
    log.close()  # does not raise again what another call has raised
    assert log.append(3).wait().kind == "patch"
    log.close()
    assert handed.done()
    with pytest.raises(DeltaLogError, match=FULL.format(1)):
        handed.wait()
    assert DeltaLog.open(tmp_path / "log").steps == (0, 3)


def test_steps_behind_a_failed_one_are_dropped_with_it(tmp_path, disk, state, same_bits):
    log = DeltaLog.create(tmp_path / "log", state)
    disk.gate.clear()
    disk.full = True
    handed = []
    for step in (1, 2):
        state["w"][step::7] += 1
        handed.append(log.append(step))
    disk.gate.set()
    with pytest.raises(DeltaLogError, match="step 2: dropped with step 1, which could not be written"):
        handed[1].wait()
    disk.full = False
    log.close()  # waiting for the second step has raised the error
    assert log.append(3).wait().kind == "patch"
    state["w"][5] = 9
    assert log.append(4).wait().kind == "patch"
    same_bits(log.load(4), state)
    assert log.steps == (0, 3, 4)
    assert log.verify() == []


def test_an_error_while_a_step_is_coded_has_the_earlier_failure_as_a_note(tmp_path, disk, state, monkeypatch):
    log = DeltaLog.create(tmp_path / "log", state)
    disk.gate.clear()
    disk.full = True
    log.append(1)

    def fail_at_both(*args: Any, **kwargs: Any) -> None:
        disk.gate.set()
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("sparse_opt.delta.encoder.encode", fail_at_both)
    with pytest.raises(torch.OutOfMemoryError) as error:
        log.append(2)
    assert "step 1: cannot be written" in error.value.__notes__[0]
    assert log.steps == (0,)


def test_the_end_of_a_with_block_adds_the_failure_to_an_exception_under_way(tmp_path, disk, state):
    def fail_at_both() -> None:
        with DeltaLog.create(tmp_path / "log", state) as log:
            disk.full = True
            log.append(1, {"w": torch.ones(4000)})
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError) as error:
        fail_at_both()
    disk.full = False
    assert "step 1: cannot be written" in error.value.__notes__[0]
    DeltaLog.open(tmp_path / "log", state).append(2).done()  # the directory is no longer locked


def test_what_is_logged_is_the_state_at_the_call(tmp_path, disk, state, same_bits):
    log = DeltaLog.create(tmp_path / "log", state, keyframe_every=2)
    disk.gate.clear()
    kept, handed = {}, []
    for step in (1, 2):
        state["w"][step::3] += 1
        kept[step] = copy.deepcopy(state)
        handed.append(log.append(step))
    state["w"] -= 5
    assert not any(one.done() for one in handed)
    disk.gate.set()
    assert [one.wait().kind for one in handed] == ["patch", "keyframe"]
    for step, expected in kept.items():
        same_bits(log.load(step), expected)


def test_no_more_than_two_steps_wait(tmp_path, disk, state):
    log = DeltaLog.create(tmp_path / "log", state)
    disk.gate.clear()
    for step in range(1, delta_writer.IN_FLIGHT + 1):
        log.append(step)
    third = threading.Thread(target=log.append, args=(9,))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    disk.gate.set()
    third.join(30)
    assert not third.is_alive()
    assert log.steps == (0, 1, 2, 9)


@pytest.mark.parametrize("broken", ["encode", "submit"])
def test_an_error_while_a_step_is_coded(tmp_path, state, same_bits, monkeypatch, broken):
    """The state that steps are coded against may have advanced with it: it is read from the files again."""
    log = DeltaLog.create(tmp_path / "log", state)

    def out_of_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    place: Any = (
        "sparse_opt.delta.encoder.encode" if broken == "encode" else "sparse_opt.delta.writer.StepWriter.submit"
    )
    for step in (1, 3, 5):  # more than the steps that may wait: none of them takes a place
        with monkeypatch.context() as patched:
            patched.setattr(place, out_of_memory)
            state["w"][step] += 1
            with pytest.raises(torch.OutOfMemoryError):
                log.append(step)
        state["w"][7] += 1
        assert log.append(step).wait().kind == "patch"
        state["w"][9] += 1
        assert log.append(step + 1).wait().kind == "patch"
        same_bits(log.load(step + 1), state)
    assert log.verify() == []


def test_a_log_without_references_writes_its_submitted_steps(tmp_path, state):
    log = DeltaLog.create(tmp_path / "log", state)
    state["w"] += 1
    log.append(1)
    del log
    again = DeltaLog.open(tmp_path / "log", state)
    assert again.steps == (0, 1)
    again.append(2).wait()  # the directory is no longer locked
