"""The output files of a run: options, JSON rows written during training, and models in Hugging Face format."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from sparse_opt.config import to_yaml
from sparse_opt.delta.lock import LOCK_NAME
from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.files import new_folder, one_line, written_aside

from .lock import LOCK_FILE, RunLock

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES_FILE = "samples.jsonl"
OPTIONS_FILE = "options.yaml"
SUMMARY_FILE = "summary.json"
CHECKPOINT_FOLDER = "final"
ADAPTER_FOLDER = "adapter"
# Files that may be in a run's folder before the first row of metrics.
_EARLY_OUTPUTS = (
    OPTIONS_FILE, METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE, "update_statistics.jsonl", "reward_parts.jsonl", "logs",
    "tensorboard", "wandb", "wandb_run_id",
)  # fmt: skip


def check_new_folder(path: Path, option: str) -> None:
    """Refuse a folder that cannot be created or is not empty (except for the lock file of a run or log).

    Nothing is changed on disk.

    Raises:
        ConfigError: the folder is refused; the message names `option`, the folder and the cause.
    """
    try:
        if path.is_dir():
            if any(entry.name not in (LOCK_FILE, LOCK_NAME) for entry in path.iterdir()):
                raise _not_empty(path, option)
        elif path.exists():
            raise ConfigError(f"option '{option}': {path} exists and is not a folder")
        parent = path.absolute()
        while not parent.exists():
            parent = parent.parent
    except OSError as error:
        raise ConfigError(f"option '{option}': {path} cannot be used: {error.strerror}") from error
    if not parent.is_dir():
        raise ConfigError(f"option '{option}': {path} cannot be created: {parent} is not a folder")
    try:
        # Only an attempt is conclusive: a file system may refuse what the permission bits allow.
        os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=parent))
    except OSError as error:
        raise ConfigError(f"option '{option}': {path} cannot be created in {parent}: {error.strerror}") from error


def _not_empty(path: Path, option: str) -> ConfigError:
    hint = ", or resume its run: --resume" if (path / OPTIONS_FILE).is_file() else ""
    return ConfigError(f"option '{option}': {path} exists and is not empty; choose another or remove it{hint}")


class RowFile:
    """A file of JSON lines, flushed line by line; it is created with the first row.

    `rows` are the rows of the run so far.

    Args:
        lock: the lock of the run's folder; no row is written once it is lost.
        discards: drop all rows, because another process writes them.
    """

    def __init__(self, path: Path, lock: RunLock | None = None, *, discards: bool = False):
        self.path = path
        self._discards = discards
        self._lock = lock
        self.rows: list[dict[str, Any]] = []
        self._file: FileIO | None = None
        self._uncut = False

    @classmethod
    def resumed(cls, path: Path, last_step: int, lock: RunLock | None = None) -> RowFile:
        """Continue a file after its rows of step `last_step`; the file changes only in `cut`, before the first row."""
        file = cls(path, lock)
        if path.exists():
            file.rows = read_rows(path, last_step)
            file._uncut = True
        return file

    def cut(self) -> None:
        """Remove the later rows and an incomplete last line of a resumed file, atomically."""
        if self._uncut:
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
            self._uncut = False

    def write(self, row: dict[str, Any]) -> None:
        """Append one row of finite numbers, strings, lists and None.

        Raises:
            SparseOptError: a number is not finite, the row cannot be written, or the folder's lock was lost.
        """
        assert not self._uncut, f"{self.path}: a row is written before `cut`"
        try:
            line = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
        except ValueError as error:
            wrong = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
            raise SparseOptError(
                f"{self.path}: step {row['step']}: {wrong[0] if wrong else 'a value'} is not finite; lower "
                "--learning_rate, or train in fp32"
            ) from error
        if self._discards:
            return
        if self._lock is not None:
            self._lock.require_held(self.path, row["step"])
        with writing(self.path):
            if self._file is None:
                # Unbuffered, so that closing the file does not retry a failed write.
                self._file = self.path.open("ab", buffering=0)
            while line:
                line = line[self._file.write(line) :]
        self.rows.append(row)

    def sync(self) -> None:
        """Flush written rows to disk, so that a checkpoint never exists without the rows of its steps."""
        if self._file is not None:
            with writing(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_rows(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The rows of a file up to `last_step`, without an incomplete last line of a killed run.

    Raises:
        DataError: another line is not a JSON object with a step; the message names the file and the line.
    """
    rows = []
    # The part after the last newline is empty or an incomplete line.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON: {one_line(error)}") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
            raise DataError(f"{path}: line {number} is not an object with a step")
        if row["step"] <= last_step:
            rows.append(row)
    return rows


def begin_outputs(output_dir: Path, config: Any) -> None:
    """Write the options of a run to its folder, which the caller has locked; this marks the run as started."""
    write_text(output_dir / OPTIONS_FILE, to_yaml(config))


def discard_outputs(output_dir: Path) -> None:
    """Remove the files that a run may have written before its first logged step; the folder is kept."""
    for name in _EARLY_OUTPUTS:
        path = output_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that turns a write error, such as a full disk, into a SparseOptError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SparseOptError(f"{path}: cannot be written: {one_line(error)}") from error


def write_text(path: Path, text: str, before_publishing: Callable[[], object] | None = None) -> None:
    """Write a file atomically.

    Args:
        before_publishing: called when the file is on disk, before it gets its final name; its errors propagate.

    Raises:
        SparseOptError: the file cannot be written.
    """
    with writing(path), written_aside(path, before_publishing=before_publishing) as aside:
        aside.write_text(text, encoding="utf-8")


def save_checkpoint(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    write_extra: Callable[[Path], object] | None = None,
    *,
    before_publishing: Callable[[], object] | None = None,
) -> None:
    """Write model and tokenizer in Hugging Face format to `folder`, atomically.

    Args:
        write_extra: writes further files into the folder passed to it.
        before_publishing: called when all files are on disk, before `folder` gets its name; its errors propagate.

    Raises:
        SparseOptError: the checkpoint cannot be written.
    """
    with writing(folder), new_folder(folder, before_publishing=before_publishing) as aside:
        save_into(model, tokenizer, aside)
        if write_extra is not None:
            write_extra(aside)


def save_into(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the model (for a PEFT model, its adapters) and the tokenizer into an existing folder."""
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
