"""Gather of gradients into a compact buffer, with their sums of squares and a non-finite flag from the same pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SLOT_OPTIONS, SLOTS, element_dtype
from .rounding import round_nearest, widen
from .segments import address_of, addresses, block_of, positions_of, segments


# Bytes per active element, with i and o those of an index and a slot of `out`: reads i and the 64-byte granules of the
# gradients (and o, to accumulate), writes o. int32 indices, fp32 slots and bf16 gradients at density d: 8 + 2 hit(d) /
# d, as in steps.py. The bandwidth bound is that times nnz over the copy rate.
@triton.jit(do_not_specialize=["dense_table", "start", "end"])
def _masked_grad_gather_kernel(
    dense_table,  # [n] int64 addresses, or the only tensor
    blocks,  # [programs, 2] int64, or None for one tensor
    indices,  # [nnz / RUN]
    index_bases,  # [nnz / FRAME + n] or None
    out,  # [nnz]
    scale,  # [1] or None
    partials,  # [programs] fp32 or None
    found_inf,  # [1] or None
    start: tl.int64,
    end: tl.int64,
    ACCUMULATE: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    tensor, slots, mask = block_of(blocks, start, end, BLOCK)
    positions = positions_of(indices, index_bases, tensor, slots, mask, RUN)
    g = widen(tl.load(address_of(dense_table, blocks, tensor, DENSE) + positions, mask=mask, other=0.0))
    if scale is not None:
        g = g * tl.load(scale)
    if ACCUMULATE:
        g = widen(tl.load(out + slots, mask=mask, other=0.0)) + g
    rounded = round_nearest(g, out.dtype.element_ty)
    tl.store(out + slots, rounded, mask=mask)
    stored = tl.where(mask, widen(rounded), 0.0)
    if partials is not None:
        tl.store(partials + tl.program_id(0), tl.sum(stored * stored, axis=0))
    if found_inf is not None:
        # Programs that race here write the same value.
        bad = tl.max((tl.abs(stored) < float("inf")).to(tl.int32) ^ 1, axis=0)
        tl.store(found_inf, float("inf"), mask=bad != 0)


# Reads 4 bytes per program of the gather and writes 4 per tensor, which is negligible. The additions have a fixed
# order; with atomics every run would give other bits.
@triton.jit(do_not_specialize=["count"])
def _sum_partials_kernel(
    partials,  # [programs] fp32
    firsts,  # [n + 1] int64, or None for one tensor
    count: tl.int64,  # programs of the one tensor
    sum_sq,  # [n]
    BLOCK: tl.constexpr,
):
    tensor = tl.program_id(0)
    if firsts is None:
        first = count * 0
        last = count + 0
    else:
        first = tl.load(firsts + tensor)
        last = tl.load(firsts + tensor + 1)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    while first < last:
        total += tl.load(partials + first + lane, mask=lane < last - first, other=0.0)
        first += BLOCK
    tl.store(sum_sq + tensor, tl.sum(total, axis=0))


def masked_grad_gather_(
    out: Tensor,
    dense: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    scale: Tensor | None = None,
    accumulate: bool = False,
    sum_sq: Tensor | None = None,
    found_inf: Tensor | None = None,
    run_length: int = 1,
    index_bases: Tensor | None = None,
) -> None:
    """`sparse_opt.ops.masked_grad_gather_` in one launch, and a second one over its partial sums for `sum_sq`."""
    if not dense:
        return
    device = indices.device
    with torch.cuda.device_of(indices):
        plan = segments(dense, starts, ends, device)
        if not plan.programs:
            if sum_sq is not None:
                sum_sq.zero_()
            return
        partials = None
        if sum_sq is not None:
            partials = torch.empty(plan.programs, dtype=torch.float32, device=device)
        _masked_grad_gather_kernel[(plan.programs,)](
            addresses("dense", dense, device),
            plan.blocks,
            indices,
            index_bases,
            out,
            scale,
            partials,
            found_inf,
            plan.start,
            plan.end,
            ACCUMULATE=accumulate,
            DENSE=element_dtype(dense),
            BLOCK=SLOTS,
            RUN=run_length,
            **SLOT_OPTIONS,
        )
        if sum_sq is not None:
            _sum_partials_kernel[(len(dense),)](
                partials, plan.firsts, plan.programs, sum_sq, BLOCK=SLOTS, **SLOT_OPTIONS
            )
