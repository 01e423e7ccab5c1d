"""Writes a compact buffer to the active elements of a list of tensors where it differs from another, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SLOT_OPTIONS, element_dtype, sizes_of
from .rounding import differs, round_nearest
from .segments import address_of, addresses, block_of, positions_of, segments


@triton.jit
def _load_rounded(compact, slots, mask, DENSE: tl.constexpr):
    """[BLOCK] of DENSE, from a buffer of that dtype or of fp32."""
    values = tl.load(compact + slots, mask=mask, other=0.0)
    if compact.dtype.element_ty == DENSE:
        return values
    else:
        return round_nearest(values, DENSE)


# Bytes per active element, with i that of an index: reads i and both elements; writes the 64-byte granules in which an
# element changes. The bandwidth bound is that times nnz over the copy rate.
@triton.jit(do_not_specialize=["dense_table", "start", "end"])
def _indexed_replace_kernel(
    dense_table,  # [n] int64 addresses, or the only tensor
    blocks,  # [programs, 2] int64, or None for one tensor
    indices,  # [nnz / RUN]
    index_bases,  # [nnz / FRAME + n] or None
    before,  # [nnz]
    after,  # [nnz]
    start: tl.int64,
    end: tl.int64,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    tensor, slots, mask = block_of(blocks, start, end, BLOCK)
    positions = positions_of(indices, index_bases, tensor, slots, mask, RUN)
    held = _load_rounded(before, slots, mask, DENSE)
    values = _load_rounded(after, slots, mask, DENSE)
    tl.store(address_of(dense_table, blocks, tensor, DENSE) + positions, values, mask=mask & differs(values, held))


def indexed_replace_(
    dense: Sequence[Tensor],
    before: Tensor,
    after: Tensor,
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    run_length: int = 1,
    index_bases: Tensor | None = None,
) -> None:
    """`sparse_opt.ops.indexed_replace_` in one launch."""
    if not dense:
        return
    device = indices.device
    with torch.cuda.device_of(indices):
        slots = sizes_of(device).swap_slots
        plan = segments(dense, starts, ends, device, slots)
        if not plan.programs:
            return
        _indexed_replace_kernel[(plan.programs,)](
            addresses("dense", dense, device),
            plan.blocks,
            indices,
            index_bases,
            before,
            after,
            plan.start,
            plan.end,
            DENSE=element_dtype(dense),
            BLOCK=slots,
            RUN=run_length,
            **SLOT_OPTIONS,
        )
