"""The difference of two lists of tensors bit by bit, and its application.

`delta_encode` counts the changes of each block, adds the counts up and writes each block's changes where they belong:
one order, ascending, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ELEMENT_OPTIONS, ELEMENTS, FEW_SLOTS, SLOT_OPTIONS, TRITON_BITS_DTYPE
from .segments import address_of, bits, bits_addresses, block_of, segments
from .tables import block_table, pointer_table


@triton.jit
def _compare(old, new, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """(positions [BLOCK], new bits [BLOCK], changed [BLOCK]) of this program's block."""
    tensor, positions, mask = block_of(blocks, 0, 0, BLOCK, ALIGNED)
    old_at = address_of(old, blocks, tensor, BITS, ALIGNED)
    new_at = address_of(new, blocks, tensor, BITS, ALIGNED)
    before = tl.load(old_at + positions, mask=mask, other=0, eviction_policy="evict_first")
    after = tl.load(new_at + positions, mask=mask, other=0, eviction_policy="evict_first")
    return positions, after, before != after


# Reads both tensors, 2 b bytes per element of b bytes; writes 4 bytes per block.
@triton.jit
def _delta_count_kernel(
    old,  # [n] int64 addresses
    new,  # [n] int64 addresses
    blocks,  # [programs, 2] int64
    counts,  # [programs] int32
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    _, _, changed = _compare(old, new, blocks, BITS, BLOCK, ALIGNED)
    tl.store(counts + tl.program_id(0), tl.sum(changed.to(tl.int32), axis=0))


# Reads both tensors again, writes an index and b bytes per change. With the count that is 4 b bytes per element, so
# the floor of the two passes is twice that of one that compares and compacts at once.
@triton.jit
def _delta_write_kernel(
    old,  # [n] int64 addresses
    new,  # [n] int64 addresses
    blocks,  # [programs, 2] int64
    offsets,  # [programs + 1] int64: changes before each block
    indices,  # [changed]
    values,  # [changed] bits
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    positions, after, changed = _compare(old, new, blocks, BITS, BLOCK, ALIGNED)
    rank = tl.cumsum(changed.to(tl.int32), axis=0) - 1
    first = tl.load(offsets + tl.program_id(0))
    tl.store(indices + first + rank, positions.to(indices.dtype.element_ty), mask=changed)
    tl.store(values + first + rank, after, mask=changed)


# Per change, with i and b the bytes of an index and an element: read i + b, written the 64-byte granules that are hit,
# which are fetched first where they are written in part.
@triton.jit(do_not_specialize=["dense_table", "start", "end"])
def _delta_apply_kernel(
    dense_table,  # [n] int64 addresses, or the tensor's bits where there is one
    blocks,  # [programs, 2] int64, or None where there is one tensor
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
    """`sparse_opt.ops.delta_encode`. Waits for the device once, to know how much memory the result takes."""
    device, dtype = new[0].device, new[0].dtype
    index_dtype = torch.int64 if any(t.numel() > 2**31 - 1 for t in new) else torch.int32
    with torch.cuda.device_of(new[0]):
        blocks = block_table([0] * len(new), [t.numel() for t in new], ELEMENTS, device)
        if not blocks.programs:
            counts = torch.zeros(len(new), dtype=torch.int64)
            return torch.empty(0, dtype=index_dtype, device=device), torch.empty(0, dtype=dtype, device=device), counts
        tables = (pointer_table("old", old, device), pointer_table("new", new, device), blocks.rows)
        constants = {
            "BITS": TRITON_BITS_DTYPE[new[0].element_size()],
            "BLOCK": ELEMENTS,
            "ALIGNED": _aligned(old) and _aligned(new),
        }
        block_counts = torch.empty(blocks.programs, dtype=torch.int32, device=device)
        _delta_count_kernel[(blocks.programs,)](*tables, block_counts, **constants, **ELEMENT_OPTIONS)
        offsets = torch.zeros(blocks.programs + 1, dtype=torch.int64, device=device)
        torch.cumsum(block_counts, 0, out=offsets[1:])
        bounds = offsets[blocks.firsts].cpu()
        changed = int(bounds[-1])
        indices = torch.empty(changed, dtype=index_dtype, device=device)
        values = torch.empty(changed, dtype=dtype, device=device)
        if changed:
            _delta_write_kernel[(blocks.programs,)](
                *tables, offsets, indices, bits(values), **constants, **ELEMENT_OPTIONS
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
        plan = segments(dense, starts, ends, device, FEW_SLOTS)
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
            BLOCK=FEW_SLOTS,
            **SLOT_OPTIONS,
        )
