"""An optimizer step on the active elements of a list of tensors: load, apply a rule, round and store, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SLOT_OPTIONS, STEP_SLOTS, element_dtype
from .rounding import differs, philox_key, random_words, round_nearest, round_stochastic, widen
from .segments import address_of, addresses, block_of, positions_of, segments
from .step_rules import RULES


@triton.jit
def _load_gradient(grad, grad_table, blocks, tensor, slots, positions, mask, GRAD: tl.constexpr):
    """[BLOCK] fp32, from the compact buffer or from the dense gradient at `positions`."""
    if grad_table is None:
        return widen(tl.load(grad + slots, mask=mask, other=0.0, eviction_policy="evict_first"))
    else:
        return widen(tl.load(address_of(grad_table, blocks, tensor, GRAD) + positions, mask=mask, other=0.0))


@triton.jit
def _load_state(state, slots, mask, BLOCK: tl.constexpr):
    """[BLOCK] fp32; zeros for an op without this state."""
    if state is None:
        return tl.zeros([BLOCK], tl.float32)
    else:
        return widen(tl.load(state + slots, mask=mask, other=0.0, eviction_policy="evict_first"))


@triton.jit
def _store_nearest(state, slots, mask, value):
    if state is not None:
        rounded = round_nearest(value, state.dtype.element_ty)
        tl.store(state + slots, rounded, mask=mask, eviction_policy="evict_first")


@triton.jit
def _store_stochastic(state, slots, mask, value, random):
    if state is not None:
        rounded = round_stochastic(value, state.dtype.element_ty, random)
        tl.store(state + slots, rounded, mask=mask, eviction_policy="evict_first")


def _kernel_name(specialization: Any) -> str:
    """The name that profilers show, with the rule's."""
    return f"_step_kernel{specialization.constants['RULE'].__name__}"


