"""Reads safetensors files into newly allocated memory, without mapping them.

`safetensors.safe_open` maps a file into memory: its tensors change when the file is rewritten, may be unaligned, and
reading them kills the process if the file was truncated. This module reads each byte once, into aligned memory, so that
data does not change after the caller has checked it.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import DamagedFile

_MAX_HEADER = 100_000_000  # bytes, as the safetensors package limits it
_MAX_DIMENSIONS = 64
# Dtypes by the names of the format, which has none for torch's complex32 and bits8 to bits16. Types of less than a byte
# are left out.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's entry in the header: dtype, shape, and begin and end in bytes of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class TensorFile:
    """A safetensors file open for reading, as returned by `open_tensors`.

    Attributes:
        metadata: the strings under `__metadata__` in its header.
        entries: name -> entry, in the order of the tensors' bytes.
    """

    def __init__(self, descriptor: int, metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
        self._descriptor, self.entries = descriptor, dict(entries)
        self.metadata = dict(metadata)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the order of their bytes."""
        return tuple(self.entries)

    def read(self, name: str, memory: Tensor | None = None) -> Tensor:
        """Read a tensor into new memory on the CPU, or into the first bytes of `memory`, uint8 [n].

        Raises DamagedFile if the file has been truncated, OSError if it is unreadable.
        """
        entry = self.entries[name]
        return self._elements(entry, 0, entry.numel, memory).view(entry.shape)

    def read_range(self, name: str, begin: int, end: int) -> Tensor:
        """Read the elements [begin, end) of a tensor in row-major order: [end - begin]. Errors as in `read`."""
        entry = self.entries[name]
        if not 0 <= begin <= end <= entry.numel:
            raise ValueError(f"elements [{begin}, {end}) of {name}, expected a range within [0, {entry.numel})")
        return self._elements(entry, begin, end)

    def _elements(self, entry: TensorEntry, begin: int, end: int, memory: Tensor | None = None) -> Tensor:
        size = entry.dtype.itemsize
        length = (end - begin) * size
        data = torch.empty(length, dtype=torch.uint8, device="cpu") if memory is None else memory[:length]
        _read_into(self._descriptor, data.numpy().data, entry.begin + begin * size)
        return data.view(entry.dtype)


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file and read its header.

    Raises:
        DamagedFile: the header is invalid, or does not fit the file's size.
        OSError: the file is missing or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield TensorFile(descriptor, *_read_header(descriptor))
    finally:
        os.close(descriptor)


def _read_header(descriptor: int) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    size = os.fstat(descriptor).st_size
    if size < 8:
        raise DamagedFile(f"it has {size} bytes, expected 8 or more")
    length = int.from_bytes(_read_bytes(descriptor, 8, 0), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise DamagedFile(f"its header has {length} bytes, expected at most {min(size - 8, _MAX_HEADER)}")
    try:
        header = json.loads(_read_bytes(descriptor, length, 8))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise DamagedFile(f"its header is a {type(header).__name__}, expected a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFile("its metadata are invalid, expected strings by name")
    entries = {name: _entry(name, fields, 8 + length) for name, fields in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = 8 + length
    for name, entry in entries.items():
        if entry.begin != at:
            raise DamagedFile(f"{name} begins at byte {entry.begin}, expected {at}")
        at = entry.end
    if at != size:
        raise DamagedFile(f"its tensors end at byte {at}, expected {size}, the end of the file")
    return metadata, entries


def _entry(name: str, fields: Any, start: int) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise DamagedFile(f"the header entry of {name} is not dtype, shape and data_offsets")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise DamagedFile(f"{name} has an invalid shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise DamagedFile(f"{name} has invalid data_offsets, expected two numbers of bytes")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise DamagedFile(f"{name} has the dtype {fields['dtype']!r}, expected one of {', '.join(DTYPES)}")
    entry = TensorEntry(dtype, tuple(shape), start + offsets[0], start + offsets[1])
    if entry.nbytes != entry.numel * dtype.itemsize:
        raise DamagedFile(f"{name} has {entry.nbytes} bytes, expected {fields['dtype']} {shape}")
    return entry


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)


def _read_bytes(descriptor: int, length: int, at: int) -> bytearray:
    data = bytearray(length)
    _read_into(descriptor, memoryview(data), at)
    return data


def _read_into(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        count = os.preadv(descriptor, [data[done:]], at + done)
        if count == 0:
            raise DamagedFile(f"it ends at byte {at + done}, expected {at + len(data)} or more")
        done += count
