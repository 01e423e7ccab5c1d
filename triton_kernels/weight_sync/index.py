"""Reads and writes active elements at their places in many tensors.

Every program of an `IndexTable` works on slots of one block and one tensor, one per lane (`values` defines slots and
blocks).

Bytes per active element, with b those of an element and i those of the index (2 for elements, 2 / W for runs of W, 0
for tiles): take reads i and the 64-byte granules that have an active element, and writes b; put reads i + b and the
granules, and writes those whose bits change.

A program looks for its destinations in a loop, except in tables whose tensors have at most one (`single`). If all are
stored whole (`plain`) it compares no rows and columns, which is faster for tiles, and slower for elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .values import BLOCK, TILE_BLOCK, UNSIGNED, as_integers, marks_of

TENSOR_COLUMNS = tl.constexpr(6)
PART_COLUMNS = tl.constexpr(8)


class IndexTable(NamedTuple):
    """Where the active elements of tensors of one dtype are. Tensors without a comment on their dtype are int64."""

    # Elements and runs: [programs, 3] first slot, first unit, tensor << 32 | slots; the units of a program are `units`
    # plus the first one. Tiles: [programs] block << 32 | band.
    programs: Tensor
    # [tensors, 6]: columns; first slot; place of the first unit in `units`; places in `parts` of the first destination,
    # the end of those to read from, and the end of those to write to
    tensors: Tensor
    # Elements and runs: int16, as unsigned. Tiles: int32, the column of each tile in its band, in tiles.
    units: Tensor
    # Tiles only, [bands + 1, 3]: first slot; first row << 32 | active columns; place of the first tile in `units` << 32
    # | tensor. The last row has the number of slots.
    bands: Tensor | None
    # [destinations, 8]: address, rows r0, r1, columns c0, c1, strides of rows and columns in elements, and 1 if element
    # p of the tensor is at address + p
    parts: Tensor
    run: int  # elements of a unit
    tile: int  # height of a tile; 0 for elements and runs
    wide: bool  # offsets in a program's rows exceed int32
    element_size: int  # bytes
    single: bool  # no tensor has more than one destination
    plain: bool  # each tensor has one, with element p at its address + p

    @property
    def grid(self) -> tuple[int]:
        return (self.programs.shape[0],)

    @property
    def block(self) -> int:
        return TILE_BLOCK if self.tile else BLOCK

    def constants(self) -> dict[str, int | bool]:
        return {"BLOCK": self.block, "RUN": self.run, "TILE": self.tile, "WIDE": self.wide}

    def options(self) -> dict[str, int | bool]:
        """Constants and launch options of the kernels that read and write all elements, as measured on an H200."""
        plain = self.plain and self.tile > 0
        n_warps = 4 if not self.single or (self.tile and not plain) else 8 if self.tile else 16
        return {**self.constants(), "SINGLE": self.single, "PLAIN": plain, "num_warps": n_warps}


@triton.jit
def located(
    programs,
    tensors,
    units,
    bands,
    bitmap,
    bits,
    MARKED: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(block, slots, mask, marks, row of the tensor's table, start, offset) of this program; four are [BLOCK].

    The slots' positions in the flattened tensor are start + offset; start is at the beginning of a row, or in it. With
    MARKED, `mask` has only the slots that the bitmap marks, and `marks` the bits (0 or 1) of the whole block; otherwise
    `marks` is 0.
    """
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if TILE == 0:
        begin = tl.load(programs + 3 * program)
        base = tl.load(programs + 3 * program + 1)
        packed = tl.load(programs + 3 * program + 2)
        block = begin // BLOCK
        slots = block * BLOCK + lane
        mask = (slots >= begin) & (slots < begin + (packed & 0xFFFFFFFF))
        marks = tl.zeros((BLOCK,), dtype=tl.int32)
        if MARKED:
            marks = marks_of(bitmap, block, bits, BLOCK)
            mask = mask & (marks != 0)
        at = tensors + (packed >> 32) * TENSOR_COLUMNS
        slot = slots - tl.load(at + 1)
        unit = tl.load(units + tl.load(at + 2) + slot // RUN, mask=mask, other=0, eviction_policy="evict_first")
        offset = (unit.to(tl.int32) & 0xFFFF) * RUN + (slot % RUN).to(tl.int32)
        start = base * RUN
        if WIDE:
            offset = offset.to(tl.int64)
    else:
        packed = tl.load(programs + program)
        block = packed >> 32
        band = bands + 3 * (packed & 0xFFFFFFFF)
        first = tl.load(band)
        slots = block * BLOCK + lane
        mask = (slots >= first) & (slots < tl.load(band + 3))
        marks = tl.zeros((BLOCK,), dtype=tl.int32)
        if MARKED:
            marks = marks_of(bitmap, block, bits, BLOCK)
            mask = mask & (marks != 0)
        shape = tl.load(band + 1)
        width = shape & 0xFFFFFFFF
        places = tl.load(band + 2)
        at = tensors + (places & 0xFFFFFFFF) * TENSOR_COLUMNS
        columns = tl.load(at)
        slot = slots - first
        if not WIDE:
            slot = slot.to(tl.uint32)
            width = width.to(tl.uint32)
            columns = columns.to(tl.int32)
        row = slot // width
        column = slot - row * width
        tile = tl.load(units + (places >> 32) + column // TILE, mask=mask, other=0)
        offset = row.to(columns.dtype) * columns + tile.to(columns.dtype) * TILE + (column % TILE).to(columns.dtype)
        start = (shape >> 32) * tl.load(at)
    return block, slots, mask, marks, at, start, offset


@triton.jit
def addresses_of(part, columns, start, offset, mask, BITS: tl.constexpr, WIDE: tl.constexpr):
    """(pointers, mask) of the elements in a destination, whose row in the table `part` points to."""
    memory = tl.load(part).to(tl.pointer_type(BITS))
    if tl.load(part + 7) != 0:
        at = memory + start + offset
        inside = mask
    else:
        first_row = start // columns
        column = start - first_row * columns + offset
        if WIDE:
            carry = column // columns
        else:
            carry = (column.to(tl.uint32) // columns.to(tl.uint32)).to(tl.int64)
        row = first_row + carry
        column = column - carry * columns
        r0 = tl.load(part + 1)
        c0 = tl.load(part + 3)
        inside = mask & (row >= r0) & (row < tl.load(part + 2)) & (column >= c0) & (column < tl.load(part + 4))
        at = memory + (row - r0) * tl.load(part + 5) + (column - c0) * tl.load(part + 6)
    return at, inside


@triton.jit
def _weight_take_kernel(
    programs,
    tensors,
    units,
    bands,
    parts,
    out,  # [slots] bits
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    SINGLE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    _, slots, mask, _, at, start, offset = located(
        programs, tensors, units, bands, None, 0, False, BLOCK, RUN, TILE, WIDE
    )
    value = tl.zeros((BLOCK,), dtype=BITS)
    part = tl.load(at + 3)
    if PLAIN:
        memory = tl.load(parts + part * PART_COLUMNS).to(tl.pointer_type(BITS)) + start
        value = tl.load(memory + offset, mask=mask, other=0)
    elif SINGLE:
        if part < tl.load(at + 4):
            columns = tl.load(at)
            pointers, inside = addresses_of(parts + part * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
            value = tl.load(pointers, mask=inside, other=0)
    else:
        columns = tl.load(at)
        for i in range(part, tl.load(at + 4)):
            pointers, inside = addresses_of(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
            value = tl.where(inside, tl.load(pointers, mask=inside, other=0), value)
    tl.store(out + slots, value.to(out.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit
def _replace(pointers, inside, value):
    # Few of the values of an update differ. The write of a part of a sector would read it, too.
    held = tl.load(pointers, mask=inside, other=0)
    tl.store(pointers, value, mask=inside & (held != value))


@triton.jit
def _weight_put_kernel(
    programs,
    tensors,
    units,
    bands,
    parts,
    values,  # [slots] bits
    valid,  # [1] uint8, or None: 0 writes nothing
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    SINGLE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    _, slots, mask, _, at, start, offset = located(
        programs, tensors, units, bands, None, 0, False, BLOCK, RUN, TILE, WIDE
    )
    if valid is not None:
        mask = mask & (tl.load(valid) != 0)
    value = tl.load(values + slots, mask=mask, other=0, eviction_policy="evict_first").to(BITS, bitcast=True)
    part = tl.load(at + 3)
    if PLAIN:
        memory = tl.load(parts + part * PART_COLUMNS).to(tl.pointer_type(BITS)) + start
        _replace(memory + offset, mask, value)
    elif SINGLE:
        if part < tl.load(at + 5):
            columns = tl.load(at)
            pointers, inside = addresses_of(parts + part * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
            _replace(pointers, inside, value)
    else:
        columns = tl.load(at)
        for i in range(part, tl.load(at + 5)):
            pointers, inside = addresses_of(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
            _replace(pointers, inside, value)


def take(table: IndexTable, out: Tensor) -> None:
    """Write the active values to their slots in `out`; 0 for elements without a destination. One launch."""
    with torch.cuda.device_of(out):
        _weight_take_kernel[table.grid](
            *table[:5], as_integers(out), BITS=UNSIGNED[out.element_size()], **table.options()
        )


def put(table: IndexTable, values: Tensor, valid: Tensor | None = None) -> None:
    """Write the values [slots] to all their destinations, or nothing if `valid`, [1] bool, is False. One launch."""
    with torch.cuda.device_of(values):
        _weight_put_kernel[table.grid](
            *table[:5],
            as_integers(values),
            None if valid is None else valid.view(torch.uint8),
            BITS=UNSIGNED[values.element_size()],
            **table.options(),
        )
