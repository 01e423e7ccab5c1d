"""Files that the package writes: their mode, and locks, which end with the process that took them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.file_lock import FileLock


@pytest.fixture(params=[0o022, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_have_the_mode_of_the_umask(umask: int, tmp_path: Path) -> None:
    state = {"w": torch.zeros(64)}
    mask = MaskSet.random({"w": (64,)}, density=0.5)
    mask.save(tmp_path / "mask.safetensors")
    with DeltaLog.create(tmp_path / "log", state, mask=mask, keyframe_every=2) as log:
        for step in (1, 2):
            state["w"][mask["w"].long()] += 1
            log.append(step)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o666 & ~umask for path in files}


def test_a_forked_process_does_not_keep_the_lock_of_a_killed_one(tmp_path):
    """A data loader's worker notices only seconds later that it is alone."""
    forked, leave = os.pipe(), os.pipe()
    owner = os.fork()
    if not owner:
        os.close(leave[1])
        lock = FileLock(tmp_path / "lock")
        if not os.fork():
            os.write(forked[1], b"y" if lock.held else b"n")
        os.read(leave[0], 1)  # until the test ends
        os._exit(0)
    try:
        assert os.read(forked[0], 1) == b"n"
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        FileLock(tmp_path / "lock").release()
    finally:
        os.close(leave[1])
