"""Patch codec: encodes the changed bits between two lists of tensors compactly and exactly, on the tensors' device.

docs/formats.md specifies a patch byte by byte, and `reference` implements it in numpy. All backends write the
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
from .tables import Sample, Tables, make_tables
from .words import WordKind, first_tiles, word_kind

Backend = Literal["native", "reference"]

# With fewer words than this, the tables of a sample may take more bytes than they save.
_SMALL = 2**18


def encode(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    *,
    tables: Tables | None = None,
    advance: bool = False,
    meanwhile: Callable[[], object] | None = None,
    backend: Backend | None = None,
) -> Patch:
    """Encode the patch that turns the bits of `old` into those of `new`.

    Runs on the tensors' device. The host synchronizes twice: for a sample, and for the length of the records.

    Args:
        old, new: equally many contiguous tensors, at least one each, on one device, of one dtype of 1, 2, 4 or 8 bytes;
            new[i] has as many elements as old[i].
        tables: frequencies of the changes. None takes `sampled_tables` or, of few words, the uniform ones if the patch
            is smaller with these.
        advance: also copy the bits of `new` to `old`. After an error the contents of `old` are undefined.
        meanwhile: called while the host waits for the sample on a GPU; on the CPU, called first.
        backend: `native` (C++ and CUDA) or `reference` (numpy). None uses `native`, or warns once and uses `reference`.

    Raises:
        ValueError: tensors that do not match (names the first one).
        BackendUnavailable: the named backend cannot run.
    """
    _check_tensors(old, new)
    old, new = list(old), list(new)
    run, kind = _implementation(new[0].device, backend), word_kind(new[0].dtype)
    if tables is not None:
        choices = [tables]
    else:
        choices = [sampled_tables(old, new, meanwhile=meanwhile, backend=backend)]
        if sum(tensor.numel() for tensor in new) < _SMALL:
            choices.append(Tables.uniform(len(new), kind))
    patch = min((_encoded(run, old, new, kind, choice) for choice in choices), key=lambda patch: patch.nbytes)
    # Not while encoding, which reads the old words again after coding them.
    moved = [i for i, count in enumerate(patch.counts.tolist()) if count]
    if advance and moved:
        torch._foreach_copy_([as_bits(old[i]) for i in moved], [as_bits(new[i]) for i in moved])
    return patch


def sampled_tables(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    *,
    meanwhile: Callable[[], object] | None = None,
    backend: Backend | None = None,
) -> Tables:
    """Estimate the frequencies of changes from a sample; a patch stores them in 0.4 to 8 KB. Arguments as `encode`."""
    device, kind, numels = new[0].device, word_kind(new[0].dtype), [tensor.numel() for tensor in new]
    if device.type != "cuda" and meanwhile is not None:
        meanwhile()
    with memory_errors():
        run = _implementation(device, backend)
        parts = run.patch_sample(list(old), list(new), kind.is_float, kind.class_shift)
    if device.type == "cuda":
        with torch.cuda.device(device):
            arrived = torch.cuda.Event()
            arrived.record()
            if meanwhile is not None:
                meanwhile()
        arrived.synchronize()
    return make_tables(Sample(*(part.numpy() for part in parts)), numels, kind)


def _encoded(run: Any, old: list[Tensor], new: list[Tensor], kind: WordKind, tables: Tables) -> Patch:
    arguments = _on_device(tables, new[0].device)
    with memory_errors():
        sizes, records, counts = run.patch_encode(old, new, kind.is_float, kind.class_shift, *arguments)
    return Patch(new[0].dtype, tuple(tensor.numel() for tensor in new), counts, sizes, records, tables)


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
    sizes = patch.sizes.to(device)
    bad = run.patch_apply_(
        dense,
        sizes,
        patch.offsets().to(device),
        patch.records.to(device),
        kind.is_float,
        kind.class_shift,
        *_on_device(patch.tables, device),
    )
    if check and int(bad) < len(sizes):
        firsts = first_tiles(patch.numels)
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


def _on_device(tables: Tables, device: torch.device) -> tuple[Tensor, ...]:
    """Return row_of, rows, class_table and values on the device, in the order of the native ops' arguments."""
    arrays = (tables.row_of, tables.rows, tables.class_table, tables.values)
    return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