# Bytes per active element, with i, g, s and p those of an index, a gradient, all its states and a parameter:
#   read    i + g + s, and the 64-byte granules of the parameters (of the gradients too where they are dense)
#   written s, and the granules of the parameters again, those whose bits change; with fp32 masters 4 more of each
# int32 indices, fp32 gradients and states, bf16 parameters at density d: 8 + 8 states + 4 hit(d) / d, where
# hit(d) = 1 - (1 - d)^32 is the share of granules touched: AdamW 24 + 4 hit(d) / d, SGD 16 + 4 hit(d) / d. The
# bandwidth bound is that times nnz over the copy rate. With `weights` or HOLD_MASTER no granule is read. With runs, i
# is an index's bytes over RUN; aligned ones of 32 bf16 and more are whole granules: 24 + 4 / RUN.
@triton.jit(do_not_specialize=["param_table", "grad_table", "start", "end", "key"], repr=_kernel_name)
def _step_kernel(
    param_table,  # [n] int64 addresses, or the tensor where there is one
    grad_table,  # likewise, or None
    blocks,  # [programs, 2] int64, or None where there is one tensor
    indices,  # [nnz / RUN]
    index_bases,  # [nnz / FRAME + n] or None
    state0,  # [nnz] or None
    state1,  # [nnz] or None
    grad,  # [nnz] or None
    master,  # [nnz] or None
    weights,  # [nnz] or None
    scalars,  # [n, WIDTH] fp32 or None
    lr,  # [1]
    steps,  # [n]
    clip_coef,  # [1] or None
    grad_scale,  # [1] or None
    found_inf,  # [1] or None
    start: tl.int64,
    end: tl.int64,
    factors,  # fp32 numbers of the rule
    key: tl.int32,  # of philox_key
    RULE: tl.constexpr,
    WIDTH: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HOLD_MASTER: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    tensor, slots, mask = block_of(blocks, start, end, BLOCK)
    if found_inf is not None:
        mask = mask & (tl.zeros([BLOCK], tl.float32) == tl.load(found_inf))
    positions = positions_of(indices, index_bases, tensor, slots, mask, RUN)
    param_at = address_of(param_table, blocks, tensor, PARAM) + positions
    g = _load_gradient(grad, grad_table, blocks, tensor, slots, positions, mask, GRAD)
    s0 = _load_state(state0, slots, mask, BLOCK)
    s1 = _load_state(state1, slots, mask, BLOCK)
    if weights is not None:
        held = tl.load(weights + slots, mask=mask, other=0.0, eviction_policy="evict_first")
    elif not HOLD_MASTER:
        held = tl.load(param_at, mask=mask, other=0.0)
    if master is not None:
        p = tl.load(master + slots, mask=mask, other=0.0, eviction_policy="evict_first")
        if HOLD_MASTER:
            held = round_nearest(p, PARAM)
    else:
        p = widen(held)

    if grad_scale is not None:
        g = tl.div_rn(g, tl.load(grad_scale))
    if clip_coef is not None:
        g = g * tl.load(clip_coef)
    if scalars is not None:
        scalars += WIDTH * tensor
    p, s0, s1 = RULE(p, g, s0, s1, factors, scalars, lr, steps, tensor)

    stored = round_nearest(p, PARAM)
    if STOCHASTIC:
        r0, r1, r2 = random_words(key, slots, tl.load(steps + tensor).to(tl.int64))
        _store_stochastic(state0, slots, mask, s0, r1)
        _store_stochastic(state1, slots, mask, s1, r2)
        if master is None:
            stored = round_stochastic(p, PARAM, r0)
    else:
        _store_nearest(state0, slots, mask, s0)
        _store_nearest(state1, slots, mask, s1)
    if master is not None:
        tl.store(master + slots, p, mask=mask, eviction_policy="evict_first")
    if weights is not None:
        tl.store(weights + slots, stored, mask=mask, eviction_policy="evict_first")
    # Stores to scattered elements are the most expensive part of a step, and few of them change a bit.
    tl.store(param_at, stored, mask=mask & differs(stored, held))


def step(
    name: str,
    params: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *states_lr_steps: Any,
    grad: Tensor | None = None,
    dense_grads: Sequence[Tensor] | None = None,
    master: Tensor | None = None,
    weights: Tensor | None = None,
    params_hold_master: bool = False,
    clip_coef: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    run_length: int = 1,
    index_bases: Tensor | None = None,
    **options: Any,
) -> None:
    """Run step op `name` in one launch, after another one for the scalars of each tensor if its rule has some."""
    if not params:
        return
    *states, lr, steps = states_lr_steps
    rule = RULES[name](*states, **options)
    device = indices.device
    with torch.cuda.device_of(indices):
        plan = segments(params, starts, ends, device, STEP_SLOTS)
        if not plan.programs:
            return
        scalars, width = None, 0
        if rule.scalars is not None:
            kernel, width, arguments = rule.scalars
            scalars = torch.empty(width * len(params), dtype=torch.float32, device=device)
            kernel[(len(params),)](scalars, lr, steps, *arguments, **SLOT_OPTIONS)
        state0, state1 = (*rule.states, None)[:2]
        _step_kernel[(plan.programs,)](
            addresses("params", params, device),
            None if dense_grads is None else addresses("dense_grads", dense_grads, device),
            plan.blocks,
            indices,
            index_bases,
            state0,
            state1,
            grad,
            master,
            weights,
            scalars,
            lr,
            steps,
            clip_coef,
            grad_scale,
            found_inf,
            plan.start,
            plan.end,
            rule.factors,
            philox_key(seed),
            RULE=rule.update,
            WIDTH=width,
            PARAM=element_dtype(params),
            GRAD=None if dense_grads is None else element_dtype(dense_grads),
            STOCHASTIC=stochastic_rounding,
            HOLD_MASTER=params_hold_master,
            BLOCK=STEP_SLOTS,
            RUN=run_length,
            **SLOT_OPTIONS,
        )
