"""FileLock: an exclusive lock on a file, held by the one process that may write to the file's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self
from weakref import WeakSet


class FileLock:
    """An exclusive lock on a file, until `release()` or the end of the process, also of a killed one.

    A process forked while it is held, such as a data loader's worker, does not hold it.
    """

    def __init__(self, path: Path, descriptor: int, made: list[Path]) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._made = made
        _locks.add(self)

    @classmethod
    def acquire(cls, path: Path, *, make: bool = False) -> Self:
        """Lock a file, which is created if it is missing; `make` creates its folder too.

        Raises:
            BlockingIOError: it is already locked, by another process or by this one.
            OSError: the file cannot be created or locked.
        """
        folders = (path.parent, *path.parent.parents)
        made = [folder for folder in folders if not folder.exists()] if make else []
        try:
            while True:
                if make:
                    path.parent.mkdir(parents=True, exist_ok=True)
                new = not path.exists()
                descriptor = _locked(path)
                # The previous holder may have removed the file between opening and locking; then the lock is useless.
                if _is_file(descriptor, path):
                    return cls(path, descriptor, [*([path] if new else []), *made])
                os.close(descriptor)
        except BaseException:
            for folder in made:
                with contextlib.suppress(OSError):  # it was not made, or holds something by now
                    folder.rmdir()
            raise

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def loss(self) -> str | None:
        """Return how the lock was lost without a release, `deleted` or `replaced`; None while it is held.

        Once lost, another process can lock a new file of that name. Raises OSError if the file cannot be examined.
        """
        if self._descriptor is None:
            return None
        if _is_file(self._descriptor, self.path):
            return None
        return "replaced" if self.path.exists() else "deleted"

    def release(self) -> None:
        """Release the lock; the file stays. Further calls do nothing."""
        if self._descriptor is not None:
            # A process that C code has forked since shares the lock: closing the file here would not release it.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def undo(self, *, remove_file: bool = False) -> None:
        """Release the lock, and remove the file and folders that `acquire` created, unless others have added files.

        Args:
            remove_file: remove the file even if it existed before.
        """
        with contextlib.suppress(OSError):  # a file that cannot be examined is not removed
            if self.held and self.loss() is None:
                if remove_file:
                    self.path.unlink()
                for path in self._made:
                    with contextlib.suppress(OSError):  # it holds something by now
                        path.unlink(missing_ok=True) if path == self.path else path.rmdir()
        self.release()


# The locks that this process holds, and released ones. A forked process closes its copies: they would keep the file
# locked after this process was killed.
_locks: WeakSet[FileLock] = WeakSet()


def _close_copies() -> None:
    for lock in _locks:
        lock._close()


os.register_at_fork(after_in_child=_close_copies)


def _locked(path: Path) -> int:
    """Open and lock the file; return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether the path still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
