"""Files that appear under their final name whole or not at all, also when the machine dies in between."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

# What link(2) fails with on a file system that has no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def written_aside(
    path: Path, *, replace: bool = True, before_publishing: Callable[[], object] | None = None
) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed to `path`, on any error it is removed.

    A process killed inside leaves at most hidden `.tmp` files, which no reader of this package looks at.

    Args:
        replace: overwrite a file that is at `path` by then. If False, that file stays as it is.
        before_publishing: called once the temporary file is on disk; an error that it raises is passed on.

    Raises:
        FileExistsError: `replace` is False, and `path` exists or another process is publishing it.
        OSError: the file cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        fsync(aside)
        if before_publishing is not None:
            before_publishing()
        if replace:
            os.replace(aside, path)
        else:
            _publish_new(aside, path)
        # The name is durable only once the directory is.
        try:
            fsync(path.parent)
        except OSError:
            if not replace:  # it is this call's own file, and nobody was told of it
                path.unlink()
            raise
    finally:
        aside.unlink(missing_ok=True)


def _publish_new(aside: Path, path: Path) -> None:
    """Give a file the name `path`, unless that exists. Atomic: rename(2) alone would overwrite."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(aside, path)


def _rename_new(aside: Path, path: Path) -> None:
    """As `_publish_new` without hard links: one process at a time, by a file that only one can create."""
    claim = path.with_name(f".{path.name}.claim.tmp")
    os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.rename(aside, path)
    finally:
        claim.unlink(missing_ok=True)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    replace: bool = True,
    before_publishing: Callable[[], object] | None = None,
) -> None:
    """Write contiguous CPU tensors as one safetensors file, atomically; arguments and errors as of `written_aside`.

    Raises:
        SafetensorError: the tensors cannot be written in this format.
    """
    with written_aside(path, replace=replace, before_publishing=before_publishing) as aside:
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
