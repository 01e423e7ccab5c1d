"""Reads, compares and writes the active elements of many tensors, in the order of `sparse_opt.weight_sync` messages.

A *slot* is the number of an active element within its dtype, and a *block* is BLOCK slots, from a multiple of BLOCK on.
Every program of an `IndexTable` works on slots of one block and one tensor, one per lane, so that the changed elements
before a slot are the sum over its block's bits before it, and a number per block (`ranks`).

Bytes per active element, with b those of an element and i those of the index (2 for elements, 2 / W for runs of W, 0
for tiles): take reads i and the 64-byte granules that have an active element, and writes b; put reads i + b and writes
the granules. compare reads 2 b and writes a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import BITS_DTYPE

# Slots of a program. Tile masks have a row in a table for each program, for which 1024 slots would take more bytes.
BLOCK, TILE_BLOCK = 1024, 2048
# Elements of a program that compares or mixes consecutive values.
VALUES = 2048
OPTIONS = {"num_warps": 4}

_UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
# `sparse_opt.weight_sync.digest`
_FACTOR_OF_NUMBER = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_OF_BITS = tl.constexpr(0xD1342543DE82EF95)
_OFFSET = tl.constexpr(0x2545F4914F6CDD1D)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)

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

    @property
    def grid(self) -> tuple[int]:
        return (self.programs.shape[0],)

    @property
    def block(self) -> int:
        return TILE_BLOCK if self.tile else BLOCK

    def constants(self) -> dict[str, int | bool]:
        return {"BLOCK": self.block, "RUN": self.run, "TILE": self.tile, "WIDE": self.wide}


@triton.jit
def _mixed(numbers, bits):
    """int64: `sparse_opt.weight_sync.digest.mix` of element numbers and unsigned bits."""
    x = numbers.to(tl.uint64) * _FACTOR_OF_NUMBER + bits.to(tl.uint64) * _FACTOR_OF_BITS + _OFFSET
    x = (x ^ (x >> 30)) * _FIRST_FACTOR
    x = (x ^ (x >> 27)) * _SECOND_FACTOR
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def _marked(bitmap, block, bits, BLOCK: tl.constexpr):
    """[BLOCK] int32, 0 or 1: the bits of a block of a bitmap that has `bits` of them."""
    lane = tl.arange(0, BLOCK)
    byte = tl.load(bitmap + block * (BLOCK // 8) + lane // 8, mask=block * BLOCK + lane < bits, other=0)
    return (byte.to(tl.int32) >> (lane % 8)) & 1


@triton.jit
def _located(
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
            marks = _marked(bitmap, block, bits, BLOCK)
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
            marks = _marked(bitmap, block, bits, BLOCK)
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
def _addresses(part, columns, start, offset, mask, BITS: tl.constexpr, WIDE: tl.constexpr):
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
):
    _, slots, mask, _, at, start, offset = _located(
        programs, tensors, units, bands, None, 0, False, BLOCK, RUN, TILE, WIDE
    )
    columns = tl.load(at)
    value = tl.zeros((BLOCK,), dtype=BITS)
    for i in range(tl.load(at + 3), tl.load(at + 4)):
        pointers, inside = _addresses(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
        value = tl.where(inside, tl.load(pointers, mask=inside, other=0), value)
    tl.store(out + slots, value.to(out.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit
def _weight_put_kernel(
    programs,
    tensors,
    units,
    bands,
    parts,
    values,  # [slots] bits
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    _, slots, mask, _, at, start, offset = _located(
        programs, tensors, units, bands, None, 0, False, BLOCK, RUN, TILE, WIDE
    )
    columns = tl.load(at)
    value = tl.load(values + slots, mask=mask, other=0, eviction_policy="evict_first").to(BITS, bitcast=True)
    for i in range(tl.load(at + 3), tl.load(at + 5)):
        pointers, inside = _addresses(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
        tl.store(pointers, value, mask=inside)


@triton.jit(do_not_specialize=["bits", "changes", "first"])
def _weight_check_kernel(
    programs,
    tensors,
    units,
    bands,
    parts,
    bitmap,  # [bits / 8] uint8
    changed,  # [changes] bits
    ranks,  # [blocks] int64: changed elements before each block
    partials,  # [2, programs] int64: digests of the changed values and of those in their place
    bits: tl.int64,
    changes: tl.int64,
    first: tl.int64,  # element number of slot 0
    READ_OLD: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    block, slots, mask, marks, at, start, offset = _located(
        programs, tensors, units, bands, bitmap, bits, True, BLOCK, RUN, TILE, WIDE
    )
    rank = tl.load(ranks + block) + tl.cumsum(marks, axis=0) - marks
    mask = mask & (rank < changes)
    numbers = slots + first
    value = tl.load(changed + rank, mask=mask, other=0).to(BITS, bitcast=True)
    program = tl.program_id(0).to(tl.int64)
    tl.store(partials + program, tl.sum(tl.where(mask, _mixed(numbers, value), 0), axis=0))
    if READ_OLD:
        columns = tl.load(at)
        old = tl.zeros((BLOCK,), dtype=tl.int64)
        for i in range(tl.load(at + 3), tl.load(at + 4)):
            pointers, inside = _addresses(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
            held = tl.load(pointers, mask=inside, other=0)
            old += tl.where(inside, _mixed(numbers, held), 0)
        tl.store(partials + tl.num_programs(0) + program, tl.sum(old, axis=0))


@triton.jit(do_not_specialize=["bits", "changes"])
def _weight_write_kernel(
    programs,
    tensors,
    units,
    bands,
    parts,
    bitmap,  # [bits / 8] uint8
    changed,  # [changes] bits
    ranks,  # [blocks] int64
    bits: tl.int64,
    changes: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    block, _, mask, marks, at, start, offset = _located(
        programs, tensors, units, bands, bitmap, bits, True, BLOCK, RUN, TILE, WIDE
    )
    rank = tl.load(ranks + block) + tl.cumsum(marks, axis=0) - marks
    mask = mask & (rank < changes)
    value = tl.load(changed + rank, mask=mask, other=0).to(BITS, bitcast=True)
    columns = tl.load(at)
    for i in range(tl.load(at + 3), tl.load(at + 5)):
        pointers, inside = _addresses(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
        tl.store(pointers, value, mask=inside)


@triton.jit(do_not_specialize=["bits", "changes"])
def _weight_list_kernel(
    programs,
    tensors,
    units,
    bands,
    parts,
    bitmap,  # [bits / 8] uint8
    ranks,  # [blocks] int64
    slots_out,  # [changes] int64
    addresses,  # [changes] int64
    bits: tl.int64,
    changes: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    block, slots, mask, marks, at, start, offset = _located(
        programs, tensors, units, bands, bitmap, bits, True, BLOCK, RUN, TILE, WIDE
    )
    rank = tl.load(ranks + block) + tl.cumsum(marks, axis=0) - marks
    mask = mask & (rank < changes)
    tl.store(slots_out + rank, slots, mask=mask)
    part = tl.load(at + 3)
    if part < tl.load(at + 5):
        columns = tl.load(at)
        pointers, inside = _addresses(parts + part * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
        tl.store(addresses + rank, pointers.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["changes", "first"])
def _weight_listed_sums_kernel(
    changed,  # [changes] bits
    slots,  # [changes] int64
    addresses,  # [changes] int64; 0 is nowhere
    marked,  # [1] int64: set bits of the bitmap
    partials,  # [3, programs] int64, whose sums are those of `check`
    changes: tl.int64,
    first: tl.int64,
    READ_OLD: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    lane = program * BLOCK + tl.arange(0, BLOCK)
    mask = lane < changes
    numbers = tl.load(slots + lane, mask=mask, other=0) + first
    value = tl.load(changed + lane, mask=mask, other=0).to(BITS, bitcast=True)
    tl.store(partials + program, tl.sum(tl.where(mask, _mixed(numbers, value), 0), axis=0))
    old = tl.zeros((BLOCK,), dtype=tl.int64)
    if READ_OLD:
        address = tl.load(addresses + lane, mask=mask, other=0)
        inside = mask & (address != 0)
        held = tl.load(address.to(tl.pointer_type(BITS)), mask=inside, other=0)
        old = tl.where(inside, _mixed(numbers, held), 0)
    tl.store(partials + tl.num_programs(0) + program, tl.sum(old, axis=0))
    tl.store(partials + 2 * tl.num_programs(0) + program, tl.where(program == 0, tl.load(marked), 0))


@triton.jit(do_not_specialize=["changes"])
def _weight_listed_write_kernel(
    changed,  # [changes] bits
    addresses,  # [changes] int64; 0 is nowhere
    changes: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < changes
    address = tl.load(addresses + lane, mask=mask, other=0)
    value = tl.load(changed + lane, mask=mask, other=0).to(BITS, bitcast=True)
    tl.store(address.to(tl.pointer_type(BITS)), value, mask=mask & (address != 0))


@triton.jit(do_not_specialize=["bits"])
def _weight_count_kernel(
    bitmap,  # [bits / 8] uint8
    counts,  # [blocks + 1] int32; the first one is 0
    bits: tl.int64,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    tl.store(counts, 0, mask=block == 0)
    tl.store(counts + 1 + block, tl.sum(_marked(bitmap, block, bits, BLOCK), axis=0))


@triton.jit(do_not_specialize=["bits", "changes"])
def _weight_select_kernel(
    values,  # [slots] bits
    bitmap,  # [bits / 8] uint8
    ends,  # [blocks] int64: changed elements before the end of each block
    changed,  # [changes] bits
    bits: tl.int64,
    changes: tl.int64,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    marked = _marked(bitmap, block, bits, BLOCK)
    rank = tl.load(ends + block) - tl.sum(marked, axis=0) + tl.cumsum(marked, axis=0) - marked
    mask = (marked != 0) & (rank < changes)
    value = tl.load(values + block * BLOCK + tl.arange(0, BLOCK), mask=mask, other=0)
    tl.store(changed + rank, value, mask=mask)


@triton.jit
def _values(values, begin, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] unsigned bits from element `begin` on, 0 behind the last one."""
    slots = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= n:  # without a mask, loads are of 16 bytes
        value = tl.load(values + slots, eviction_policy="evict_first")
    else:
        value = tl.load(values + slots, mask=slots < n, other=0, eviction_policy="evict_first")
    return value.to(BITS, bitcast=True)


