"""Who may write to a delta log's directory: one process at a time, by a lock on a file in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .atomic_files import one_line
from .delta_files import list_steps
from .errors import DeltaLogError

LOCK_NAME = "writer.lock"
_LEFTOVER = re.compile(r"\.(step_\d+\.(keyframe|patch)|mask)\.safetensors\..*\.tmp|\.tmp[0-9A-Za-z]{6}")


class WriterLock:
    """A directory taken for writing, until `release()` or the end of the process."""

    def __init__(self, directory: Path, descriptor: int, made: list[Path]) -> None:
        self.directory = directory
        self._descriptor: int | None = descriptor
        self._process = os.getpid()
        self._made = made

    @classmethod
    def take(cls, directory: Path, *, make: bool = False) -> WriterLock:
        """Lock a directory and remove what a killed writer left; `make` makes it where it is missing.

        Raises:
            DeltaLogError: another writer has it, or it cannot be written.
        """
        made = [path for path in (directory, *directory.parents) if not path.exists()] if make else []
        path = directory / LOCK_NAME
        try:
            if make:
                directory.mkdir(parents=True, exist_ok=True)
            while True:
                new = not path.exists()
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    os.close(descriptor)
                    raise DeltaLogError(f"{directory}: another writer has this delta log open: {error}") from error
                # Between the two calls the one who had it may have removed the file: then this is a lock on nothing.
                if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                    _remove_leftovers(directory)
                    return cls(directory, descriptor, [*([path] if new else []), *made])
                os.close(descriptor)
        except OSError as error:
            raise DeltaLogError(f"{directory}: cannot be written: {error}") from error

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def require_held(self, where: str) -> None:
        """Raise DeltaLogError, which begins with `where`, unless `writer.lock` is still the file that was locked.

        Otherwise another process can lock a new file of that name, and write to the log as well.
        """
        if self._descriptor is None:
            raise DeltaLogError(f"{where}: {self.path} was released by this process")
        try:
            found = self.path.stat()
        except FileNotFoundError:
            what = "deleted"
        except OSError as error:
            raise DeltaLogError(f"{where}: {self.path} cannot be checked: {one_line(error)}") from error
        else:
            if os.path.samestat(os.fstat(self._descriptor), found):
                return
            what = "replaced"
        raise DeltaLogError(
            f"{where}: {self.path} was {what} while this process held it, so that another one may write to the log: "
            "close this log and open it again"
        )

    @property
    def path(self) -> Path:
        return self.directory / LOCK_NAME

    def release(self) -> None:
        """Let go of the directory. Does nothing a second time."""
        if self._descriptor is not None:
            # A process forked since, as data loaders are, has the lock too: closed here, it would hold it on. And it
            # must not let go of it.
            if os.getpid() == self._process:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def undo(self) -> None:
        """Release the directory and remove what taking it made, where nothing else has come to it."""
        with contextlib.suppress(DeltaLogError):  # the lock is another writer's by now, and so is the directory
            self.require_held(str(self.directory))
            for path in self._made:
                with contextlib.suppress(OSError):  # it holds something by now
                    path.unlink() if path.name == LOCK_NAME else path.rmdir()
        self.release()


def _remove_leftovers(directory: Path) -> None:
    """Files that a killed writer was writing: ours, and those that safetensors writes its own aside in."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def claim(directory: str | Path) -> Iterator[WriterLock]:
    """Take a directory for a new delta log before any other file of a run is written.

        with claim("delta_logs") as lock:
            ...  # make the run's other files
            log = DeltaLog.create("delta_logs", model, lock=lock)

    Where no log was created by the end, the directory is as it was.

    Raises:
        DeltaLogError: it holds a log, another writer has it, or it cannot be written.
    """
    directory = Path(directory)
    lock = WriterLock.take(directory, make=True)
    try:
        require_no_log(directory)
        yield lock
    finally:
        if not list_steps(directory)[0]:
            lock.undo()


def require_no_log(directory: Path) -> None:
    """Raise DeltaLogError where the directory holds a log."""
    if list_steps(directory)[0]:
        raise DeltaLogError(f"{directory}: holds a delta log already; open it, or choose another directory")
