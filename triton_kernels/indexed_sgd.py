"""SGD on the active elements of a list of tensors, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gradient import load_gradient, scale_gradient
from .launch import FEW_SLOTS, SLOT_OPTIONS, element_dtype
from .rounding import differs, philox_key, random_words, round_nearest, round_stochastic, widen
from .segments import address_of, addresses, block_of, positions_of, segments


# Bytes per active element, with i, g and s those of an index, a gradient and a momentum: read i + g + s and the
# 64-byte granules of the parameters, written s and of those granules the ones whose bits change; with fp32 masters 4
# more of each. int32 indices, fp32 gradients and momentum, bf16 parameters at density d: 16 + 4 hit(d) / d, as
# in indexed_adamw.py. The floor is that times nnz over the copy rate.
@triton.jit(
    do_not_specialize=[
        "param_table",
        "grad_table",
        "start",
        "end",
        "momentum",
        "one_minus_dampening",
        "weight_decay",
        "key",
    ]
)
def _indexed_sgd_kernel(
    param_table,  # [n] int64 addresses, or the tensor where there is one
    grad_table,  # likewise, or None
    blocks,  # [programs, 2] int64, or None where there is one tensor
    indices,  # [nnz / RUN]
    index_bases,  # [nnz / FRAME + n] or None
    momentum_buffer,  # [nnz] or None
    grad,  # [nnz] or None
    master,  # [nnz] or None
    lr,  # [1]
    steps,  # [n]
    clip_coef,  # [1] or None
    grad_scale,  # [1] or None
    found_inf,  # [1] or None
    start: tl.int64,
    end: tl.int64,
    momentum,
    one_minus_dampening,
    weight_decay,
    key: tl.int32,  # of philox_key
    NESTEROV: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    tensor, slots, mask = block_of(blocks, start, end, BLOCK)
    if found_inf is not None:
        mask = mask & (tl.zeros([BLOCK], tl.float32) == tl.load(found_inf))
    positions = positions_of(indices, index_bases, tensor, slots, mask, RUN)
    param_at = address_of(param_table, blocks, tensor, PARAM) + positions
    g = load_gradient(grad, grad_table, blocks, tensor, slots, positions, mask, GRAD)
    step = tl.load(steps + tensor).to(tl.int64)
    if momentum_buffer is not None:
        b = widen(tl.load(momentum_buffer + slots, mask=mask, other=0.0, eviction_policy="evict_first"))
    held = tl.load(param_at, mask=mask, other=0.0)
    if master is not None:
        p = tl.load(master + slots, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        p = widen(held)
    rate = tl.load(lr)

    g = scale_gradient(g, grad_scale, clip_coef)
    g = tl.where(weight_decay != 0.0, g + p * weight_decay, g)
    if STOCHASTIC:
        r0, r1, _ = random_words(key, slots, step)
    if momentum_buffer is not None:
        b = tl.where(step == 1, g, b * momentum + g * one_minus_dampening)
        if NESTEROV:
            g = g + b * momentum
        else:
            g = b
        MOMENT: tl.constexpr = momentum_buffer.dtype.element_ty
        if STOCHASTIC:
            b = round_stochastic(b, MOMENT, r1)
        else:
            b = round_nearest(b, MOMENT)
        tl.store(momentum_buffer + slots, b, mask=mask, eviction_policy="evict_first")
    p = p - g * rate

    if master is not None:
        tl.store(master + slots, p, mask=mask, eviction_policy="evict_first")
    stored = round_nearest(p, PARAM)
    if STOCHASTIC:
        if master is None:
            stored = round_stochastic(p, PARAM, r0)
    tl.store(param_at, stored, mask=mask & differs(stored, held))


def indexed_sgd_(
    params: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    momentum_buffer: Tensor | None,
    lr: Tensor,
    steps: Tensor,
    *,
    grad: Tensor | None = None,
    dense_grads: Sequence[Tensor] | None = None,
    master: Tensor | None = None,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_coef: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    run_length: int = 1,
    index_bases: Tensor | None = None,
) -> None:
    """`sparse_opt.ops.indexed_sgd_` in one launch."""
    if not params:
        return
    device = indices.device
    with torch.cuda.device_of(indices):
        plan = segments(params, starts, ends, device, FEW_SLOTS)
        if not plan.programs:
            return
        _indexed_sgd_kernel[(plan.programs,)](
            addresses("params", params, device),
            None if dense_grads is None else addresses("dense_grads", dense_grads, device),
            plan.blocks,
            indices,
            index_bases,
            momentum_buffer if momentum != 0.0 else None,
            grad,
            master,
            lr,
            steps,
            clip_coef,
            grad_scale,
            found_inf,
            plan.start,
            plan.end,
            float(momentum),
            1.0 - dampening,
            float(weight_decay),
            philox_key(seed),
            NESTEROV=nesterov,
            PARAM=element_dtype(params),
            GRAD=None if dense_grads is None else element_dtype(dense_grads),
            STOCHASTIC=stochastic_rounding,
            BLOCK=FEW_SLOTS,
            RUN=run_length,
            **SLOT_OPTIONS,
        )
