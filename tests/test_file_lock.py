"""A lock ends with the process that took it."""

from __future__ import annotations

import os
import signal
import time

from sparse_opt.file_lock import FileLock


def test_a_forked_process_does_not_keep_the_lock_of_a_killed_one(tmp_path):
    """A data loader's worker notices only seconds later that it is alone."""
    forked, leave = os.pipe(), os.pipe()
    owner = os.fork()
    if not owner:
        lock = FileLock.acquire(tmp_path / "lock")
        if not os.fork():
            os.write(forked[1], b"not held" if not lock.held else b"held")
            os.read(leave[0], 1)
            os._exit(0)
        time.sleep(60)
    assert os.read(forked[0], 8) == b"not held"
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    FileLock.acquire(tmp_path / "lock").release()
    os.write(leave[1], b"x")
