"""Finds the files of a log of `.pt` files by name, and reads their tensors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DeltaLogError
from ...files import DamagedFile, one_line
from ...pt_file import check_pt, load_pt
from ...tensors import dtype_name, materialized

BASE_FILE = "base_state.pt"
_NAME = re.compile(r"deltas_step_(\d+)\.pt")


def pt_file_name(step: int) -> str:
    """Return `deltas_step_50.pt` for step 50, and `base_state.pt` for step 0."""
    return f"deltas_step_{step}.pt" if step else BASE_FILE


def is_pt_delta_log(directory: Path) -> bool:
    """Whether a directory has files with the names of such a log."""
    return (directory / BASE_FILE).exists() or any(_NAME.fullmatch(path.name) for path in directory.glob("deltas_*.pt"))


def list_pt_files(directory: Path, base_state: Path | None) -> dict[int, Path]:
    """Return step -> file, ascending; step 0 is the base.

    Raises:
        DeltaLogError: the base is missing, or `base_state` is given without files of differences; a file of differences
            is of step 0; or a step has two files.
    """
    base = directory / BASE_FILE if base_state is None else base_state
    files: dict[int, Path] = {}
    for path in sorted(directory.glob("deltas_*.pt")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        step = int(match[1])
        if step == 0:
            raise DeltaLogError(f"{path}: is of step 0, expected a later step: {base} is step 0")
        if step in files:
            raise DeltaLogError(f"{directory}: {files[step].name} and {path.name} are both of step {step}")
        files[step] = path
    if base_state is not None and not files:
        raise DeltaLogError(f"{directory}: holds no deltas_step_*.pt file, expected at least one with {base_state}")
    if base_state is not None and not base.is_file():
        raise DeltaLogError(f"{base}: file not found, expected the base state of {directory}")
    if not base.is_file():
        found = f"holds {pt_file_name(min(files))} but no {base.name}" if files else f"holds no {base.name}"
        raise DeltaLogError(f"{directory}: {found}, expected the base state of a log of .pt files")
    return {0: base} | dict(sorted(files.items()))


def map_tensors(path: Path, where: str) -> dict[str, Tensor]:
    """Map the tensors of a file into memory, by name. Only the checksum of the pickle is compared.

    The tensors change with the file: see `file_version`.

    Raises:
        DeltaLogError: the file is missing or damaged, or has other content; `where` names it.
    """
    with _reading(where):
        check_pt(path, pickle_only=True)
        content = load_pt(path, mmap=True)
    if not isinstance(content, Mapping):
        raise DeltaLogError(f"{where}: holds a {type(content).__name__}, expected a dictionary of tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise DeltaLogError(f"{where}: entry {name!r} is {type(value).__name__}, expected tensors by name")
        # A tensor with strides of 0 can have any size, which would be allocated.
        if value.layout == torch.strided and value.nbytes > path.stat().st_size:
            raise DeltaLogError(
                f"{where}: {name} is {dtype_name(value)} {list(value.shape)}, more than the file has bytes for"
            )
    return {name: _aligned(tensor.detach()) for name, tensor in content.items()}


def _aligned(tensor: Tensor) -> Tensor:
    """Return the mapped tensor, or a copy if it is unaligned (not as torch.save writes it) or lazily negated."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return tensor
    unaligned = tensor.numel() > 0 and tensor.data_ptr() % tensor.element_size() != 0
    return materialized(tensor) if unaligned or tensor.is_neg() or tensor.is_conj() else tensor


def file_version(path: Path, where: str) -> tuple[int, ...]:
    """Return a value that changes when the file is replaced or written to. Raises DeltaLogError if it is missing."""
    with _reading(where):
        found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def require_checksums(path: Path, where: str) -> None:
    """Compare the checksums of all records, which torch.load does not do. Reads the whole file.

    Raises:
        DeltaLogError: the file is missing, damaged, or without checksums.
    """
    with _reading(where):
        check_pt(path)


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DeltaLogError(f"{where}: the file is missing") from error
    except (OSError, DamagedFile) as error:
        raise DeltaLogError(f"{where}: damaged: {one_line(error)}") from error
