"""Reference implementation of every op in plain torch: defines the results, and is the oracle of the tests.

A call takes n dense tensors and flat compact buffers over all of them. Segment i, the compact slots
[starts[i], ends[i]), belongs to dense tensor i; `indices` holds positions in that tensor, flattened, each the first of
`run_length` consecutive ones, or an offset from one of `index_bases`. Arithmetic is fp32 for every storage dtype, and
each operation is rounded separately, so that every backend can give the same bits. The arithmetic of the optimizer
steps is in step_ops.py. The arguments of the ops have the types of schemas.py; `layout` is `run_length` and
`index_bases`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..tensors import as_bits
from .narrow import widened
from .rounding import random_words, stochastic_round
from .step_ops import STEP_OPS, StepOp


def _segments(
    dense: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    run_length: int = 1,
    index_bases: Tensor | None = None,
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield (i, compact slice, flat dense tensor, int64 positions in it) for each non-empty segment."""
    within_run = torch.arange(run_length, device=indices.device)
    for i, (tensor, start, end) in enumerate(zip(dense, starts, ends, strict=True)):
        if end > start and index_bases is not None:
            yield i, slice(start, end), tensor.view(-1), widened(indices, index_bases, i, start, end).long()
        elif end > start:
            runs = indices[start // run_length : end // run_length].long()
            yield i, slice(start, end), tensor.view(-1), (runs[:, None] + within_run).view(-1)


def _store(target: Tensor, where: slice | Tensor, value: Tensor, random: Tensor | None) -> None:
    if random is not None and target.dtype != torch.float32:
        target[where] = stochastic_round(value, target.dtype, random)
    else:
        target[where] = value.to(target.dtype)


def _step(
    op: StepOp,
    params,
    indices,
    starts,
    ends,
    *states_lr_steps,
    grad,
    dense_grads,
    master,
    weights,
    params_hold_master,
    clip_coef,
    grad_scale,
    found_inf,
    stochastic_rounding,
    seed,
    run_length,
    index_bases,
    **options,
) -> None:
    """A step op: `op.update` on the active elements of each tensor."""
    *states, lr, steps = states_lr_steps
    if found_inf is not None and found_inf.item() != 0:
        return
    used = op.used_states(options)
    states = [state if name in used else None for name, state in zip(op.states, states, strict=True)]
    for i, where, param, positions in _segments(params, indices, starts, ends, run_length, index_bases):
        step = int(steps[i].item())
        g = (grad[where] if dense_grads is None else dense_grads[i].view(-1)[positions]).float()
        if grad_scale is not None:
            g = g / grad_scale
        if clip_coef is not None:
            g = g * clip_coef
        if master is not None:
            p = master[where]
            held = p.to(param.dtype, copy=True) if params_hold_master else param[positions]
        else:
            held = param[positions] if weights is None else weights[where]
            p = held.float()
        old = [None if state is None else state[where].float() for state in states]

        p, *new = op.update(p, g, *old, lr=lr, step=step, **options)

        words = random_words(seed, step, where.start, where.stop, g.device) if stochastic_rounding else (None,) * 3
        for state, value, random in zip(states, new, words[1:], strict=False):
            if state is not None:
                _store(state, where, value, random)
        if master is not None:
            master[where] = p
        stored = held.clone()
        _store(stored, slice(None), p, words[0] if master is None else None)
        changed = as_bits(stored) != as_bits(held)
        param[positions[changed]] = stored[changed]
        if weights is not None:
            weights[where] = stored


def masked_grad_gather_(
    out, dense, indices, starts, ends, *, scale=None, accumulate=False, sum_sq=None, found_inf=None, **layout
) -> None:
    if sum_sq is not None:
        sum_sq.zero_()
    for i, where, tensor, positions in _segments(dense, indices, starts, ends, **layout):
        g = tensor[positions].float()
        if scale is not None:
            g = g * scale
        if accumulate:
            g = out[where].float() + g
        out[where] = g.to(out.dtype)
        stored = out[where].float()
        if sum_sq is not None:
            sum_sq[i] = (stored * stored).sum()
        if found_inf is not None and not stored.isfinite().all():
            found_inf.fill_(math.inf)


def tile_weight_grad_(
    out,
    grad_outputs,
    inputs,
    tiles,
    starts,
    ends,
    *,
    tile_size,
    scale=None,
    accumulate=False,
    sum_sq=None,
    found_inf=None,
    token_offsets=None,
) -> None:
    if sum_sq is not None:
        sum_sq.zero_()
    table = tiles.tolist()
    offsets = None if token_offsets is None else [0, *token_offsets.tolist()]
    for i, (grad_output, x) in enumerate(zip(grad_outputs, inputs, strict=True)):
        grad_output, x = grad_output.flatten(0, -2).float(), x.flatten(0, -2).float()
        for row, column, slot, stride in table[starts[i] : ends[i]]:
            expert, row = divmod(row, grad_output.shape[1])
            tokens = slice(None) if offsets is None else slice(offsets[expert], offsets[expert + 1])
            g = grad_output[tokens, row : row + tile_size].T @ x[tokens, column : column + tile_size]
            where = out.as_strided(g.shape, (stride, 1), out.storage_offset() + slot)
            if scale is not None:
                g = g * scale
            if accumulate:
                g = where.float() + g
            where.copy_(g)
            stored = where.float()
            if sum_sq is not None:
                sum_sq[i] += (stored * stored).sum()
            if found_inf is not None and not stored.isfinite().all():
                found_inf.fill_(math.inf)


def indexed_swap_(dense, compact, indices, starts, ends, **layout) -> None:
    for _, where, tensor, positions in _segments(dense, indices, starts, ends, **layout):
        bits, compact_bits = as_bits(tensor), as_bits(compact)
        held = bits[positions]
        bits[positions] = compact_bits[where]
        compact_bits[where] = held


def indexed_replace_(dense, before, after, indices, starts, ends, **layout) -> None:
    for _, where, tensor, positions in _segments(dense, indices, starts, ends, **layout):
        bits, new = as_bits(tensor), as_bits(after[where].to(tensor.dtype))
        changed = new != as_bits(before[where].to(tensor.dtype))
        bits[positions[changed]] = new[changed]


def delta_encode(old, new) -> tuple[Tensor, Tensor, Tensor]:
    index_dtype = torch.int64 if any(t.numel() > 2**31 - 1 for t in new) else torch.int32
    positions = [(as_bits(a) != as_bits(b)).nonzero().view(-1) for a, b in zip(old, new, strict=True)]
    values = [as_bits(b)[p].view(b.dtype) for b, p in zip(new, positions, strict=True)]
    counts = torch.tensor([p.numel() for p in positions], dtype=torch.int64, device="cpu")
    return torch.cat(positions).to(index_dtype), torch.cat(values), counts


def delta_apply_(dense, indices, values, starts, ends) -> None:
    for _, where, tensor, positions in _segments(dense, indices, starts, ends):
        as_bits(tensor)[positions] = as_bits(values)[where]


globals().update({name: functools.partial(_step, op) for name, op in STEP_OPS.items()})
