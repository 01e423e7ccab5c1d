"""Stochastic rounding of fp32 values to bf16 and fp16, reproducible from a seed, a step and an element.

Plain torch: what the fast backends must reproduce bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Philox2x32: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, who find 7 rounds to pass BigCrush.
_MULTIPLIER, _WEYL = 0xD256D193, 0x9E3779B9
_ROUNDS = 7
# What the high word of the seed adds to the key, and that of the slot to the step, which have only 32 bits.
_SEED_HIGH, _SLOT_HIGH = 0xBB67AE85, 0x85EBCA6B
_MASK32 = 0xFFFFFFFF


def _mul32(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a * b for 32-bit a, b held in int64, by 16-bit halves so that nothing overflows."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox2x32(key: Tensor, counter: tuple[Tensor, Tensor], rounds: int = _ROUNDS) -> tuple[Tensor, Tensor]:
    """Two 32-bit words (in int64 tensors) for each counter."""
    c0, c1 = counter
    for _ in range(rounds):
        high, low = _mul32(_MULTIPLIER, c0)
        c0, c1 = high ^ key ^ c1, low
        key = (key + _WEYL) & _MASK32
    return c0, c1


def random_words(seed: int, step: int, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What rounds the parameter (32 random bits), exp_avg and exp_avg_sq (the low 16) of compact slots [start, end)."""
    slot = torch.arange(start, end, device=device, dtype=torch.int64)
    key = torch.full_like(slot, ((seed & _MASK32) + (seed >> 32) * _SEED_HIGH) & _MASK32)
    step_word = ((step & _MASK32) + (slot >> 32) * _SLOT_HIGH) & _MASK32
    param, moments = philox2x32(key, (slot & _MASK32, step_word))
    return param, moments, moments >> 16


def stochastic_round(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Round fp32 `x` [n] to bf16 or fp16, up with probability (x - below) / (above - below).

    `random` [n] holds 32-bit words in int64. A finite value stays finite: past the largest finite value of the target
    it becomes that one. Infinities and NaNs stay what they are.
    """
    if dtype == torch.bfloat16:
        bits = x.view(torch.int32).to(torch.int64) & _MASK32
        below_largest = x.abs() < torch.finfo(dtype).max  # from the largest on a carry would make infinity
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
        # Past the largest finite value that is `below`, the gap is infinite, and nothing is rounded up.
        rounded = torch.where(uniform * gap < rest, below + 1, below).view(dtype)
        return torch.where(x.isfinite(), rounded, nearest)
    raise ValueError(f"stochastic rounding is for bfloat16 and float16, got {dtype}")
