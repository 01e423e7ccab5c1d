"""Exchange of the active elements of a list of tensors with a compact buffer, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SLOT_OPTIONS, TRITON_BITS_DTYPE, sizes_of
from .segments import address_of, bits, bits_addresses, block_of, positions_of, segments


# Bytes per active element, with i and b those of an index and an element: reads i + b and the 64-byte granules of the
# dense tensors; writes, if the two differ, b and those granules. int32 indices and 2-byte elements at density d:
# 8 + 4 hit(d) / d, as in steps.py. The bandwidth bound is that times nnz over the copy rate.
@triton.jit(do_not_specialize=["dense_table", "start", "end"])
def _indexed_swap_kernel(
    dense_table,  # [n] int64 addresses, or the bits of the only tensor
    blocks,  # [programs, 2] int64, or None for one tensor
    indices,  # [nnz / RUN]
    index_bases,  # [nnz / FRAME + n] or None
    compact,  # [nnz] bits
    start: tl.int64,
    end: tl.int64,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    tensor, slots, mask = block_of(blocks, start, end, BLOCK)
    positions = positions_of(indices, index_bases, tensor, slots, mask, RUN)
    dense_at = address_of(dense_table, blocks, tensor, BITS) + positions
    outside = tl.load(compact + slots, mask=mask, other=0)
    held = tl.load(dense_at, mask=mask, other=0)
    # Base weights differ from the model's in few bits for much of a run, and a store to a scattered element is
    # expensive.
    changed = mask & (outside != held)
    tl.store(dense_at, outside, mask=changed)
    tl.store(compact + slots, held, mask=changed)


def indexed_swap_(
    dense: Sequence[Tensor],
    compact: Tensor,
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    run_length: int = 1,
    index_bases: Tensor | None = None,
) -> None:
    """`sparse_opt.ops.indexed_swap_` in one launch."""
    if not dense:
        return
    device = indices.device
    with torch.cuda.device_of(indices):
        slots = sizes_of(device).swap_slots
        plan = segments(dense, starts, ends, device, slots)
        if not plan.programs:
            return
        _indexed_swap_kernel[(plan.programs,)](
            bits_addresses("dense", dense, device),
            plan.blocks,
            indices,
            index_bases,
            bits(compact),
            plan.start,
            plan.end,
            BITS=TRITON_BITS_DTYPE[compact.element_size()],
            BLOCK=slots,
            RUN=run_length,
            **SLOT_OPTIONS,
        )
