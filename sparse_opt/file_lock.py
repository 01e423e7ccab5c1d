"""A lock on a file that says which process may write to the file's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class FileLock:
    """An exclusive lock on a file, until `release()` or the end of the process: a killed one leaves nothing locked."""

    def __init__(self, path: Path, descriptor: int, made: list[Path]) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._process = os.getpid()
        self._made = made

    @classmethod
    def take(cls, path: Path, *, make: bool = False) -> FileLock:
        """Lock a file, which is made where it is missing; `make` makes its folder too.

        Raises:
            BlockingIOError: another process has it locked, or another lock of this one.
            OSError: the file cannot be made or locked.
        """
        folders = (path.parent, *path.parent.parents)
        made = [folder for folder in folders if not folder.exists()] if make else []
        try:
            while True:
                if make:
                    path.parent.mkdir(parents=True, exist_ok=True)
                new = not path.exists()
                descriptor = _locked(path)
                # Between opening and locking, the process that had it may have removed it: this is a lock on nothing.
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
        """How the lock was lost although it was not released: `deleted` or `replaced`; None while it is held.

        Another process can then lock a new file of that name. Raises OSError where the file cannot be looked at.
        """
        if self._descriptor is None:
            return None
        if _is_file(self._descriptor, self.path):
            return None
        return "replaced" if self.path.exists() else "deleted"

    def release(self) -> None:
        """Release the lock; the file stays. Does nothing a second time."""
        if self._descriptor is not None:
            # A process forked since, as data loaders are, has the lock too: closed here, it would hold it on. And it
            # must not release it.
            if os.getpid() == self._process:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def undo(self, *, remove_file: bool = False) -> None:
        """Release the lock and remove what taking it made, where nothing else has come to it.

        Args:
            remove_file: remove the file also where it was there before.
        """
        with contextlib.suppress(OSError):  # it cannot be looked at, and so not be removed
            if self.held and self.loss() is None and os.getpid() == self._process:
                if remove_file:
                    self.path.unlink()
                for path in self._made:
                    with contextlib.suppress(OSError):  # it holds something by now
                        path.unlink(missing_ok=True) if path == self.path else path.rmdir()
        self.release()


def _locked(path: Path) -> int:
    """A descriptor of the file, which is locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether the file of this name is the one that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
