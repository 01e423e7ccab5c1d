"""A lock ends with the process that took it."""

from __future__ import annotations

import os
import signal

from sparse_opt.file_lock import FileLock


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
