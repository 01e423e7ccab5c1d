"""Reads and compares active values in the order of their elements, and packs the changed ones.

A *slot* is the number of an active element within its dtype, and a *block* is BLOCK slots, from a multiple of BLOCK on.
Bytes per slot, with b those of an element: digest_sum reads b; compare reads 2 b and writes a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import BITS_DTYPE

# Slots of a program. Tile masks have a row in a table for each program, for which 1024 slots would take more bytes.
BLOCK, TILE_BLOCK = 1024, 2048
# Elements of a program that compares or mixes consecutive values.
VALUES = 2048
OPTIONS = {"num_warps": 4}

UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
# `sparse_opt.weight_sync.digest`
_FACTOR_OF_NUMBER = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_OF_BITS = tl.constexpr(0xD1342543DE82EF95)
_OFFSET = tl.constexpr(0x2545F4914F6CDD1D)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(numbers, bits):
    """int64: `sparse_opt.weight_sync.digest.mix` of element numbers and unsigned bits."""
    x = numbers.to(tl.uint64) * _FACTOR_OF_NUMBER + bits.to(tl.uint64) * _FACTOR_OF_BITS + _OFFSET
    x = (x ^ (x >> 30)) * _FIRST_FACTOR
    x = (x ^ (x >> 27)) * _SECOND_FACTOR
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def marks_of(bitmap, block, bits, BLOCK: tl.constexpr):
    """[BLOCK] int32, 0 or 1: the bits of a block of a bitmap that has `bits` of them."""
    lane = tl.arange(0, BLOCK)
    byte = tl.load(bitmap + block * (BLOCK // 8) + lane // 8, mask=block * BLOCK + lane < bits, other=0)
    return (byte.to(tl.int32) >> (lane % 8)) & 1


@triton.jit(do_not_specialize=["bits"])
def _weight_count_kernel(
    bitmap,  # [bits / 8] uint8
    counts,  # [blocks + 1] int32; the first one is 0
    bits: tl.int64,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    tl.store(counts, 0, mask=block == 0)
    tl.store(counts + 1 + block, tl.sum(marks_of(bitmap, block, bits, BLOCK), axis=0))


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
    marked = marks_of(bitmap, block, bits, BLOCK)
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
    mixed = mix(slots + first, _values(values, program * BLOCK, n, BITS, BLOCK))
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
    mixed = tl.where(slots < n, mix(slots + first, after), 0)
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
            as_integers(values),
            partials,
            values.numel(),
            first,
            BITS=UNSIGNED[values.element_size()],
            BLOCK=VALUES,
            **OPTIONS,
        )
        return partials.sum()


def compare(old: Tensor, new: Tensor, first: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_opt.weight_sync.index.compare` in one launch and a sum, and if there is capacity another of each."""
    with torch.cuda.device_of(new):
        partials = _partials(3, new)
        bitmap = torch.empty(triton.cdiv(new.numel(), 64) * 8, dtype=torch.uint8, device=new.device)
        _weight_compare_kernel[(partials.shape[1],)](
            as_integers(old),
            as_integers(new),
            bitmap,
            partials,
            new.numel(),
            first,
            bitmap.numel(),
            BITS=UNSIGNED[new.element_size()],
            BLOCK=VALUES,
            **OPTIONS,
        )
        changed = torch.empty(capacity, dtype=new.dtype, device=new.device)
        if capacity:
            _select(new, bitmap, torch.cumsum(partials[2], 0), changed)
        return bitmap, partials.sum(dim=1), changed


def select(new: Tensor, bitmap: Tensor, count: int) -> Tensor:
    """`sparse_opt.weight_sync.index.select` in two launches and a running sum."""
    with torch.cuda.device_of(new):
        changed = torch.empty(count, dtype=new.dtype, device=new.device)
        _select(new, bitmap, ranks_of(bitmap, VALUES)[1:], changed)
        return changed


def _select(new: Tensor, bitmap: Tensor, ends: Tensor, changed: Tensor) -> None:
    _weight_select_kernel[(triton.cdiv(new.numel(), VALUES),)](
        as_integers(new),
        bitmap,
        ends,
        as_integers(changed),
        8 * bitmap.numel(),
        changed.numel(),
        BLOCK=VALUES,
        **OPTIONS,
    )


def ranks_of(bitmap: Tensor, block: int) -> Tensor:
    """Return [blocks + 1] int64: the set bits before each block of a bitmap, and all."""
    bits = 8 * bitmap.numel()
    with torch.cuda.device_of(bitmap):
        blocks = triton.cdiv(bits, block)
        counts = torch.empty(blocks + 1, dtype=torch.int32, device=bitmap.device)
        _weight_count_kernel[(blocks,)](bitmap, counts, bits, BLOCK=block, **OPTIONS)
        return torch.cumsum(counts, 0, dtype=torch.int64)


def _partials(rows: int, values: Tensor) -> Tensor:
    programs = max(triton.cdiv(values.numel(), VALUES), 1)
    return torch.empty(rows, programs, dtype=torch.int64, device=values.device)


def as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(BITS_DTYPE[tensor.element_size()])
