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
from .words import CLASSES, WordKind


def patch_sample(
    old: Sequence[Tensor], new: Sequence[Tensor], is_float: bool, class_shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts of `tables.Sample`, on the CPU: seen, changed int64 [tensors, 256], symbols int64 [256, S]."""
    found = reference.sample(_words(old), _words(new), WordKind(new[0].element_size(), is_float, class_shift))
    return torch.from_numpy(found.seen), torch.from_numpy(found.changed), torch.from_numpy(found.symbols)


def patch_encode(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    is_float: bool,
    class_shift: int,
    row_of: Tensor,
    rows: Tensor,
    class_table: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode: sizes uint32 [tiles], records uint8; and int64 [tensors] on the CPU, the number of changes of each."""
    kind, device = WordKind(new[0].element_size(), is_float, class_shift), new[0].device
    a, b = _words(old), _words(new)
    sizes, records = reference.encode_tiles(a, b, kind, _tables(row_of, rows, class_table, values))
    counts = torch.tensor([int((x != y).sum()) for x, y in zip(a, b, strict=True)], dtype=torch.int64, device="cpu")
    stored = torch.from_numpy(np.frombuffer(records, np.uint8).copy())
    return torch.from_numpy(sizes).to(device), stored.to(device), counts


def patch_apply_(
    dense: Sequence[Tensor],
    sizes: Tensor,
    offsets: Tensor,
    records: Tensor,
    is_float: bool,
    class_shift: int,
    row_of: Tensor,
    rows: Tensor,
    class_table: Tensor,
    values: Tensor,
) -> Tensor:
    """Decode in place; return int64 [1], the first damaged tile, or the number of tiles if none is."""
    kind = WordKind(dense[0].element_size(), is_float, class_shift)
    words = [array.copy() for array in _words(dense)]
    tables, bad = _tables(row_of, rows, class_table, values), len(sizes)
    try:
        reference.apply_tiles(words, sizes.cpu().numpy(), records.cpu().numpy(), kind, tables)
    except DamagedTile as damage:
        bad = damage.tile
    for tensor, array in zip(dense, words, strict=True):
        bits = as_bits(tensor)
        bits.copy_(torch.from_numpy(array).view(bits.dtype))
    return torch.tensor([bad], dtype=torch.int64, device=dense[0].device)


def _words(tensors: Sequence[Tensor]) -> list[Array]:
    return [as_bits(tensor).cpu().numpy().view(WORD[tensor.element_size()]) for tensor in tensors]


def _tables(row_of: Tensor, rows: Tensor, class_table: Tensor, values: Tensor) -> Tables:
    return Tables(
        row_of.cpu().numpy(),
        rows.cpu().numpy(),
        class_table.cpu().numpy(),
        values.cpu().numpy(),
        present=np.ones((len(rows), CLASSES), bool),
    )
