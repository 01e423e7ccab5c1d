"""Files that appear under their final name whole or not at all, also when the machine dies in between."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed to `path`, on any error it is removed.

    A process killed inside leaves at most a hidden `.tmp` file, which no reader of this package looks at.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        fsync(aside)
        os.replace(aside, path)
        # The rename itself is durable only once the directory is.
        fsync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors as one safetensors file, atomically. Raises OSError or SafetensorError."""
    with written_aside(path) as aside:
        save_file(dict(tensors), aside, metadata=dict(metadata))


def fsync(path: Path) -> None:
    """Put a file or a folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def one_line(error: BaseException) -> str:
    """The reason of a failed read or write, short and without line breaks, for a message that names the file.

    Paths are left out of it: while a file is written they are temporary ones.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r' at path "[^"]*"', "", " ".join(reason.split())) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
