"""What the optimizer kernels share: the gradient of a block of slots."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import widen
from .segments import address_of


@triton.jit
def load_gradient(grad, grad_table, blocks, tensor, slots, positions, mask, GRAD: tl.constexpr):
    """[BLOCK] fp32, from the compact buffer or from the dense gradient at `positions`."""
    if grad_table is None:
        return widen(tl.load(grad + slots, mask=mask, other=0.0, eviction_policy="evict_first"))
    else:
        return widen(tl.load(address_of(grad_table, blocks, tensor, GRAD) + positions, mask=mask, other=0.0))


@triton.jit
def scale_gradient(g, grad_scale, clip_coef):
    if grad_scale is not None:
        g = tl.div_rn(g, tl.load(grad_scale))
    if clip_coef is not None:
        g = g * tl.load(clip_coef)
    return g
