"""Reference implementation of every op in plain torch: defines the results, and is the oracle of the tests.

A call takes n dense tensors and flat compact buffers over all of them. Segment i, the compact slots
[starts[i], ends[i]), belongs to dense tensor i; `indices` holds positions in that tensor, flattened, each the first of
`run_length` consecutive ones, or an offset from one of `index_bases`. Arithmetic is fp32 for every storage dtype, and
each operation is rounded separately, so that every backend can give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..tensors import as_bits
from .narrow import widened
from .rounding import random_words, stochastic_round


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


def _gradient(
    i: int,
    where: slice,
    positions: Tensor,
    grad: Tensor | None,
    dense_grads: Sequence[Tensor] | None,
    grad_scale: Tensor | None,
    clip_coef: Tensor | None,
) -> Tensor:
    if dense_grads is not None:
        g = dense_grads[i].view(-1)[positions].float()
    else:
        assert grad is not None  # the argument check requires exactly one of the two
        g = grad[where].float()
    if grad_scale is not None:
        g = g / grad_scale
    if clip_coef is not None:
        g = g * clip_coef
    return g


def _store(target: Tensor, where: slice | Tensor, value: Tensor, random: Tensor | None) -> None:
    if random is not None and target.dtype != torch.float32:
        target[where] = stochastic_round(value, target.dtype, random)
    else:
        target[where] = value.to(target.dtype)


def _lerp(m: Tensor, g: Tensor, weight: float) -> Tensor:
    """Compute torch.lerp from `m` to `g` with each operation rounded separately, as in ATen/native/Lerp.h.

    The sum starts at the nearer end: from `m` with a weight near 1, g - m would round a small `g` away, and the result
    for weight 1 would not be `g`.
    """
    weight = torch.tensor(weight, dtype=torch.float32, device="cpu").item()
    return m + (g - m) * weight if weight < 0.5 else g - (g - m) * (1.0 - weight)


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
    if found_inf is not None and found_inf.item() != 0:
        return
    decay = 1.0 - lr.float() * weight_decay
    for i, where, param, positions in _segments(params, indices, starts, ends, run_length, index_bases):
        t = int(steps[i].item())
        # lr / (1 - beta1^t) and sqrt(1 - beta2^t) in fp64: 1 - beta^t loses its digits in fp32 at small t.
        step_size = (lr.double() / (1.0 - beta1**t)).float()
        sqrt_bias_correction2 = torch.tensor(math.sqrt(1.0 - beta2**t), dtype=torch.float32, device=lr.device)
        g = _gradient(i, where, positions, grad, dense_grads, grad_scale, clip_coef)
        r = random_words(seed, t, where.start, where.stop, g.device) if stochastic_rounding else (None,) * 3
        p = param[positions].float() if master is None else master[where]
        m, v = exp_avg[where].float(), exp_avg_sq[where].float()

        p = p * decay
        m = _lerp(m, g, 1.0 - beta1)
        v = v * beta2 + (g * g) * (1.0 - beta2)
        # In fp64 and then rounded, which gives the correctly rounded root; torch's fp32 sqrt on a CPU does not.
        denom = v.double().sqrt().float() / sqrt_bias_correction2 + eps
        p = p - (m / denom) * step_size

        _store(exp_avg, where, m, r[1])
        _store(exp_avg_sq, where, v, r[2])
        if master is not None:
            master[where] = p
        _store(param, positions, p, r[0] if master is None else None)


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
    if found_inf is not None and found_inf.item() != 0:
        return
    for i, where, param, positions in _segments(params, indices, starts, ends, run_length, index_bases):
        t = int(steps[i].item())
        g = _gradient(i, where, positions, grad, dense_grads, grad_scale, clip_coef)
        r = random_words(seed, t, where.start, where.stop, g.device) if stochastic_rounding else (None,) * 3
        p = param[positions].float() if master is None else master[where]

        if weight_decay != 0.0:
            g = g + p * weight_decay
        if momentum_buffer is not None and momentum != 0.0:
            b = g if t == 1 else momentum_buffer[where].float() * momentum + g * (1.0 - dampening)
            g = g + b * momentum if nesterov else b
            _store(momentum_buffer, where, b, r[1])
        p = p - g * lr

        if master is not None:
            master[where] = p
        _store(param, positions, p, r[0] if master is None else None)


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
    if sum_sq is not None:
        sum_sq.zero_()
    for i, where, tensor, positions in _segments(dense, indices, starts, ends, run_length, index_bases):
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
    out: Tensor,
    grad_outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tiles: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    tile_size: int,
    scale: Tensor | None = None,
    accumulate: bool = False,
    sum_sq: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    if sum_sq is not None:
        sum_sq.zero_()
    table = tiles.tolist()
    for i, (grad_output, x) in enumerate(zip(grad_outputs, inputs, strict=True)):
        grad_output, x = grad_output.flatten(0, -2).float(), x.flatten(0, -2).float()
        for row, column, slot, stride in table[starts[i] : ends[i]]:
            g = grad_output[:, row : row + tile_size].T @ x[:, column : column + tile_size]
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
    for _, where, tensor, positions in _segments(dense, indices, starts, ends, run_length, index_bases):
        bits, compact_bits = as_bits(tensor), as_bits(compact)
        held = bits[positions]
        bits[positions] = compact_bits[where]
        compact_bits[where] = held


def delta_encode(old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    index_dtype = torch.int64 if any(t.numel() > 2**31 - 1 for t in new) else torch.int32
    positions = [(as_bits(a) != as_bits(b)).nonzero().view(-1) for a, b in zip(old, new, strict=True)]
    values = [as_bits(b)[p].view(b.dtype) for b, p in zip(new, positions, strict=True)]
    counts = torch.tensor([p.numel() for p in positions], dtype=torch.int64, device="cpu")
    return torch.cat(positions).to(index_dtype), torch.cat(values), counts


def delta_apply_(
    dense: Sequence[Tensor], indices: Tensor, values: Tensor, starts: Sequence[int], ends: Sequence[int]
) -> None:
    for _, where, tensor, positions in _segments(dense, indices, starts, ends):
        as_bits(tensor)[positions] = as_bits(values)[where]
