"""The active elements of one dtype as tables for the Triton kernels of weight_sync.

They take 2 bytes for an element of an element mask, 2 for a run, and 4 for a tile, and for each program of 1024 or 2048
slots 24 or 8 bytes; bands of tiles have 24 bytes each. A run mask's tensor is stored by elements if its rows, or the
tensors of its dtype before it, end with a part of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..errors import ForeignMessage
from ..masks.patterns import PATTERNS, expand_units, unit_grid, unit_rows
from .destinations import Placed, PlacedTensor
from .encoding import Group, Layout, bitmap_bytes

Table = Any  # triton_kernels.weight_sync.IndexTable
_REACH = 2**16  # units of a program are less than this apart
_INT32_END = 2**31


class TritonIndex:
    """`index.ReferenceIndex` with Triton kernels; arguments as there."""

    def __init__(
        self,
        group: Group,
        layout: Layout,
        units: Mapping[str, Tensor],
        placed: Mapping[str, PlacedTensor],
        device: torch.device,
    ) -> None:
        self._group, self._device = group, device
        names, pattern = layout.names(group), layout.pattern
        tensors = [placed[name] for name in names]
        # The tables have addresses; these keep the memory alive.
        self._memory = [part.tensor for tensor in tensors for part in tensor.destinations]
        by_run: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_run.setdefault(_unit_length(tensor, group.starts[i], pattern), []).append(i)
        given = [units[name] for name in names]
        self._tables = [
            _tiled(group, tensors, given, pattern, device)
            if PATTERNS[pattern][0] > 1
            else _listed(group, tensors, given, members, run, pattern, device)
            for run, members in by_run.items()
        ]

    def nbytes(self) -> dict[str, int]:
        found = {"positions": 0, "tables": 0}
        for table in self._tables:
            found["positions"] += table.units.nbytes
            others = (table.programs, table.tensors, table.parts, table.bands)
            found["tables"] += sum(t.nbytes for t in others if t is not None)
        return found

    def warm_up(self, *, read_old: bool) -> None:
        # Launches without a program, of tables and tensors that begin at 16 bytes or do not as in a message: no other
        # property of an argument makes Triton compile a kernel again.
        kernels, first = _kernels(), self._group.first
        values = torch.empty(0, dtype=self._group.torch_dtype, device=self._device)
        bitmap = torch.zeros(bitmap_bytes(self._group.nnz), dtype=torch.uint8, device=self._device)
        valid = torch.zeros(1, dtype=torch.bool, device=self._device)
        ranks = kernels.ranks_of(bitmap, self._tables[0].block)
        listed = torch.zeros(2, 2, dtype=torch.int64, device=self._device)
        single = all(table.single for table in self._tables)
        kernels.digest_sum(values, first)
        for table in self._tables:
            nothing = table._replace(programs=table.programs[:0])
            kernels.take(nothing, values)
            kernels.put(nothing, values)
            kernels.put(nothing, values, valid)
            kernels.check(nothing, bitmap, values, ranks, first, read_old=read_old)
            kernels.write(nothing, bitmap, values, ranks)
            if single:
                kernels.list_changes(nothing, bitmap, ranks, *listed)
        if single:
            kernels.listed_sums(values, *listed, ranks[-1:], first, read_old=read_old)
            kernels.listed_write(values, listed[1])

    def take(self) -> Tensor:
        out = torch.empty(self._group.nnz, dtype=self._group.torch_dtype, device=self._device)
        for table in self._tables:
            _kernels().take(table, out)
        return out

    def put(self, values: Tensor, valid: Tensor | None = None) -> None:
        for table in self._tables:
            _kernels().put(table, values, valid)

    def changes(self, bitmap: Tensor, capacity: int) -> TritonChanges:
        return TritonChanges(self._tables, self._group, bitmap, capacity)


class TritonChanges:
    """`index.ReferenceChanges` with Triton kernels.

    A list of the changed elements and their addresses is made first, if it takes no more memory than all values would:
    digests and writes then cost as much as the changed elements, and not as all of them.
    """

    def __init__(self, tables: Sequence[Table], group: Group, bitmap: Tensor, capacity: int) -> None:
        self._tables, self._group, self._bitmap = tables, group, bitmap
        self._ranks = _kernels().ranks_of(bitmap, tables[0].block)
        self._list = self._listed(capacity)

    def sums(self, changed: Tensor, *, read_old: bool) -> Tensor:
        kernels, first = _kernels(), self._group.first
        if self._list is not None:
            marked = self._ranks[-1:]
            sums: Tensor = kernels.listed_sums(changed, *self._list, marked, first, read_old=read_old)
            return sums
        arguments = (self._bitmap, changed, self._ranks, first)
        parts = [kernels.check(table, *arguments, read_old=read_old) for table in self._tables]
        return torch.cat([torch.stack(parts).sum(dim=0), self._ranks[-1:]])

    def write(self, changed: Tensor) -> None:
        kernels = _kernels()
        if self._list is not None:
            kernels.listed_write(changed, self._list[1])
            return
        for table in self._tables:
            kernels.write(table, self._bitmap, changed, self._ranks)

    def _listed(self, capacity: int) -> Tensor | None:
        """Return [2, capacity or more] int64, the slots and addresses of the changed elements; None for too many."""
        # Even, so that the addresses begin at 16 bytes: Triton would compile the kernels again for other ones.
        capacity = max(2, capacity + capacity % 2)
        if not all(table.single for table in self._tables):
            return None
        if 2 * 8 * capacity > self._group.nnz * self._group.torch_dtype.itemsize:
            return None
        listed = torch.zeros(2, capacity, dtype=torch.int64, device=self._bitmap.device)
        for table in self._tables:
            _kernels().list_changes(table, self._bitmap, self._ranks, *listed)
        return listed


def _kernels() -> Any:
    """Return triton_kernels.weight_sync; `index.choose` has checked that it can be imported."""
    module: Any = backends.triton_module()[0]
    return module.weight_sync


def _unit_length(tensor: PlacedTensor, start: int, pattern: str) -> int:
    """Return the elements of each unit in the table: 1 for tiles, and where runs are cut off or not aligned."""
    height, width = PATTERNS[pattern]
    whole = tensor.entry.matrix[1] % width == 0 and start % width == 0
    return width if height == 1 and whole else 1


def _listed(
    group: Group,
    tensors: Sequence[PlacedTensor],
    units: Sequence[Tensor],
    members: Sequence[int],
    run: int,
    pattern: str,
    device: torch.device,
) -> Table:
    """Build the table of elements or runs for some of the group's tensors."""
    programs, offsets, firsts = [], [], {}
    count = 0
    for i in members:
        numbers = units[i].to(device, torch.int64)
        if run == 1:
            numbers = expand_units(numbers, tensors[i].entry.shape, pattern)
        start = group.starts[i]
        slots = torch.arange(start, start + run * numbers.numel(), run, device=device)
        block = slots // _kernels().BLOCK
        # The first unit of each unit's block in this tensor; units begin at multiples of `run`, as blocks do.
        first_of_block = (block * _kernels().BLOCK - start).clamp(min=0) // run
        distance = numbers - numbers[first_of_block]
        reach = distance // _REACH
        is_first = torch.ones(numbers.numel(), dtype=torch.bool, device=device)
        is_first[1:] = (block[1:] != block[:-1]) | (reach[1:] != reach[:-1])
        begins = is_first.nonzero().view(-1)
        ends = torch.cat([begins[1:], begins.new_tensor([numbers.numel()])])
        base = numbers[begins] - distance[begins] % _REACH
        programs.append(torch.stack([slots[begins], base, (i << 32) | run * (ends - begins)], dim=1))
        offsets.append((distance % _REACH).to(torch.int32).to(torch.int16))
        firsts[i] = count
        count += numbers.numel()
    rows, parts = _tensor_rows(group, tensors, firsts, device)
    wide = any(tensors[i].entry.matrix[1] + _REACH * run >= _INT32_END for i in members)
    return _kernels().IndexTable(
        torch.cat(programs), rows, torch.cat(offsets), None, parts, run, 0, wide, *_kind(group, tensors)
    )


