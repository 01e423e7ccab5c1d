"""A writer whose lock file was deleted: it stops with an error, and no file of a step is ever overwritten."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.delta.lock import WriterLock
from sparse_opt.errors import DeltaLogError
from sparse_opt.files import written_aside

LOST = r"{}: step {}: .*writer\.lock was (deleted|replaced) while this process held it"


def state(value: float) -> dict[str, Tensor]:
    return {"w": (torch.arange(4000) < 9).float() * value}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "writer.lock"}


def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the lock were lost right after it was checked."""
    monkeypatch.setattr(WriterLock, "require_held", lambda self, where: None)


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
@pytest.mark.parametrize("keyframe_every", [None, 1], ids=["patch", "keyframe"])
def test_a_writer_that_lost_its_lock_stops(tmp_path, replaced, keyframe_every):
    directory = tmp_path / "log"
    log = DeltaLog.create(directory, state(0), keyframe_every=keyframe_every)
    log.append(1, state(1)).wait()
    (directory / "writer.lock").unlink()
    if replaced:
        (directory / "writer.lock").touch()
    before = contents(directory)
    with pytest.raises(DeltaLogError, match=LOST.format(r"step_00000002\.\w+\.safetensors", 2)):
        log.append(2, state(2)).wait()
    with pytest.raises(DeltaLogError, match=LOST.format(r"step_00000002\.\w+\.safetensors", 2)):
        log.append(3, state(3))
    assert contents(directory) == before
    # It may acquire the directory again, like any other writer.
    log.close()
    assert log.append(4, state(4)).wait().step == 4
    assert log.steps == (0, 1, 4) and log.verify() == []


@pytest.mark.parametrize("links", [True, False], ids=["links", "no_links"])
@pytest.mark.parametrize("kind", ["patch", "keyframe"])
@pytest.mark.parametrize("theirs", ["patch", "keyframe"])
def test_a_file_of_the_step_is_never_overwritten_or_hidden(tmp_path, same_bits, monkeypatch, links, kind, theirs):
    """Of either kind: where a step has two files, readers take the keyframe."""
    no_check(monkeypatch)
    if not links:
        no_links(monkeypatch)
    directory = tmp_path / "log"
    first = DeltaLog.create(directory, state(0))
    (directory / "writer.lock").unlink()
    second = DeltaLog.open(directory)
    # Of random bits the patch is larger than the state.
    few = {"w": (torch.arange(4000) // 3990).float() * 7}
    states = {"patch": few, "keyframe": {"w": torch.randint(0, 256, (16000,), dtype=torch.uint8).view(torch.float32)}}
    acknowledged = states[theirs]
    assert second.append(1, acknowledged).wait().kind == theirs
    before = contents(directory)
    with pytest.raises(DeltaLogError, match=rf"step_00000001\.{kind}\.safetensors: step 1: .*exists already"):
        first.append(1, {"w": states[kind]["w"] * 2}).wait()
    assert contents(directory) == before
    same_bits(second.load(1), acknowledged)
    assert second.verify() == []
    first.close()
    second.close()


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on FAT, or a bucket that is mounted."""

    def link(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)


def test_a_file_system_without_links(tmp_path, same_bits, monkeypatch):
    no_links(monkeypatch)
    directory = tmp_path / "log"
    with DeltaLog.create(directory, state(0)) as log:
        log.append(1, state(1)).wait()
    # As a writer that was killed while it published step 2.
    (directory / ".step_00000002.patch.safetensors.claim.tmp").touch()
    with DeltaLog.open(directory) as log:
        log.append(2, state(2)).wait()
        same_bits(log.load(2), state(2))
        assert log.verify() == []
    assert len(contents(directory)) == 3, "no temporary file is left"


@pytest.mark.parametrize("links", [True, False], ids=["links", "no_links"])
def test_one_of_many_publishes_a_new_file(tmp_path, monkeypatch, links):
    if not links:
        no_links(monkeypatch)
    path, start = tmp_path / "file", threading.Barrier(8)
    outcomes: list[str] = []

    def publish(text: str) -> None:
        try:
            with written_aside(path, replace=False) as aside:
                aside.write_text(text)
                start.wait(30)
        except FileExistsError:
            outcomes.append("refused")
        else:
            outcomes.append(text)

    threads = [threading.Thread(target=publish, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (winner,) = set(outcomes) - {"refused"}
    assert len(outcomes) == 8 and outcomes.count("refused") == 7
    assert path.read_text() == winner
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_a_new_file_that_or_whose_folder_cannot_be_synced_is_taken_back(tmp_path, monkeypatch, is_folder):
    sync = os.fsync

    def fail(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}") == is_folder:
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"), written_aside(tmp_path / "file", replace=False) as aside:
        aside.touch()
    assert not list(tmp_path.iterdir())


def test_a_truncation_stops_too(logged, monkeypatch):
    """The lock is lost while the work goes on."""
    before = contents(logged.directory)

    def lost(directory: Path) -> WriterLock:
        lock = WriterLock(directory)
        (directory / "writer.lock").unlink()
        return lock

    monkeypatch.setattr("sparse_opt.delta.log.WriterLock", lost)
    with pytest.raises(DeltaLogError, match=LOST.format(r"step_0000000\d\.\w+\.safetensors", r"\d")):
        DeltaLog.open(logged.directory).truncate(5)
    assert contents(logged.directory) == before


def test_a_creation_does_not_touch_the_mask_of_the_log_that_came_before(tmp_path, same_bits, monkeypatch):
    """Another process deletes the lock, and creates its log, right after this one has locked the directory."""
    directory = tmp_path / "log"
    one, other = (MaskSet.from_bool({"w": torch.arange(4000) % 9 == i}) for i in range(2))
    changed = {"w": (torch.arange(4000) % 9 == 0).float()}

    def overtaken(where: Path) -> WriterLock:
        lock = WriterLock(where)
        monkeypatch.undo()
        (where / "writer.lock").unlink()
        with DeltaLog.create(where, state(0), mask=one) as log:
            assert log.append(1, changed).wait().masked
        return lock

    monkeypatch.setattr("sparse_opt.delta.log.WriterLock", overtaken)
    with pytest.raises(DeltaLogError, match="holds a delta log already"):
        DeltaLog.create(directory, state(5), mask=other)
    log = DeltaLog.open(directory)
    same_bits(log.load(1), changed)
    assert log.verify() == []
