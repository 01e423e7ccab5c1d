"""Adapts `reference` to the names and signatures of the native ops, for tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...tensors import as_bits
from . import reference
from .reference import WORD, DamagedTile
from .tables import Array, Tables
from .words import CLASSES, LEVELS, WordKind


def patch_sample(
    old: Sequence[Tensor], new: Sequence[Tensor], is_float: bool, class_shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts of `tables.Sample`, on the CPU: seen, changed int64 [tensors, 256], symbols int64 [256, S]."""
    found = reference.sample(_words(old), _words(new), WordKind(new[0].element_size(), is_float, class_shift))
    return torch.from_numpy(found.seen), torch.from_numpy(found.changed), torch.from_numpy(found.symbols)


def patch_encode(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    level: int,
    is_float: bool,
    class_shift: int,
    width: int,
    row_of: Tensor | None,
    rows: Tensor | None,
    class_table: Tensor | None,
    values: Tensor | None,
    advance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encode: heads uint16 [tiles], empty at `tight`; sizes uint16 or uint32 [tiles]; records uint8; counts int64."""
    kind = WordKind(new[0].element_size(), is_float, class_shift)
    a, b = _words(old), _words(new)
    tables = _tables(row_of, rows, class_table, values)
    heads, sizes, records = reference.encode_tiles(a, b, LEVELS[level], kind, width, tables)
    counts = torch.tensor([int((x != y).sum()) for x, y in zip(a, b, strict=True)], dtype=torch.int64, device="cpu")
    if advance:
        for target, source in zip(old, new, strict=True):
            as_bits(target).copy_(as_bits(source))
    device = new[0].device
    return (
        torch.from_numpy(heads).to(device),
        torch.from_numpy(sizes if LEVELS[level] == "tight" else sizes.astype(np.uint16)).to(device),
        torch.frombuffer(bytearray(records), dtype=torch.uint8).to(device)
        if records
        else torch.empty(0, dtype=torch.uint8, device=device),
        counts,
    )


def patch_apply_(
    dense: Sequence[Tensor],
    heads: Tensor | None,
    sizes: Tensor,
    offsets: Tensor,
    records: Tensor,
    level: int,
    is_float: bool,
    class_shift: int,
    width: int,
    row_of: Tensor | None,
    rows: Tensor | None,
    class_table: Tensor | None,
    values: Tensor | None,
) -> Tensor:
    """Decode in place; return int64 [1], the first damaged tile, or the number of tiles if none is."""
    kind = WordKind(dense[0].element_size(), is_float, class_shift)
    words = [array.copy() for array in _words(dense)]
    bad = len(sizes)
    try:
        reference.apply_tiles(
            words,
            np.empty(0, np.uint16) if heads is None else heads.cpu().numpy(),
            sizes.cpu().numpy(),
            records.cpu().numpy(),
            LEVELS[level],
            kind,
            width,
            _tables(row_of, rows, class_table, values),
        )
    except DamagedTile as damage:
        bad = damage.tile
    for tensor, array in zip(dense, words, strict=True):
        bits = as_bits(tensor)
        bits.copy_(torch.from_numpy(array).view(bits.dtype))
    return torch.tensor([bad], dtype=torch.int64, device=dense[0].device)


def _words(tensors: Sequence[Tensor]) -> list[Array]:
    return [as_bits(tensor).cpu().numpy().view(WORD[tensor.element_size()]) for tensor in tensors]


def _tables(
    row_of: Tensor | None, rows: Tensor | None, class_table: Tensor | None, values: Tensor | None
) -> Tables | None:
    if row_of is None or rows is None or class_table is None or values is None:
        return None
    return Tables(
        row_of.cpu().numpy(),
        rows.cpu().numpy(),
        class_table.cpu().numpy(),
        values.cpu().numpy(),
        present=np.ones((len(rows), CLASSES), bool),
    )
