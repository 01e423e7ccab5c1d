"""The difference of two lists of tensors bit by bit, and its application.

`delta_encode` marks the changes of each block with one bit per element and counts them, computes the running sums of
the counts, and writes each block's changes at its sum: in ascending order, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import CHANGE_OPTIONS, CHANGES, ELEMENT_OPTIONS, SLOT_OPTIONS, STEP_SLOTS, TRITON_BITS_DTYPE, sizes_of
from .segments import address_of, bits, bits_addresses, block_of, segments
from .tables import block_table, pointer_table


@triton.jit
def _compare(old, new, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """[BLOCK] bool: which elements of this program's block differ."""
    tensor, positions, mask = block_of(blocks, 0, 0, BLOCK, ALIGNED)
    old_at = address_of(old, blocks, tensor, BITS, ALIGNED)
    new_at = address_of(new, blocks, tensor, BITS, ALIGNED)
    before = tl.load(old_at + positions, mask=mask, other=0, eviction_policy="evict_first")
    after = tl.load(new_at + positions, mask=mask, other=0, eviction_policy="evict_first")
    return before != after


# Reads both tensors, 2 b bytes per element of b bytes; writes a bit per element and 4 bytes per block. With
# _delta_write_kernel the bandwidth bound is that of one pass, a sixteenth more for b = 2, and the changes of `new`
# again.
@triton.jit
def _delta_mark_kernel(
    old,  # [n] int64 addresses
    new,  # [n] int64 addresses
    blocks,  # [programs, 2] int64
    marks,  # [programs, BLOCK / 8] uint8: element 8 i + j of the block is bit j of byte i
    counts,  # [programs] int32
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    changed = _compare(old, new, blocks, BITS, BLOCK, ALIGNED).to(tl.int32)
    program = tl.program_id(0).to(tl.int64)
    eighths = tl.reshape(changed, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    tl.store(marks + program * (BLOCK // 8) + tl.arange(0, BLOCK // 8), tl.sum(eighths, axis=1).to(tl.uint8))
    tl.store(counts + program, tl.sum(changed, axis=0))


@triton.jit
def _ones(word):
    """The number of set bits of a uint32, as int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _kth_one(words, through, k, WORDS: tl.constexpr):
    """The position of set bit number k of `words`; `through` are the running sums of their set bits, WORDS = 2^n."""
    which = k * 0
    for i in tl.static_range(1, 16):
        if WORDS >> i > 0:
            middle = tl.gather(through, which + ((WORDS >> i) - 1), 0)
            which = tl.where(middle <= k, which + (WORDS >> i), which)
    word = tl.gather(words, which, 0)
    rest = k - (tl.gather(through, which, 0) - _ones(word))
    bit = k * 0
    for i in tl.static_range(5):
        low = _ones(word & ((1 << (16 >> i)) - 1))
        above = rest >= low
        rest = tl.where(above, rest - low, rest)
        word = tl.where(above, word >> (16 >> i), word)
        bit = tl.where(above, bit + (16 >> i), bit)
    return 32 * which + bit


# A program finds its changes, CHANGES at a time, because most elements are unchanged; its stores fill sectors. Reads a
# bit per element and the 64-byte granules of `new` that contain a change, writes an index and b bytes per change.
@triton.jit
def _delta_write_kernel(
    new,  # [n] int64 addresses
    blocks,  # [programs, 2] int64
    marks,  # [programs, BLOCK / 32] int32
    offsets,  # [programs + 1] int64: changes before each block
    indices,  # [changed]
    values,  # [changed] bits
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANGES: tl.constexpr,
):
    WORDS: tl.constexpr = BLOCK // 32
    program = tl.program_id(0).to(tl.int64)
    words = tl.load(marks + program * WORDS + tl.arange(0, WORDS)).to(tl.uint32, bitcast=True)
    through = tl.cumsum(_ones(words), axis=0)
    begin = tl.load(blocks + 2 * program)
    tensor = tl.load(blocks + 2 * program + 1) >> 32
    first = tl.load(offsets + program)
    count = (tl.load(offsets + program + 1) - first).to(tl.int32)
    new_at = address_of(new, blocks, tensor, BITS) + begin
    for done in range(0, count, CHANGES):
        k = done + tl.arange(0, CHANGES)
        position = _kth_one(words, through, k, WORDS)
        value = tl.load(new_at + position, mask=k < count, other=0)
        tl.store(indices + first + k, (begin + position).to(indices.dtype.element_ty), mask=k < count)
        tl.store(values + first + k, value, mask=k < count)


# Per change, with i and b the bytes of an index and an element: reads i + b, writes the 64-byte granules that contain a
# change, which are fetched first if they are written in part.
@triton.jit(do_not_specialize=["dense_table", "start", "end"])
def _delta_apply_kernel(
    dense_table,  # [n] int64 addresses, or the bits of the only tensor
    blocks,  # [programs, 2] int64, or None for one tensor
    indices,  # [changed]
    values,  # [changed] bits
    start: tl.int64,
    end: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, slots, mask = block_of(blocks, start, end, BLOCK)
    positions = tl.load(indices + slots, mask=mask, other=0, eviction_policy="evict_first").to(tl.int64)
    value = tl.load(values + slots, mask=mask, other=0, eviction_policy="evict_first")
    tl.store(address_of(dense_table, blocks, tensor, BITS) + positions, value, mask=mask)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all loads of 16 elements at multiples of 16 are whole and aligned to 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.numel() % 16 == 0 for t in tensors)


def delta_encode(old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_opt.ops.delta_encode`. Waits for the device once, for the size of the result."""
    device, dtype = new[0].device, new[0].dtype
    index_dtype = torch.int64 if any(t.numel() > 2**31 - 1 for t in new) else torch.int32
    with torch.cuda.device_of(new[0]):
        elements = sizes_of(device).encode_elements
        blocks = block_table([0] * len(new), [t.numel() for t in new], elements, device)
        if not blocks.programs:
            counts = torch.zeros(len(new), dtype=torch.int64, device="cpu")
            return torch.empty(0, dtype=index_dtype, device=device), torch.empty(0, dtype=dtype, device=device), counts
        new_table = pointer_table("new", new, device)
        constants = {"BITS": TRITON_BITS_DTYPE[new[0].element_size()], "BLOCK": elements}
        marks = torch.empty(blocks.programs * elements // 32, dtype=torch.int32, device=device)
        block_counts = torch.empty(blocks.programs, dtype=torch.int32, device=device)
        _delta_mark_kernel[(blocks.programs,)](
            pointer_table("old", old, device),
            new_table,
            blocks.rows,
            marks.view(torch.uint8),
            block_counts,
            ALIGNED=_aligned(old) and _aligned(new),
            **constants,
            **ELEMENT_OPTIONS,
        )
        offsets = torch.zeros(blocks.programs + 1, dtype=torch.int64, device=device)
        torch.cumsum(block_counts, 0, out=offsets[1:])
        bounds = offsets[blocks.firsts].cpu()
        changed = int(bounds[-1])
        indices = torch.empty(changed, dtype=index_dtype, device=device)
        values = torch.empty(changed, dtype=dtype, device=device)
        if changed:
            _delta_write_kernel[(blocks.programs,)](
                new_table,
                blocks.rows,
                marks,
                offsets,
                indices,
                bits(values),
                CHANGES=CHANGES,
                **constants,
                **CHANGE_OPTIONS,
            )
    return indices, values, bounds.diff()


def delta_apply_(
    dense: Sequence[Tensor], indices: Tensor, values: Tensor, starts: Sequence[int], ends: Sequence[int]
) -> None:
    """`sparse_opt.ops.delta_apply_` in one launch."""
    if not dense:
        return
    device = indices.device
    with torch.cuda.device_of(indices):
        plan = segments(dense, starts, ends, device, STEP_SLOTS)
        if not plan.programs:
            return
        _delta_apply_kernel[(plan.programs,)](
            bits_addresses("dense", dense, device),
            plan.blocks,
            indices,
            bits(values),
            plan.start,
            plan.end,
            BITS=TRITON_BITS_DTYPE[values.element_size()],
            BLOCK=STEP_SLOTS,
            **SLOT_OPTIONS,
        )