def _tiled(
    group: Group, tensors: Sequence[PlacedTensor], units: Sequence[Tensor], pattern: str, device: torch.device
) -> Table:
    """Build the table of a tile mask: its bands, which are the rows of tiles that have active ones."""
    tile = PATTERNS[pattern][0]
    bands, columns = [], []
    count, wide = 0, False
    for i, tensor in enumerate(tensors):
        rows_of, columns_of = tensor.entry.matrix
        if rows_of >= _INT32_END:
            raise ForeignMessage(f"{tensor.entry.name!r} has {rows_of} rows, expected fewer than 2**31 in a tile mask")
        across = unit_grid(tensor.entry.shape, pattern)[1]
        numbers = units[i].to(device, torch.int64)
        row, column = numbers // across, numbers % across
        band_row, tiles = torch.unique_consecutive(row, return_counts=True)
        ends = tiles.cumsum(0)
        cut = (column[ends - 1] == across - 1) * (across * tile - columns_of)
        width = tiles * tile - cut
        first_row, heights = unit_rows(band_row, tensor.entry.shape, pattern)
        elements = width * heights
        first = group.starts[i] + elements.cumsum(0) - elements
        bands.append(torch.stack([first, (first_row << 32) | width, (count + ends - tiles << 32) | i], dim=1))
        columns.append(column.to(torch.int32))
        count += numbers.numel()
        wide = wide or min(rows_of, tile) * columns_of >= _INT32_END
    last = torch.tensor([[group.nnz, 0, 0]], dtype=torch.int64, device=device)
    table = torch.cat([*bands, last])
    first_block, last_block = table[:-1, 0] // _kernels().TILE_BLOCK, (table[1:, 0] - 1) // _kernels().TILE_BLOCK
    blocks = last_block - first_block + 1
    band = torch.repeat_interleave(torch.arange(blocks.numel(), device=device), blocks)
    block = torch.arange(band.numel(), device=device) - (blocks.cumsum(0) - blocks)[band] + first_block[band]
    rows, parts = _tensor_rows(group, tensors, dict.fromkeys(range(len(tensors)), 0), device)
    return _kernels().IndexTable(
        (block << 32) | band, rows, torch.cat(columns), table, parts, 1, tile, wide, *_kind(group, tensors)
    )


