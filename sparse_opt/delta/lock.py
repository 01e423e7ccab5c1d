"""WriterLock: lets one process at a time write to a delta log's directory, by a lock on a file in it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

from ..errors import DeltaLogError
from ..file_lock import FileLock
from ..files import one_line
from .files import list_steps

LOCK_NAME = "writer.lock"
_LEFTOVER = re.compile(r"\.(step_\d+\.(keyframe|patch)|mask)\.safetensors\..*\.tmp|\.tmp[0-9A-Za-z]{6}")


class WriterLock:
    """A directory locked for writing, until `release()` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Lock a directory, which is created if it is missing, and remove a killed writer's temporary files.

        Raises:
            DeltaLogError: another writer holds the lock, or the directory cannot be written.
        """
        self.directory = directory
        path = directory / LOCK_NAME
        try:
            self._lock = FileLock(path)
        except BlockingIOError as error:
            holder = _read(path) or "unknown"
            raise DeltaLogError(f"{directory}: another writer has this delta log open: {holder}") from error
        except OSError as error:
            raise DeltaLogError(f"{directory}: cannot be written: {one_line(error)}") from error
        with contextlib.suppress(OSError):  # a full disk: it is only for the message of another writer
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        try:
            for leftover in directory.iterdir():  # this package's, and those of the safetensors package
                if _LEFTOVER.fullmatch(leftover.name):
                    leftover.unlink(missing_ok=True)
        except OSError as error:
            self.release()
            raise DeltaLogError(f"{directory}: cannot be written: {one_line(error)}") from error

    @property
    def held(self) -> bool:
        return self._lock.held

    def require_held(self, where: str) -> None:
        """Raise a DeltaLogError that begins with `where` unless `writer.lock` is still the file that was locked.

        Otherwise another process can lock a new file of that name, and write to the log as well.
        """
        path = self._lock.path
        if not self.held:
            raise DeltaLogError(f"{where}: {path} was released by this process")
        try:
            loss = self._lock.loss()
        except OSError as error:
            raise DeltaLogError(f"{where}: {path} cannot be checked: {one_line(error)}") from error
        if loss is not None:
            raise DeltaLogError(
                f"{where}: {path} was {loss} while this process held it, so that another process may write to the "
                "log: close this log and open it again"
            )

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        self._lock.release()


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return ""


def require_no_log(directory: Path) -> None:
    """Raise DeltaLogError if the directory contains a log."""
    if list_steps(directory)[0]:
        raise DeltaLogError(f"{directory}: holds a delta log already; open it, or choose another directory")
