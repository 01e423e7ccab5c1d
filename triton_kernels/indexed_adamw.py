"""AdamW on the active elements of a list of tensors, in two launches: the scalars of each tensor, then the elements."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gradient import load_gradient, scale_gradient
from .launch import FEW_SLOTS, SLOT_OPTIONS, element_dtype
from .rounding import differs, philox_key, random_words, round_nearest, round_stochastic, widen
from .segments import address_of, addresses, block_of, positions_of, segments


@triton.jit
def _powers(a, b, n):
    """a**n and b**n in fp64 by repeated squaring, n >= 0."""
    a_power = a * 0.0 + 1.0
    b_power = b * 0.0 + 1.0
    while n > 0:
        odd = (n & 1) == 1
        a_power = tl.where(odd, a_power * a, a_power)
        b_power = tl.where(odd, b_power * b, b_power)
        a = a * a
        b = b * b
        n = n >> 1
    return a_power, b_power


# By one program for each tensor, once: they would be what every program of a step waits for. In fp64, since 1 - beta^t
# loses its digits in fp32 at small t.
@triton.jit(do_not_specialize=["beta1_bits", "beta2_bits", "weight_decay"])
def _adamw_scalars_kernel(
    scalars,  # [n, 3] fp32: decay, sqrt(1 - beta2^step), lr / (1 - beta1^step)
    lr,  # [1]
    steps,  # [n]
    beta1_bits: tl.int64,
    beta2_bits: tl.int64,
    weight_decay,
):
    tensor = tl.program_id(0)
    rate = tl.load(lr)
    step = tl.load(steps + tensor).to(tl.int64)
    beta1_power, beta2_power = _powers(
        beta1_bits.to(tl.int64).to(tl.float64, bitcast=True), beta2_bits.to(tl.int64).to(tl.float64, bitcast=True), step
    )
    tl.store(scalars + 3 * tensor, 1.0 - rate * weight_decay)
    tl.store(scalars + 3 * tensor + 1, tl.sqrt(1.0 - beta2_power).to(tl.float32))
    tl.store(scalars + 3 * tensor + 2, (rate.to(tl.float64) / (1.0 - beta1_power)).to(tl.float32))


# Bytes per active element, with i, g, s and p those of an index, a gradient, a moment and a parameter:
#   read    i + g + 2 s, and the 64-byte granules of the parameters (of the gradients too where they are dense)
#   written 2 s, and the granules of the parameters again, those whose bits change; with fp32 masters 4 more of each
# int32 indices, fp32 gradients and moments, bf16 parameters at density d: 24 + 4 hit(d) / d, where
# hit(d) = 1 - (1 - d)^32 is the share of granules touched. The floor is that times nnz over the copy rate. With runs, i
# is an index's bytes over RUN; aligned ones of 32 bf16 and more are whole granules: 24 + 4 / RUN.
@triton.jit(
    do_not_specialize=[
        "param_table",
        "grad_table",
        "start",
        "end",
        "lerp_factor",
        "beta2",
        "one_minus_beta2",
        "eps",
        "key",
    ]
)
def _indexed_adamw_kernel(
    param_table,  # [n] int64 addresses, or the tensor where there is one
    grad_table,  # likewise, or None
    blocks,  # [programs, 2] int64, or None where there is one tensor
    indices,  # [nnz / RUN]
    index_bases,  # [nnz / FRAME + n] or None
    exp_avg,  # [nnz]
    exp_avg_sq,  # [nnz]
    grad,  # [nnz] or None
    master,  # [nnz] or None
    scalars,  # [n, 3] fp32
    steps,  # [n]
    clip_coef,  # [1] or None
    grad_scale,  # [1] or None
    found_inf,  # [1] or None
    start: tl.int64,
    end: tl.int64,
    lerp_factor,  # of exp_avg: see _lerp_factor
    beta2,
    one_minus_beta2,
    eps,
    key: tl.int32,  # of philox_key
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
    m = widen(tl.load(exp_avg + slots, mask=mask, other=0.0, eviction_policy="evict_first"))
    v = widen(tl.load(exp_avg_sq + slots, mask=mask, other=0.0, eviction_policy="evict_first"))
    held = tl.load(param_at, mask=mask, other=0.0)
    if master is not None:
        p = tl.load(master + slots, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        p = widen(held)

    decay = tl.load(scalars + 3 * tensor)
    sqrt_bias_correction2 = tl.load(scalars + 3 * tensor + 1)
    step_size = tl.load(scalars + 3 * tensor + 2)

    g = scale_gradient(g, grad_scale, clip_coef)
    p = p * decay
    m = tl.where(lerp_factor > 0.0, m, g) + (g - m) * lerp_factor
    v = v * beta2 + (g * g) * one_minus_beta2
    denom = tl.div_rn(tl.sqrt_rn(v), sqrt_bias_correction2) + eps
    p = p - tl.div_rn(m, denom) * step_size

    MOMENT: tl.constexpr = exp_avg.dtype.element_ty
    stored = round_nearest(p, PARAM)
    if STOCHASTIC:
        r0, r1, r2 = random_words(key, slots, tl.load(steps + tensor).to(tl.int64))
        tl.store(exp_avg + slots, round_stochastic(m, MOMENT, r1), mask=mask, eviction_policy="evict_first")
        tl.store(exp_avg_sq + slots, round_stochastic(v, MOMENT, r2), mask=mask, eviction_policy="evict_first")
        if master is None:
            stored = round_stochastic(p, PARAM, r0)
    else:
        tl.store(exp_avg + slots, round_nearest(m, MOMENT), mask=mask, eviction_policy="evict_first")
        tl.store(exp_avg_sq + slots, round_nearest(v, MOMENT), mask=mask, eviction_policy="evict_first")
    if master is not None:
        tl.store(master + slots, p, mask=mask, eviction_policy="evict_first")
    # Stores to single elements all over memory are the dearest part of a step, and few of them change a bit.
    tl.store(param_at, stored, mask=mask & differs(stored, held))


def _float64_bits(x: float) -> int:
    """A kernel takes a Python float as fp32 and an int as it is."""
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits


def _lerp_factor(weight: float) -> float:
    """The factor of g - m in torch.lerp(m, g, weight): added to m if it is positive, to g if not.

    torch.lerp (ATen/native/Lerp.h) is m + (g - m) * weight for a weight below 1/2, else g - (g - m) * (1 - weight).
    """
    (rounded,) = struct.unpack("<f", struct.pack("<f", weight))
    return rounded if rounded < 0.5 else -(1.0 - rounded)


def indexed_adamw_(
    params: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    steps: Tensor,
    *,
    grad: Tensor | None = None,
    dense_grads: Sequence[Tensor] | None = None,
    master: Tensor | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip_coef: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    run_length: int = 1,
    index_bases: Tensor | None = None,
) -> None:
    """`sparse_opt.ops.indexed_adamw_` in two launches."""
    if not params:
        return
    device = indices.device
    with torch.cuda.device_of(indices):
        plan = segments(params, starts, ends, device, FEW_SLOTS)
        if not plan.programs:
            return
        scalars = torch.empty(3 * len(params), dtype=torch.float32, device=device)
        _adamw_scalars_kernel[(len(params),)](
            scalars, lr, steps, _float64_bits(beta1), _float64_bits(beta2), float(weight_decay), **SLOT_OPTIONS
        )
        _indexed_adamw_kernel[(plan.programs,)](
            addresses("params", params, device),
            None if dense_grads is None else addresses("dense_grads", dense_grads, device),
            plan.blocks,
            indices,
            index_bases,
            exp_avg,
            exp_avg_sq,
            grad,
            master,
            scalars,
            steps,
            clip_coef,
            grad_scale,
            found_inf,
            plan.start,
            plan.end,
            _lerp_factor(1.0 - beta1),
            float(beta2),
            1.0 - beta2,
            float(eps),
            philox_key(seed),
            PARAM=element_dtype(params),
            GRAD=None if dense_grads is None else element_dtype(dense_grads),
            STOCHASTIC=stochastic_rounding,
            BLOCK=FEW_SLOTS,
            RUN=run_length,
            **SLOT_OPTIONS,
        )
