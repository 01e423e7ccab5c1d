"""What a run leaves behind: options, rows of JSON as it goes, and models in Hugging Face format, none half-written."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from io import FileIO
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from torch import nn

from sparse_opt.config import read_yaml, to_yaml
from sparse_opt.delta.lock import LOCK_NAME
from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.files import new_folder, one_line, written_aside

from .lock import LOCK_FILE

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES_FILE = "samples.jsonl"
OPTIONS_FILE = "options.yaml"
SUMMARY_FILE = "summary.json"
CHECKPOINT_FOLDER = "final"
ADAPTER_FOLDER = "adapter"
# What may be in a run's folder before the first row of metrics.
_EARLY_OUTPUTS = (
    OPTIONS_FILE, METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE, "update_statistics.jsonl", "reward_parts.jsonl", "logs",
    "tensorboard", "wandb", "wandb_run_id",
)  # fmt: skip

# What a resumed run may be given otherwise: it changes nothing that the run computes.
_FREE_TO_CHANGE = {
    "resume", "resume_step", "output_dir", "mount_dir", "save_steps", "save_total_limit", "sample_steps", "report_to",
    "project_name", "run_name", "eval_dataset", "eval_dataset_split", "eval_subset_size", "eval_steps", "device",
}  # fmt: skip


def check_new_folder(path: Path, option: str) -> None:
    """Refuse a folder that a run could not create or that holds something (other than the lock file of a run or log).

    The disk is left as it was.

    Raises:
        ConfigError: naming `option`, the folder and the cause.
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
        raise ConfigError(f"option '{option}': {path} cannot be made: {parent} is not a folder")
    try:
        # Only trying tells: a file system may refuse what the permission bits allow.
        os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=parent))
    except OSError as error:
        raise ConfigError(f"option '{option}': {path} cannot be made in {parent}: {error.strerror}") from error


def _not_empty(path: Path, option: str) -> ConfigError:
    hint = ", or go on with it: --resume" if (path / OPTIONS_FILE).is_file() else ""
    return ConfigError(f"option '{option}': {path} exists and is not empty; choose another or remove it{hint}")


def is_begun(output_dir: Path) -> bool:
    """Whether a run has begun to write here."""
    return (output_dir / OPTIONS_FILE).is_file()


def check_resumable(output_dir: Path, config: Any) -> None:
    """Refuse to go on with a run that has finished, or that was begun with options that compute something else.

    Raises:
        ConfigError: naming the first such option and both values, or an unreadable options file.
    """
    if (output_dir / SUMMARY_FILE).is_file():
        raise ConfigError(f"option 'resume': the run in {output_dir} has finished, see its {SUMMARY_FILE}")
    require_same_options(output_dir, config, _FREE_TO_CHANGE)


def require_same_options(output_dir: Path, config: Any, free_to_change: Collection[str]) -> None:
    """Raise ConfigError where a run was begun with another value of an option that is not free to change.

    The message names the first such option and both values. An options file that cannot be read is refused too.
    """
    file = output_dir / OPTIONS_FILE
    try:
        begun_with = read_yaml(file, "options file")
    except ConfigError as error:
        raise ConfigError(f"option 'resume': {error}") from error
    if not isinstance(begun_with, dict) or not begun_with:
        what = "is empty" if not begun_with else f"holds a {type(begun_with).__name__}"
        raise ConfigError(f"option 'resume': {file} {what}, expected the options of a run")
    now = yaml.safe_load(to_yaml(config))
    # An option that came after the run was begun had its default then.
    later = {field.name for field in fields(config) if getattr(config, field.name) == field.default} - begun_with.keys()
    for name in sorted((now.keys() | begun_with.keys()) - later, key=str):
        before, after = begun_with.get(name), now.get(name)
        if before != after and name not in free_to_change:
            raise ConfigError(
                f"option 'resume': the run in {output_dir} was begun with {name} {before}, not {after}: it would go on "
                "as another run"
            )


