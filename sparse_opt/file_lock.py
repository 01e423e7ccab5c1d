"""FileLock: a lock of the package `filelock` that also notices when its file is deleted or replaced."""

from __future__ import annotations

import os
from pathlib import Path

import filelock


class FileLock:
    """An exclusive lock on a file, until `release()` or the end of the process, also of a killed one.

    The file stays after the release. A process forked while the lock is held, such as a data loader's worker, does not
    hold it.
    """

    def __init__(self, path: Path) -> None:
        """Lock a file, which is created, with its folder, if it is missing.

        Raises:
            BlockingIOError: it is already locked, by another process or by this one.
            OSError: the file cannot be created or locked.
        """
        self.path = path
        self._file: os.stat_result | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(path, blocking=False, thread_local=False, on_acquired=self._acquired)
        try:
            self._lock.acquire()
        except filelock.Timeout as error:
            raise BlockingIOError(f"{path} is locked") from error

    def _acquired(self, descriptor: int) -> None:
        self._file = os.fstat(descriptor)

    @property
    def held(self) -> bool:
        return self._lock.is_locked

    def loss(self) -> str | None:
        """Return how the lock was lost without a release, `deleted` or `replaced`; None while it is held.

        Once lost, another process can lock a new file of that name. Raises OSError if the file cannot be examined.
        """
        if not self.held or self._file is None:
            return None
        try:
            return None if os.path.samestat(self._file, self.path.stat()) else "replaced"
        except FileNotFoundError:
            return "deleted"

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        self._lock.release()
