"""Atomic writes of files and folders: they appear under their final name complete or not at all, also after a crash.

And checks of output folders before long work, and folders of the hub.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import ConfigError, DataError, SparseOptError

# Errors of link(2) on a file system without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class DamagedFile(ValueError):
    """The bytes of a file are not those of its format; the message does not name the file."""


@contextlib.contextmanager
def written_aside(
    path: Path, *, replace: bool = True, before_publishing: Callable[[], object] | None = None
) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is fsynced and renamed to `path`, on any error removed.

    A process killed inside leaves at most hidden `.tmp` files, which readers of this package ignore.

    Args:
        replace: overwrite an existing file. If False, that file does not change.
        before_publishing: called when the temporary file is on disk; its errors propagate.

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
        # The new name is durable only after an fsync of the directory.
        try:
            fsync(path.parent)
        except OSError:
            if not replace:  # this call created the file, and has not returned yet
                path.unlink()
            raise
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text as `written_aside` does."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _publish_new(aside: Path, path: Path) -> None:
    """Rename a file to `path` unless that exists, atomically; rename(2) alone would overwrite."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(aside, path)


def _rename_new(aside: Path, path: Path) -> None:
    """`_publish_new` without hard links: serialized by a file that only one process can create."""
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
    """Write contiguous CPU tensors as one safetensors file, atomically; arguments and errors as in `written_aside`.

    Raises:
        SafetensorError: the tensors cannot be written in this format.
    """
    if "__metadata__" in tensors:  # `save_file` would write a file that cannot be read
        raise SafetensorError("a tensor is named '__metadata__', which the format reserves: rename it")
    with written_aside(path, replace=replace, before_publishing=before_publishing) as aside:
        aside.touch(exist_ok=False)  # with the umask's mode: to read the umask is to change it for all threads
        mode = aside.stat().st_mode
        save_file(dict(tensors), aside, metadata=dict(metadata))  # replaces it by a file of mode 0600
        aside.chmod(mode)


def fsync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def one_line(error: BaseException) -> str:
    """Return the cause of a failed read or write in one short line, for a message that names the file.

    Paths are left out, because they may be temporary ones.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r' at path "[^"]*"', "", " ".join(reason.split())) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


def is_text(text: str) -> bool:
    """Whether a string can be encoded as UTF-8, that is, has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`; on success it is fsynced and renamed, on any error removed.

    Creates missing parent folders. `folder` may already exist if it is empty.

    Raises:
        OSError: the folder cannot be created, or `folder` is not empty.
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


def check_new_folder(path: Path, option: str, *, ignored: str = "") -> None:
    """Refuse a folder that cannot be created or is not empty, except for a file named `ignored`.

    Nothing is changed on disk.

    Raises:
        ConfigError: the folder is refused; the message names `option`, the folder and the cause.
    """
    try:
        if path.is_dir():
            if any(entry.name != ignored for entry in path.iterdir()):
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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that turns a write error, such as a full disk, into a SparseOptError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SparseOptError(f"{path}: cannot be written: {one_line(error)}") from error


def hub_folder(name: str, revision: str | None, **options: Any) -> Path:
    """Return the folder of the hub's cache with files of a repository, after a download of those that it lacks.

    Args:
        options: others of `huggingface_hub.snapshot_download`.

    Raises:
        DataError: the repository cannot be read.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision or None, **options))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {name}, which is not a folder: {one_line(error)}") from error


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model (of a PEFT model, its adapters) and its tokenizer in Hugging Face format to `folder`, atomically.

    Raises:
        SparseOptError: the folder cannot be written.
    """
    with writing(folder), new_folder(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
