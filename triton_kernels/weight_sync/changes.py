"""Verifies and writes the changed elements of an update, which a bitmap marks.

The changed elements before a slot are the sum over its block's bits before it, and a number per block (`ranks`). If
they are few, their slots and addresses are listed first: digests and writes then have one lane per changed element.
The list may have room for more elements than have changed.

Bytes per active element, with i those of the index: a bit of the bitmap, and the granules of i and of the weights that
have a changed element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .index import PART_COLUMNS, IndexTable, addresses_of, located
from .values import BLOCK, OPTIONS, UNSIGNED, as_integers, mix


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
    block, slots, mask, marks, at, start, offset = located(
        programs, tensors, units, bands, bitmap, bits, True, BLOCK, RUN, TILE, WIDE
    )
    rank = tl.load(ranks + block) + tl.cumsum(marks, axis=0) - marks
    mask = mask & (rank < changes)
    numbers = slots + first
    value = tl.load(changed + rank, mask=mask, other=0).to(BITS, bitcast=True)
    program = tl.program_id(0).to(tl.int64)
    tl.store(partials + program, tl.sum(tl.where(mask, mix(numbers, value), 0), axis=0))
    if READ_OLD:
        columns = tl.load(at)
        old = tl.zeros((BLOCK,), dtype=tl.int64)
        for i in range(tl.load(at + 3), tl.load(at + 4)):
            pointers, inside = addresses_of(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
            held = tl.load(pointers, mask=inside, other=0)
            old += tl.where(inside, mix(numbers, held), 0)
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
    block, _, mask, marks, at, start, offset = located(
        programs, tensors, units, bands, bitmap, bits, True, BLOCK, RUN, TILE, WIDE
    )
    rank = tl.load(ranks + block) + tl.cumsum(marks, axis=0) - marks
    mask = mask & (rank < changes)
    value = tl.load(changed + rank, mask=mask, other=0).to(BITS, bitcast=True)
    columns = tl.load(at)
    for i in range(tl.load(at + 3), tl.load(at + 5)):
        pointers, inside = addresses_of(parts + i * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
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
    block, slots, mask, marks, at, start, offset = located(
        programs, tensors, units, bands, bitmap, bits, True, BLOCK, RUN, TILE, WIDE
    )
    rank = tl.load(ranks + block) + tl.cumsum(marks, axis=0) - marks
    mask = mask & (rank < changes)
    tl.store(slots_out + rank, slots, mask=mask)
    part = tl.load(at + 3)
    if part < tl.load(at + 5):
        columns = tl.load(at)
        pointers, inside = addresses_of(parts + part * PART_COLUMNS, columns, start, offset, mask, BITS, WIDE)
        tl.store(addresses + rank, pointers.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["changes", "first"])
def _weight_listed_sums_kernel(
    changed,  # [changes] bits
    slots,  # [changes or more] int64
    addresses,  # [changes or more] int64; 0 is nowhere
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
    tl.store(partials + program, tl.sum(tl.where(mask, mix(numbers, value), 0), axis=0))
    old = tl.zeros((BLOCK,), dtype=tl.int64)
    if READ_OLD:
        address = tl.load(addresses + lane, mask=mask, other=0)
        inside = mask & (address != 0)
        held = tl.load(address.to(tl.pointer_type(BITS)), mask=inside, other=0)
        old = tl.where(inside, mix(numbers, held), 0)
    tl.store(partials + tl.num_programs(0) + program, tl.sum(old, axis=0))
    tl.store(partials + 2 * tl.num_programs(0) + program, tl.where(program == 0, tl.load(marked), 0))


@triton.jit(do_not_specialize=["changes"])
def _weight_listed_write_kernel(
    changed,  # [changes] bits
    addresses,  # [changes or more] int64; 0 is nowhere
    changes: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < changes
    address = tl.load(addresses + lane, mask=mask, other=0)
    value = tl.load(changed + lane, mask=mask, other=0).to(BITS, bitcast=True)
    tl.store(address.to(tl.pointer_type(BITS)), value, mask=mask & (address != 0))


def check(table: IndexTable, bitmap: Tensor, changed: Tensor, ranks: Tensor, first: int, *, read_old: bool) -> Tensor:
    """Return [2] int64: the digests of the changed values, and of those in their place or 0. One launch and a sum."""
    with torch.cuda.device_of(changed):
        partials = torch.zeros(2, *table.grid, dtype=torch.int64, device=changed.device)
        _weight_check_kernel[table.grid](
            *table[:5],
            bitmap,
            as_integers(changed),
            ranks,
            partials,
            8 * bitmap.numel(),
            changed.numel(),
            first,
            READ_OLD=read_old,
            BITS=UNSIGNED[changed.element_size()],
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
            as_integers(changed),
            ranks,
            8 * bitmap.numel(),
            changed.numel(),
            BITS=UNSIGNED[changed.element_size()],
            **table.constants(),
            **OPTIONS,
        )


def list_changes(table: IndexTable, bitmap: Tensor, ranks: Tensor, slots: Tensor, addresses: Tensor) -> None:
    """Write the slots and addresses of the changed elements of a table's tensors to their places. One launch.

    Args:
        table: no tensor has more than one destination.
        bitmap, ranks: as for `check`.
        slots, addresses: [n] int64, of which the first ones are written, and the others keep their values, as do the
            addresses of elements without a destination. If more than n have changed, only the first ones are listed.
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
            BITS=UNSIGNED[table.element_size],
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
            as_integers(changed),
            slots,
            addresses,
            marked,
            partials,
            changed.numel(),
            first,
            READ_OLD=read_old,
            BITS=UNSIGNED[changed.element_size()],
            BLOCK=BLOCK,
            **OPTIONS,
        )
        return partials.sum(dim=1)


def listed_write(changed: Tensor, addresses: Tensor) -> None:
    """`write` for all tables at once, after `list_changes`. One launch."""
    with torch.cuda.device_of(changed):
        _weight_listed_write_kernel[(max(triton.cdiv(changed.numel(), BLOCK), 1),)](
            as_integers(changed),
            addresses,
            changed.numel(),
            BITS=UNSIGNED[changed.element_size()],
            BLOCK=BLOCK,
            **OPTIONS,
        )