@triton.jit(do_not_specialize=["n", "first"])
def _weight_digest_kernel(
    values,  # [n] bits
    partials,  # [programs] int64
    n: tl.int64,
    first: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    slots = program * BLOCK + tl.arange(0, BLOCK)
    mixed = _mixed(slots + first, _values(values, program * BLOCK, n, BITS, BLOCK))
    tl.store(partials + program, tl.sum(tl.where(slots < n, mixed, 0), axis=0))


@triton.jit(do_not_specialize=["n", "first", "size"])
def _weight_compare_kernel(
    old,  # [n] bits
    new,  # [n] bits
    bitmap,  # [size] uint8
    partials,  # [3, programs] int64
    n: tl.int64,
    first: tl.int64,
    size: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    slots = program * BLOCK + tl.arange(0, BLOCK)
    before = _values(old, program * BLOCK, n, BITS, BLOCK)
    after = _values(new, program * BLOCK, n, BITS, BLOCK)
    changed = before != after
    mixed = tl.where(slots < n, _mixed(slots + first, after), 0)
    at = partials + program
    tl.store(at, tl.sum(mixed, axis=0))
    tl.store(at + tl.num_programs(0), tl.sum(tl.where(changed, mixed, 0), axis=0))
    tl.store(at + 2 * tl.num_programs(0), tl.sum(changed.to(tl.int32), axis=0).to(tl.int64))
    eighths = tl.reshape(changed.to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    places = program * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    tl.store(bitmap + places, tl.sum(eighths, axis=1).to(tl.uint8), mask=places < size)


def digest_sum(values: Tensor, first: int) -> Tensor:
    """`sparse_opt.weight_sync.digest.digest_sum` of values of 2 or 4 bytes, in one launch and a sum."""
    with torch.cuda.device_of(values):
        partials = _partials(1, values)
        _weight_digest_kernel[(partials.shape[1],)](
            _bits(values),
            partials,
            values.numel(),
            first,
            BITS=_UNSIGNED[values.element_size()],
            BLOCK=VALUES,
            **OPTIONS,
        )
        return partials.sum()


def compare(old: Tensor, new: Tensor, first: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_opt.weight_sync.reference.compare` in one launch and a sum, and if there is capacity another of each."""
    with torch.cuda.device_of(new):
        partials = _partials(3, new)
        bitmap = torch.empty(triton.cdiv(new.numel(), 64) * 8, dtype=torch.uint8, device=new.device)
        _weight_compare_kernel[(partials.shape[1],)](
            _bits(old),
            _bits(new),
            bitmap,
            partials,
            new.numel(),
            first,
            bitmap.numel(),
            BITS=_UNSIGNED[new.element_size()],
            BLOCK=VALUES,
            **OPTIONS,
        )
        changed = torch.empty(capacity, dtype=new.dtype, device=new.device)
        if capacity:
            _select(new, bitmap, torch.cumsum(partials[2], 0), changed)
        return bitmap, partials.sum(dim=1), changed


def select(new: Tensor, bitmap: Tensor, count: int) -> Tensor:
    """`sparse_opt.weight_sync.reference.select` in two launches and a running sum."""
    with torch.cuda.device_of(new):
        changed = torch.empty(count, dtype=new.dtype, device=new.device)
        _select(new, bitmap, ranks_of(bitmap, VALUES)[1:], changed)
        return changed


def _select(new: Tensor, bitmap: Tensor, ends: Tensor, changed: Tensor) -> None:
    _weight_select_kernel[(triton.cdiv(new.numel(), VALUES),)](
        _bits(new), bitmap, ends, _bits(changed), 8 * bitmap.numel(), changed.numel(), BLOCK=VALUES, **OPTIONS
    )


def ranks_of(bitmap: Tensor, block: int) -> Tensor:
    """Return [blocks + 1] int64: the set bits before each block of a bitmap, and all."""
    bits = 8 * bitmap.numel()
    with torch.cuda.device_of(bitmap):
        blocks = triton.cdiv(bits, block)
        counts = torch.empty(blocks + 1, dtype=torch.int32, device=bitmap.device)
        _weight_count_kernel[(blocks,)](bitmap, counts, bits, BLOCK=block, **OPTIONS)
        return torch.cumsum(counts, 0, dtype=torch.int64)


def take(table: IndexTable, out: Tensor) -> None:
    """Write the active values to their slots in `out`; 0 for elements without a destination. One launch."""
    with torch.cuda.device_of(out):
        _weight_take_kernel[table.grid](
            *table[:5], _bits(out), BITS=_UNSIGNED[out.element_size()], **table.constants(), **OPTIONS
        )


def put(table: IndexTable, values: Tensor) -> None:
    """Write the values [slots] to all their destinations. One launch."""
    with torch.cuda.device_of(values):
        _weight_put_kernel[table.grid](
            *table[:5], _bits(values), BITS=_UNSIGNED[values.element_size()], **table.constants(), **OPTIONS
        )


def check(table: IndexTable, bitmap: Tensor, changed: Tensor, ranks: Tensor, first: int, *, read_old: bool) -> Tensor:
    """Return [2] int64: the digests of the changed values, and of those in their place or 0. One launch and a sum."""
    with torch.cuda.device_of(changed):
        partials = torch.zeros(2, *table.grid, dtype=torch.int64, device=changed.device)
        _weight_check_kernel[table.grid](
            *table[:5],
            bitmap,
            _bits(changed),
            ranks,
            partials,
            8 * bitmap.numel(),
            changed.numel(),
            first,
            READ_OLD=read_old,
            BITS=_UNSIGNED[changed.element_size()],
            **table.constants(),
            **OPTIONS,
        )
        return partials.sum(dim=1)


def write(table: IndexTable, bitmap: Tensor, changed: Tensor, ranks: Tensor) -> None:
    """Write the changed values of the elements that a bitmap marks to all their destinations. One launch."""
    with torch.cuda.device_of(changed):
        _weight_write_kernel[table.grid](
            *table[:5],
            bitmap,
            _bits(changed),
            ranks,
            8 * bitmap.numel(),
            changed.numel(),
            BITS=_UNSIGNED[changed.element_size()],
            **table.constants(),
            **OPTIONS,
        )


def list_changes(table: IndexTable, bitmap: Tensor, ranks: Tensor, slots: Tensor, addresses: Tensor) -> None:
    """Write the slots and addresses of the changed elements of a table's tensors to their places. One launch.

    Args:
        table: no tensor has more than one destination.
        bitmap, ranks: as for `check`.
        slots, addresses: [changes] int64. Elements without a destination keep their address.
    """
    with torch.cuda.device_of(slots):
        _weight_list_kernel[table.grid](
            *table[:5],
            bitmap,
            ranks,
            slots,
            addresses,
            8 * bitmap.numel(),
            slots.numel(),
            BITS=_UNSIGNED[table.element_size],
            **table.constants(),
            **OPTIONS,
        )


def listed_sums(
    changed: Tensor, slots: Tensor, addresses: Tensor, marked: Tensor, first: int, *, read_old: bool
) -> Tensor:
    """`check` for all tables at once, after `list_changes`: [3] int64 with `marked` [1], in one launch and a sum."""
    with torch.cuda.device_of(changed):
        partials = torch.empty(3, max(triton.cdiv(changed.numel(), BLOCK), 1), dtype=torch.int64, device=changed.device)
        _weight_listed_sums_kernel[(partials.shape[1],)](
            _bits(changed),
            slots,
            addresses,
            marked,
            partials,
            changed.numel(),
            first,
            READ_OLD=read_old,
            BITS=_UNSIGNED[changed.element_size()],
            BLOCK=BLOCK,
            **OPTIONS,
        )
        return partials.sum(dim=1)


def listed_write(changed: Tensor, addresses: Tensor) -> None:
    """`write` for all tables at once, after `list_changes`. One launch."""
    with torch.cuda.device_of(changed):
        _weight_listed_write_kernel[(max(triton.cdiv(changed.numel(), BLOCK), 1),)](
            _bits(changed),
            addresses,
            changed.numel(),
            BITS=_UNSIGNED[changed.element_size()],
            BLOCK=BLOCK,
            **OPTIONS,
        )


def _partials(rows: int, values: Tensor) -> Tensor:
    programs = max(triton.cdiv(values.numel(), VALUES), 1)
    return torch.empty(rows, programs, dtype=torch.int64, device=values.device)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS_DTYPE[tensor.element_size()])
