"""`RunLock`: only one process at a time may write to a run's folder, by a file lock on `run.lock` in it.

A killed run leaves the file, but no lock.
"""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from types import TracebackType

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.file_lock import FileLock
from sparse_opt.files import one_line

LOCK_FILE = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Locks a folder for writing inside `with`, and creates it if it is missing.

    On exit the lock file is removed, and also the folder if the lock created it and it is empty. On a file system
    without locks, as on some clusters, the folder is created with a UserWarning and not locked.

    Raises:
        ConfigError: another run holds the lock, or the folder cannot be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: FileLock | None = None

    def __enter__(self) -> RunLock:
        path = self.folder / LOCK_FILE
        try:
            self._lock = FileLock.acquire(path, make=True)
        except BlockingIOError as error:
            raise ConfigError(f"option 'output_dir': another run is writing to {self.folder}") from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"the file system of {self.folder} has no locks ({one_line(error)}): nothing keeps another run "
                    "from writing there too",
                    stacklevel=2,
                )
                path.unlink(missing_ok=True)
                self.folder.mkdir(parents=True, exist_ok=True)
                return self
            raise ConfigError(f"option 'output_dir': {self.folder} cannot be written: {one_line(error)}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.undo(remove_file=True)

    def loss(self) -> str | None:
        """Return how the lock was lost inside `with`, as the end of a sentence; None while it is held.

        Once `run.lock` was deleted or replaced, another run can lock a new file of that name.
        """
        if self._lock is None:
            return None
        try:
            loss = self._lock.loss()
        except OSError as error:
            return f"cannot be checked: {one_line(error)}"
        return None if loss is None else f"was {loss} while this run held it"

    def require_held(self, path: Path, step: int) -> None:
        """Raise SparseOptError if the lock was lost; the message names `path`, which is to be written, and the step."""
        loss = self.loss()
        if loss is not None:
            raise SparseOptError(
                f"{path}: step {step}: {self.folder / LOCK_FILE} {loss}, so that another run may write to "
                f"{self.folder}: use --resume once no other run does"
            )


def require_unlocked(folder: Path) -> None:
    """Raise ConfigError if another run is writing to the folder; remove the lock file of a killed run."""
    if (folder / LOCK_FILE).exists():
        with RunLock(folder):
            pass
