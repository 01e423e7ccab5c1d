"""`RunFolder`: the `output_dir` of a Trainer, in which one run at a time saves checkpoints."""

from __future__ import annotations

import errno
import json
import re
import secrets
import warnings
from pathlib import Path

from ..errors import ConfigError
from ..file_lock import FileLock
from ..files import one_line
from .checkpoints import MANIFEST, CheckpointError, VerifiedCheckpointCallback

# Both stay in the folder. `push_to_hub` leaves out names that begin like these.
LOCK = "_run.lock"
LAST = "_run.txt"  # the name of the last run; not in the locked file, which filelock may truncate
# Files that a killed run was writing: of `written_aside`, and of safetensors.
_UNFINISHED = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp|\.tmp\w{6}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunFolder:
    """A folder that one run locks from `begin` to `end`, or to the end of its process. Used on process 0 alone."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._lock: FileLock | None = None

    def begin(self, checkpoint: str | None, *, newest: bool, saves: bool) -> str:
        """Lock the folder, remove what a killed run has left there, and verify the checkpoint from which a run resumes.

        Returns the name of the run; empty, without a lock, if it saves no checkpoints.

        Args:
            checkpoint: None begins a new run.
            saves: whether the run saves checkpoints.
            newest: it was chosen as the newest one, so it must be of the last run in this folder.

        Raises:
            ConfigError: another run holds the lock, or the folder cannot be written.
            CheckpointError: the checkpoint is damaged, or is of an earlier run.
        """
        if not saves:
            if checkpoint is not None:
                VerifiedCheckpointCallback.require_intact(checkpoint)
            return ""
        path = self._folder / LOCK
        try:
            self._lock = FileLock(path)
            last = last_run(self._folder)
            for file in (*self._folder.glob(".*"), *self._folder.glob("checkpoint-*/.*")):
                if _UNFINISHED.fullmatch(file.name):
                    file.unlink()
        except BlockingIOError as error:
            raise ConfigError(
                f"output_dir: another run is saving checkpoints to {self._folder}: wait for its end, or choose another"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise ConfigError(f"output_dir: {self._folder} cannot be written: {one_line(error)}") from error
            warnings.warn(f"{self._folder}: its file system has no locks: let no other run save there", stacklevel=2)
            last = ""
        run = ""
        if checkpoint is not None:
            run = VerifiedCheckpointCallback.require_intact(checkpoint, last)
            if newest and run and last not in (run, ""):
                problem = f"checkpoint {checkpoint}: is of an earlier run in its folder, not of the last one, {last}"
                raise CheckpointError(problem, Path(checkpoint), last)
        run = run or secrets.token_hex(8)
        (self._folder / LAST).write_text(run, encoding="utf-8")
        return run

    def end(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def last_run(folder: Path) -> str:
    """The name of the last run that saved checkpoints in the folder; empty if none did."""
    name = folder / LAST
    return name.read_text(encoding="utf-8") if name.exists() else ""


def last_checkpoint(folder: str) -> str | None:
    """The newest complete checkpoint of the last run in the folder; its files are not compared with their manifest."""
    run = last_run(Path(folder))
    found = [path.parent for path in Path(folder).glob(f"checkpoint-*/{MANIFEST}")]
    steps = [
        int(path.name.rpartition("-")[2])
        for path in found
        if json.loads((path / MANIFEST).read_text(encoding="utf-8"))["run"] == run
    ]
    return str(Path(folder, f"checkpoint-{max(steps)}")) if steps else None
