"""What a run leaves behind: options, metrics as JSON lines, and the final checkpoint, none of it half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from sparse_opt.errors import ConfigError
from sparse_opt.new_folders import new_folder

from .config import to_yaml

METRICS_FILE = "metrics.jsonl"
OPTIONS_FILE = "options.yaml"
CHECKPOINT_FOLDER = "final"


def check_new_folder(path: Path, option: str) -> None:
    """Refuse a folder that a run could not create or that holds something; the disk is left as it was.

    Raises:
        ConfigError: naming `option`, the folder and the cause.
    """
    try:
        if path.is_dir():
            if any(path.iterdir()):
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
    return ConfigError(f"option '{option}': {path} exists and is not empty; choose another or remove it")


class MetricsWriter:
    """The run's folder, with its options and one JSON line per step, flushed as it is written.

    Raises:
        ConfigError: another run has written to the folder since it was checked.
    """

    def __init__(self, output_dir: Path, config: Any):
        output_dir.mkdir(parents=True, exist_ok=True)
        self.path = output_dir / METRICS_FILE
        try:
            # Exclusive and before anything else: of two runs that found the folder empty, one gets it.
            self._file = self.path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise _not_empty(output_dir, "output_dir") from error
        (output_dir / OPTIONS_FILE).write_text(to_yaml(config), encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row of finite numbers, strings and None."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; what was written is already on disk."""
        self._file.close()


def save_checkpoint(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer in Hugging Face format; `folder` appears when all of it is on disk, or not at all."""
    with new_folder(folder) as aside:
        model.save_pretrained(aside)  # type: ignore[operator]
        tokenizer.save_pretrained(aside)
