"""Patch codec: encodes the changed bits between two lists of tensors compactly and exactly, on the tensors' device.

docs/formats.md specifies every level byte by byte, and `reference` implements them in numpy. All backends write the
same bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...backends import why_unavailable
from ...errors import BackendUnavailable, memory_errors
from ...tensors import as_bits
from . import torch_reference
from .patch import Patch as Patch
from .patch import PatchError as PatchError
from .reference import WORD
from .tables import Sample, Tables, best_width, make_tables
from .words import LEVELS as LEVELS
from .words import WordKind, first_tiles, word_kind

Backend = Literal["native", "reference"]

_LEVEL_NUMBER = {level: number for number, level in enumerate(LEVELS)}


def encode(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    level: str,
    *,
    advance: bool = False,
    meanwhile: Callable[[], object] | None = None,
    backend: Backend | None = None,
) -> Patch:
    """Encode the patch that turns the bits of `old` into those of `new`.

    Runs on the tensors' device. The host synchronizes twice: for a sample, and for the length of the records.

    Args:
        old, new: equally many contiguous tensors, at least one each, on one device, of one dtype of 1, 2, 4 or 8 bytes;
            new[i] has as many elements as old[i].
        level: `packed` or `tight`.
        advance: also copy the bits of `new` to `old`. After an error the contents of `old` are undefined.
        meanwhile: called while the host waits for the sample on a GPU; on the CPU, called first.
        backend: `native` (C++ and CUDA) or `reference` (numpy). None uses `native`, or warns once and uses `reference`.

    Raises:
        ValueError: an unknown level, or tensors that do not match (names the first one).
        BackendUnavailable: the named backend cannot run.
    """
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}, expected {' or '.join(LEVELS)}")
    _check_tensors(old, new)
    old, new = list(old), list(new)
    dtype, numels = new[0].dtype, tuple(tensor.numel() for tensor in new)
    kind = word_kind(dtype)
    run = _implementation(new[0].device, backend)
    width, tables = 0, None
    if new[0].device.type != "cuda" and meanwhile is not None:
        meanwhile()
    # `packed` only needs the counts of symbols, so that one class is enough.
    class_shift = kind.class_shift if level == "tight" else kind.bits
    sample = _sample(run, old, new, WordKind(kind.size, kind.is_float, class_shift), meanwhile)
    if level == "packed":
        width = best_width(sample.symbols, kind.bits)
    else:
        tables = make_tables(sample, numels, kind)
    # A lane of `tight` reads the old words again after coding them, so they cannot be overwritten on the way.
    at_once = advance and level != "tight"
    with memory_errors():
        heads, sizes, records, counts = run.patch_encode(
            old,
            new,
            _LEVEL_NUMBER[level],
            kind.is_float,
            kind.class_shift,
            width,
            *_on_device(tables, new[0].device),
            at_once,
        )
    moved = [i for i, count in enumerate(counts.tolist()) if count]
    if advance and not at_once and moved:
        torch._foreach_copy_([as_bits(old[i]) for i in moved], [as_bits(new[i]) for i in moved])
    return Patch(level, dtype, numels, counts, None if level == "tight" else heads, sizes, records, width, tables)


def _sample(
    run: Any, old: list[Tensor], new: list[Tensor], kind: WordKind, meanwhile: Callable[[], object] | None
) -> Sample:
    with memory_errors():
        parts = run.patch_sample(old, new, kind.is_float, kind.class_shift)
    if new[0].device.type == "cuda":
        with torch.cuda.device(new[0].device):
            arrived = torch.cuda.Event()
            arrived.record()
            if meanwhile is not None:
                meanwhile()
        arrived.synchronize()
    return Sample(*(part.numpy() for part in parts))


def apply_(dense: Sequence[Tensor], patch: Patch, *, backend: Backend | None = None, check: bool = True) -> None:
    """Apply a patch in place to tensors that have the bits of its `old`; they then have the bits of its `new`.

    Even a damaged patch writes only to the tensors, whose contents are then undefined.

    Args:
        dense: contiguous tensors on one device, with the patch's dtype and sizes; the patch may be on another device.
        backend: as in `encode`.
        check: synchronize to check that all records were valid. False is for a patch that was just encoded.

    Raises:
        PatchError: a record is damaged, or a tensor does not have the patch's dtype and size (names the first one).
        BackendUnavailable: the named backend cannot run.
    """
    if len(dense) != len(patch.numels):
        raise PatchError(f"dense holds {len(dense)} tensors, expected {len(patch.numels)}")
    for i, (tensor, numel) in enumerate(zip(dense, patch.numels, strict=True)):
        if (tensor.dtype, tensor.numel()) != (patch.dtype, numel):
            found, expected = f"{tensor.dtype} of {tensor.numel()} elements", f"{patch.dtype} of {numel}"
            raise PatchError(f"dense[{i}] is {found}, expected {expected}")
    if not dense:
        return
    device, kind = dense[0].device, word_kind(patch.dtype)
    run = _implementation(device, backend)
    dense = list(dense)
    heads = None if patch.heads is None else patch.heads.to(device)
    sizes, records = patch.sizes.to(device), patch.records.to(device)
    bad = run.patch_apply_(
        dense,
        heads,
        sizes,
        patch.offsets().to(device),
        records,
        _LEVEL_NUMBER[patch.level],
        kind.is_float,
        kind.class_shift,
        patch.width,
        *_on_device(patch.tables, device),
    )
    if check and int(bad) < len(sizes):
        firsts = first_tiles(patch.numels, patch.level)
        place = int(np.searchsorted(firsts, int(bad), side="right")) - 1
        raise PatchError(f"tile {int(bad) - firsts[place]} of tensor {place} is damaged")


def _implementation(device: torch.device, backend: Backend | None) -> ModuleType | Any:
    if backend not in (None, "native", "reference"):
        raise ValueError(f"backend is {backend!r}, expected native, reference or None")
    if backend == "reference":
        return torch_reference
    cause = why_unavailable(device.type if device.type in ("cpu", "cuda") else "cpu", device)
    if not cause:
        return torch.ops.sparse_opt_native
    if backend == "native":
        raise BackendUnavailable(f"patches cannot be coded natively: {cause}")
    _warn_slow(device.type, cause)
    return torch_reference


@cache
def _warn_slow(device_type: str, cause: str) -> None:
    warnings.warn(f"sparse_opt codes patches of {device_type} tensors in numpy, which is slow: {cause}", stacklevel=5)


def _check_tensors(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    if not new or len(old) != len(new):
        raise ValueError(f"old holds {len(old)} tensors and new {len(new)}, expected equally many, at least one")
    if new[0].element_size() not in WORD:
        raise ValueError(f"new[0] is {new[0].dtype}, of {new[0].element_size()} bytes, expected 1, 2, 4 or 8")
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        for name, tensor in (("old", a), ("new", b)):
            if (tensor.dtype, tensor.device) != (new[0].dtype, new[0].device):
                raise ValueError(
                    f"{name}[{i}] is {tensor.dtype} on {tensor.device}, new[0] is {new[0].dtype} on {new[0].device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name}[{i}] has strides {tensor.stride()}, expected contiguous")
        if a.numel() != b.numel():
            raise ValueError(f"old[{i}] has {a.numel()} elements, new[{i}] has {b.numel()}")


def _on_device(tables: Tables | None, device: torch.device) -> tuple[Tensor | None, ...]:
    """Return row_of, rows, class_table and values on the device, in the order of the native ops' arguments."""
    if tables is None:
        return None, None, None, None
    arrays = (tables.row_of, tables.rows, tables.class_table, tables.values)
    return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
