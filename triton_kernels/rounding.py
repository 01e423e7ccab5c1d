"""fp32 to and from 16-bit storage, to nearest or stochastically; the bits of `sparse_opt.ops.rounding`.

bf16 is converted by integer operations, not by casts: Triton's interpreter truncates where hardware rounds to nearest
even, so that its tests would not cover what runs on a GPU. A NaN becomes 0x7FFF, as in the hardware's conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """bf16, fp16 or fp32 to fp32, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def differs(a, b):
    """Whether two blocks of one dtype differ in their bits: -0 and 0 do, a NaN and itself do not."""
    if a.dtype == tl.float32:
        return a.to(tl.uint32, bitcast=True) != b.to(tl.uint32, bitcast=True)
    else:
        return a.to(tl.uint16, bitcast=True) != b.to(tl.uint16, bitcast=True)


@triton.jit
def round_nearest(x, DTYPE: tl.constexpr):
    """fp32 to DTYPE, ties to even."""
    if DTYPE == tl.bfloat16:
        word = x.to(tl.uint32, bitcast=True)
        rounded = (word + (0x7FFF + ((word >> 16) & 1))) >> 16
        rounded = tl.where(x == x, rounded, 0x7FFF)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def round_stochastic(x, DTYPE: tl.constexpr, random):
    """fp32 to DTYPE, up with probability (x - below) / (above - below). fp32 stays as it is.

    A finite value stays finite: past the largest finite value of DTYPE it becomes that one.

    random: [BLOCK] uint32 words.
    """
    if DTYPE == tl.bfloat16:
        word = x.to(tl.uint32, bitcast=True)
        # From the largest finite value on a carry would make infinity: such values are truncated.
        rounded = (word + tl.where((word & 0x7FFFFFFF) < 0x7F7F0000, random & 0xFFFF, 0)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FFF)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.float16:
        nearest = x.to(tl.float16)
        word = nearest.to(tl.int16, bitcast=True)
        magnitude = tl.abs(x)
        past = tl.abs(nearest.to(tl.float32)) > magnitude
        below = tl.where(past, word - 1, word).to(tl.int16)  # next value towards zero
        above = (below + 1).to(tl.int16)
        low = tl.abs(below.to(tl.float16, bitcast=True).to(tl.float32))
        gap = tl.abs(above.to(tl.float16, bitcast=True).to(tl.float32)) - low
        uniform = (random >> 8).to(tl.float32) * (2.0**-24)
        # Past the largest finite value that is `below`, the gap is infinite, and nothing is rounded up.
        rounded = tl.where(uniform * gap < magnitude - low, above, below).to(tl.float16, bitcast=True)
        return tl.where(magnitude < float("inf"), rounded, nearest)
    else:
        return x


def philox_key(seed: int) -> int:
    """What a kernel takes as `key`: the low word of `seed` with its high word mixed in, as a signed 32-bit integer.

    As an argument of 64 bits, a seed from 2^31 to 2^32 would lose its type in Triton's interpreter, which holds such
    integers in 32 unsigned bits whatever the kernel declares.
    """
    key = (seed + (seed >> 32) * 0xBB67AE85) & 0xFFFFFFFF
    return key - ((key & 0x80000000) << 1)


@triton.jit
def random_words(key, slots, step):
    """Philox2x32-7 for [BLOCK] compact slots: 32 random bits for the parameter, 16 low ones for each moment.

    Counter: the slot's low word, and the step with the slot's high word mixed in; key: int32, of `philox_key`.
    """
    c0 = (slots & 0xFFFFFFFF).to(tl.uint32)
    c1 = (step + (slots >> 32) * 0x85EBCA6B).to(tl.uint32)
    key = key.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(7):
        product = c0.to(tl.uint64) * 0xD256D193
        c0 = (product >> 32).to(tl.uint32) ^ key ^ c1
        c1 = product.to(tl.uint32)
        key += 0x9E3779B9
    return c0, c1, c1 >> 16
