"""Stochastic rounding of fp32 values to bf16 and fp16, reproducible from a seed, a step and an element.

Plain torch: what the fast backends must reproduce bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Philox4x32 multipliers and Weyl increments: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF


def _mul32(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a * b for 32-bit a, b held in int64, by 16-bit halves so that nothing overflows."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = 10) -> tuple[Tensor, ...]:
    """Four 32-bit words (in int64 tensors) for each counter; the key is the seed's low and high word."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(rounds):
        high0, low0 = _mul32(_MULTIPLIER_0, c0)
        high1, low1 = _mul32(_MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def random_words(seed: int, step: int, start: int, end: int, device: torch.device) -> tuple[Tensor, ...]:
    """The words r0..r3 of compact slots [start, end) at `step`. r0 rounds the parameter, r1 exp_avg, r2 exp_avg_sq."""
    slot = torch.arange(start, end, device=device, dtype=torch.int64)
    zero = torch.zeros_like(slot)
    return philox4x32(seed, (slot & _MASK32, slot >> 32, zero + (step & _MASK32), zero))


def stochastic_round(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Round fp32 `x` [n] to bf16 or fp16, up with probability (x - below) / (above - below).

    `random` [n] holds 32-bit words in int64. Values that are not finite, or past the largest finite value of the
    target, round as usual.
    """
    if dtype == torch.bfloat16:
        bits = x.view(torch.int32).to(torch.int64) & _MASK32
        rounded = (bits + (random & 0xFFFF)) >> 16
        rounded = (rounded - ((rounded & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)
        return torch.where(x.isfinite(), rounded, x.to(dtype))
    if dtype == torch.float16:
        nearest = x.to(dtype)
        bits = nearest.view(torch.int16)
        below = torch.where(nearest.float().abs() > x.abs(), bits - 1, bits)  # next value towards zero
        gap = (below + 1).view(dtype).float().abs() - below.view(dtype).float().abs()
        rest = x.abs() - below.view(dtype).float().abs()
        uniform = (random >> 8).float() * 2.0**-24
        rounded = torch.where(uniform * gap < rest, below + 1, below).view(dtype)
        return torch.where(x.abs() < torch.finfo(dtype).max, rounded, nearest)
    raise ValueError(f"stochastic rounding is for bfloat16 and float16, got {dtype}")
