"""Reads `.pt` files: zip archives, as torch.save has written them since torch 1.6.

Files are untrusted: they are unpickled with `weights_only=True`, and the checksums of their records, which torch.load
ignores, are compared. The format before torch 1.6 has no checksums and is refused.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .files import DamagedFile, one_line

# The exceptions of zipfile and torch.load for a damaged or hostile file; which one depends on the damaged byte.
_UNREADABLE = (
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    MemoryError,
    pickle.PickleError,
    zipfile.BadZipFile,
    zlib.error,
)


def check_pt(path: Path) -> None:
    """Compare the checksums of a file's records.

    Raises:
        DamagedFile: a checksum differs, or the file is not an archive as torch.save writes it.
        OSError: the file is missing or cannot be read.
    """
    with _reading(), zipfile.ZipFile(path) as archive:
        size = os.path.getsize(path)
        for record in archive.infolist():
            # torch.save does not compress; a compressed record could expand to any size.
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > size:
                raise DamagedFile(f"its record {record.filename} is not as torch.save writes one")
        broken = archive.testzip()
    if broken is not None:
        raise DamagedFile(f"its record {broken} does not have its checksum")


def load_pt(path: Path, *, mmap: bool = False) -> Any:
    """Read the content of a file that `check_pt` has checked, with its tensors on the CPU.

    Args:
        mmap: map the tensors into memory, where they change with the file.

    Raises:
        DamagedFile: the content cannot be unpickled, or holds objects other than tensors and plain Python values.
        OSError: the file is missing or cannot be read.
    """
    # Without this context, torch.load creates sparse tensors on the default device. Warnings are about tensors and
    # pickles that callers refuse.
    with _reading(), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (OSError, DamagedFile):
        raise
    except _UNREADABLE as error:
        # torch's message has advice to trust the file, which is left out: its context has the cause alone.
        own = error.__context__ if isinstance(error, pickle.UnpicklingError) else None
        cause = one_line(own or error).partition(" Please use")[0]
        raise DamagedFile(f"it is not a file that torch.save wrote: {cause}") from error