class RowFile:
    """JSON lines, flushed one by one as they are written; the file is made with the first.

    `rows` are those of the run so far.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._file: FileIO | None = None

    @classmethod
    def resumed(cls, path: Path, last_step: int) -> RowFile:
        """Go on with a file after its rows of step `last_step`; what follows them, or is torn, is dropped."""
        file = cls(path)
        if path.exists():
            file.rows = read_rows(path, last_step)
            with writing(path), written_aside(path) as aside:
                aside.write_text("".join(json.dumps(row) + "\n" for row in file.rows), encoding="utf-8")
        return file

    def write(self, row: dict[str, Any]) -> None:
        """Append one row of finite numbers, strings, lists and None.

        Raises:
            SparseOptError: a number is not finite, or the row cannot be written.
        """
        try:
            line = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
        except ValueError as error:
            wrong = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
            raise SparseOptError(
                f"{self.path}: step {row['step']}: {wrong[0] if wrong else 'a value'} is not finite; lower "
                "--learning_rate, or train in fp32"
            ) from error
        with writing(self.path):
            if self._file is None:
                # Unbuffered: a line that could not be written is not tried again when the file is closed.
                self._file = self.path.open("ab", buffering=0)
            while line:
                line = line[self._file.write(line) :]
        self.rows.append(row)

    def sync(self) -> None:
        """Put what was written on disk: a checkpoint must not outlive the rows of its steps."""
        if self._file is not None:
            with writing(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_rows(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The rows of a file up to `last_step`; a last line that a killed run has left unfinished is none.

    Raises:
        DataError: another line is not a JSON object with a step; names the file and the line.
    """
    rows = []
    # The piece after the last newline is empty, or an unfinished line.
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


def require_metrics(output_dir: Path, last_step: int) -> None:
    """Raise DataError where the metrics of a run are not one row for each step up to `last_step`, in order."""
    path = output_dir / METRICS_FILE
    rows = read_rows(path, last_step) if path.exists() else []
    for row in rows:
        odd = [name for name, value in row.items() if not (value is None or isinstance(value, int | float))]
        if odd or not isinstance(row.get("step_time_s"), float):
            raise DataError(f"{path}: step {row['step']}: {odd[0] if odd else 'step_time_s'} is no number")
    found = [row["step"] for row in rows]
    for step in range(1, last_step + 1):
        if step > len(found) or found[step - 1] != step:
            raise DataError(f"{path}: has no row of step {step}, and the checkpoint is of step {last_step}")
    if len(found) > last_step:
        raise DataError(f"{path}: has {len(found)} rows up to step {last_step}, expected one a step")


def begin_outputs(output_dir: Path, config: Any) -> None:
    """Write the options of a run into its folder, which the caller has locked: the sign that it has begun."""
    path = output_dir / OPTIONS_FILE
    with writing(path), written_aside(path) as aside:
        aside.write_text(to_yaml(config), encoding="utf-8")


def discard_outputs(output_dir: Path) -> None:
    """Remove what a run may have written before its first step was logged; the folder stays."""
    for name in _EARLY_OUTPUTS:
        path = output_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, an error of a write, such as a full disk, becomes a SparseOptError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SparseOptError(f"{path}: cannot be written: {one_line(error)}") from error


def write_summary(output_dir: Path, summary: dict[str, Any]) -> None:
    """The run's summary beside its metrics: the sign that it has finished."""
    path = output_dir / SUMMARY_FILE
    with writing(path), written_aside(path) as aside:
        aside.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def save_checkpoint(
    model: nn.Module, tokenizer: Any, folder: Path, beside: Callable[[Path], object] | None = None
) -> None:
    """Write model and tokenizer in Hugging Face format; `folder` appears when all of it is on disk, or not at all.

    Args:
        beside: writes what else belongs into the folder it is given.

    Raises:
        SparseOptError: it cannot be written.
    """
    with writing(folder), new_folder(folder) as aside:
        save_into(model, tokenizer, aside)
        if beside is not None:
            beside(aside)


def save_into(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write model (of a PEFT model, its adapters) and tokenizer into a folder that is there."""
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