def _kind(group: Group, tensors: Sequence[PlacedTensor]) -> tuple[int, bool, bool]:
    """Return `IndexTable.element_size`, `IndexTable.single` and `IndexTable.plain`."""
    single = all(len(tensor.destinations) <= 1 for tensor in tensors)
    plain = single and all(any(map(tensor.is_plain, tensor.destinations)) for tensor in tensors)
    return group.torch_dtype.itemsize, single, plain


def _tensor_rows(
    group: Group, tensors: Sequence[PlacedTensor], firsts: Mapping[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `IndexTable.tensors` and `IndexTable.parts`; tensors without an entry in `firsts` are in another table."""
    rows: list[list[int]] = []
    parts: list[list[int]] = []
    for i, tensor in enumerate(tensors):
        begin, primary = len(parts), len(parts) + len(tensor.primary)
        parts += [_part_row(tensor, part) for part in tensor.destinations]
        rows.append([tensor.entry.matrix[1], group.starts[i], firsts.get(i, 0), begin, primary, len(parts)])
    return (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(parts or [[0] * 8], dtype=torch.int64, device=device),
    )


def _part_row(tensor: PlacedTensor, part: Placed) -> list[int]:
    address, strides = part.tensor.data_ptr(), part.tensor.stride()
    return [address, part.r0, part.r1, part.c0, part.c1, *strides, int(tensor.is_plain(part))]
