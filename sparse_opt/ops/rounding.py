"""Stochastic rounding of fp32 values to bf16 and fp16, reproducible from a seed, a step and an element.

This is the reference in plain torch; the fast backends reproduce it bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Philox2x32: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, who find 7 rounds to pass BigCrush.
_MULTIPLIER, _WEYL = 0xD256D193, 0x9E3779B9
_ROUNDS = 7
# Multipliers that mix the high word of the seed into the 32-bit key, and the high word of the slot into the step.
_SEED_HIGH, _SLOT_HIGH = 0xBB67AE85, 0x85EBCA6B
_MASK32 = 0xFFFFFFFF


def _mul32(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low words of a * b for 32-bit a and b stored as int64, in 16-bit halves to avoid overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox2x32(key: Tensor, counter: tuple[Tensor, Tensor], rounds: int = _ROUNDS) -> tuple[Tensor, Tensor]:
    """Return two 32-bit words (in int64 tensors) for each counter."""
    c0, c1 = counter
    for _ in range(rounds):
        high, low = _mul32(_MULTIPLIER, c0)
        c0, c1 = high ^ key ^ c1, low
        key = (key + _WEYL) & _MASK32
    return c0, c1


def random_words(seed: int, step: int, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random words of compact slots [start, end): for the parameter (32 bits), exp_avg, exp_avg_sq (low 16)."""
    slot = torch.arange(start, end, device=device, dtype=torch.int64)
    key = torch.full_like(slot, ((seed & _MASK32) + (seed >> 32) * _SEED_HIGH) & _MASK32)
    step_word = ((step & _MASK32) + (slot >> 32) * _SLOT_HIGH) & _MASK32
    param, moments = philox2x32(key, (slot & _MASK32, step_word))
    return param, moments, moments >> 16


def stochastic_round(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Round fp32 `x` [n] to bf16 or fp16, up with probability (x - below) / (above - below).

    `random` [n] holds 32-bit words in int64. A finite value stays finite: values beyond the largest finite value of the
    target are rounded to it. Infinities and NaNs do not change.
    """
    if dtype == torch.bfloat16:
        bits = x.view(torch.int32).to(torch.int64) & _MASK32
        below_largest = x.abs() < torch.finfo(dtype).max  # above it, a carry would give infinity
        rounded = (bits + torch.where(below_largest, random & 0xFFFF, 0)) >> 16
        rounded = (rounded - ((rounded & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)
        return torch.where(x.isfinite(), rounded, x.to(dtype))
    if dtype == torch.float16:
        nearest = x.to(dtype)
        bits = nearest.view(torch.int16)
        below = torch.where(nearest.float().abs() > x.abs(), bits - 1, bits)  # next value towards zero
        gap = (below + 1).view(dtype).float().abs() - below.view(dtype).float().abs()
        rest = x.abs() - below.view(dtype).float().abs()
        uniform = (random >> 8).float() * 2.0**-24
        # Beyond the largest finite value, `below` is that value, the gap is infinite, and nothing is rounded up.
        rounded = torch.where(uniform * gap < rest, below + 1, below).view(dtype)
        return torch.where(x.isfinite(), rounded, nearest)
    raise ValueError(f"stochastic rounding is for bfloat16 and float16, got {dtype}")
