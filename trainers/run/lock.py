"""Who may write to the folder of a run: one process at a time, by a lock on `run.lock` in it.

A killed run leaves the file, and nothing locked.
"""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from types import TracebackType

from sparse_opt.errors import ConfigError
from sparse_opt.file_lock import FileLock
from sparse_opt.files import one_line

LOCK_FILE = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """A folder taken for writing while `with` lasts; it is made where it is missing.

    At the end the lock file is removed, and with it the folder if taking it made it and nothing else is in it. On a
    file system without locks, as some of clusters are, the folder is only made, with a UserWarning.

    Raises:
        ConfigError: another run has the folder, or it cannot be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: FileLock | None = None

    def __enter__(self) -> RunLock:
        path = self.folder / LOCK_FILE
        try:
            self._lock = FileLock.take(path, make=True)
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


def require_unlocked(folder: Path) -> None:
    """Raise ConfigError where another run is writing to a folder; the lock file of a killed run is removed."""
    if (folder / LOCK_FILE).exists():
        with RunLock(folder):
            pass
