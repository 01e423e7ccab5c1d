"""WriterLock: lets one process at a time write to a delta log's directory, by a lock on a file in it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from ..errors import DeltaLogError
from ..file_lock import FileLock
from ..files import one_line
from .files import list_steps

LOCK_NAME = "writer.lock"
_LEFTOVER = re.compile(r"\.(step_\d+\.(keyframe|patch)|mask)\.safetensors\..*\.tmp|\.tmp[0-9A-Za-z]{6}")


class WriterLock(FileLock):
    """A directory locked for writing, until `release()` or the end of the process."""

    @property
    def directory(self) -> Path:
        return self.path.parent

    @classmethod
    def acquire(cls, directory: Path, *, make: bool = False) -> Self:
        """Lock a directory and remove a killed writer's leftovers; `make` creates the directory if it is missing.

        Raises:
            DeltaLogError: another writer holds the lock, or the directory cannot be written.
        """
        try:
            lock = super().acquire(directory / LOCK_NAME, make=make)
        except BlockingIOError as error:
            raise DeltaLogError(f"{directory}: another writer has this delta log open: {error}") from error
        except OSError as error:
            raise DeltaLogError(f"{directory}: cannot be written: {error}") from error
        try:
            _remove_leftovers(directory)
        except OSError as error:
            lock.undo()
            raise DeltaLogError(f"{directory}: cannot be written: {error}") from error
        return lock

    def require_held(self, where: str) -> None:
        """Raise a DeltaLogError that begins with `where` unless `writer.lock` is still the file that was locked.

        Otherwise another process can lock a new file of that name, and write to the log as well.
        """
        if not self.held:
            raise DeltaLogError(f"{where}: {self.path} was released by this process")
        try:
            loss = self.loss()
        except OSError as error:
            raise DeltaLogError(f"{where}: {self.path} cannot be checked: {one_line(error)}") from error
        if loss is not None:
            raise DeltaLogError(
                f"{where}: {self.path} was {loss} while this process held it, so that another process may write to the "
                "log: close this log and open it again"
            )


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary files of a killed writer: this package's, and those of the safetensors package."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def claim(directory: str | Path) -> Iterator[WriterLock]:
    """Lock a directory for a new delta log, before any other file of a run is written.

        with claim("delta_logs") as lock:
            ...  # make the run's other files
            log = DeltaLog.create("delta_logs", model, lock=lock)

    If no log was created inside, the directory is left as it was.

    Raises:
        DeltaLogError: the directory contains a log, another writer holds its lock, or it cannot be written.
    """
    directory = Path(directory)
    lock = WriterLock.acquire(directory, make=True)
    try:
        require_no_log(directory)
        yield lock
    finally:
        if not list_steps(directory)[0]:
            lock.undo()


def require_no_log(directory: Path) -> None:
    """Raise DeltaLogError if the directory contains a log."""
    if list_steps(directory)[0]:
        raise DeltaLogError(f"{directory}: holds a delta log already; open it, or choose another directory")
