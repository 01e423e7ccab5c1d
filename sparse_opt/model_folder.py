"""Output folders: checks before long work, and models in Hugging Face format, written atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .delta.lock import LOCK_NAME
from .errors import ConfigError, SparseOptError
from .files import new_folder, one_line


def check_new_folder(path: Path, option: str) -> None:
    """Refuse a folder that cannot be created or is not empty (except for the lock file of a delta log).

    Nothing is changed on disk.

    Raises:
        ConfigError: the folder is refused; the message names `option`, the folder and the cause.
    """
    try:
        if path.is_dir():
            if any(entry.name != LOCK_NAME for entry in path.iterdir()):
                raise ConfigError(f"option '{option}': {path} exists and is not empty; choose another or remove it")
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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that turns a write error, such as a full disk, into a SparseOptError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SparseOptError(f"{path}: cannot be written: {one_line(error)}") from error


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model (of a PEFT model, its adapters) and its tokenizer in Hugging Face format to `folder`, atomically.

    Raises:
        SparseOptError: the folder cannot be written.
    """
    with writing(folder), new_folder(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
