"""Folders that appear with all of their files or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from .atomic_files import fsync


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; on success it is fsynced and renamed, on any error it is removed.

    Makes missing parent folders. The final name may be taken by an empty folder alone.

    Raises:
        OSError: the folder cannot be made, or `folder` holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(errno.EEXIST, "exists and is not an empty folder", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    aside.mkdir()
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            fsync(path)
        aside.rename(folder)
        fsync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
