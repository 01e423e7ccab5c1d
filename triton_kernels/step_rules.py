"""The arithmetic of the optimizer steps on a block of active elements: one function for each rule, and its scalars.

A rule's device function is called as update(p, g, state0, state1, factors, scalars, lr, steps, tensor): fp32 blocks of
the weights, gradients and states (zeros for a state that the op does not have), the rule's numbers, and pointers to its
scalars of this tensor, the learning rate and the step numbers. It returns (p, state0, state1), with the operations of
`sparse_opt.ops.step_ops` in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Scalars(NamedTuple):
    """A kernel that computes the scalars of each tensor, called as kernel(scalars, lr, steps, *arguments)."""

    kernel: Any
    width: int  # scalars of a tensor, fp32
    arguments: tuple[float, ...]


class Rule(NamedTuple):
    """A rule with the options of one call."""

    update: Any  # device function
    states: tuple[Tensor | None, ...]  # None: not read or written
    factors: tuple[float, ...]
    scalars: Scalars | None = None


# AdamW


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


# One program per tensor computes them once, since all programs of the step would wait for them. In fp64, because
# 1 - beta^t loses its digits in fp32 at small t.
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


@triton.jit
def _adamw(p, g, m, v, factors, scalars, lr, steps, tensor):
    lerp_factor, beta2, one_minus_beta2, eps = factors
    decay = tl.load(scalars)
    sqrt_bias_correction2 = tl.load(scalars + 1)
    step_size = tl.load(scalars + 2)
    p = p * decay
    m = tl.where(lerp_factor > 0.0, m, g) + (g - m) * lerp_factor
    v = v * beta2 + (g * g) * one_minus_beta2
    denom = tl.div_rn(tl.sqrt_rn(v), sqrt_bias_correction2) + eps
    return p - tl.div_rn(m, denom) * step_size, m, v


def _float64_bits(x: float) -> int:
    """Return the bits of `x`: a kernel takes a Python float as fp32, and an int as it is."""
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits


def _lerp_factor(weight: float) -> float:
    """Return the factor of g - m in torch.lerp(m, g, weight): added to m if it is positive, to g if not.

    torch.lerp (ATen/native/Lerp.h) is m + (g - m) * weight for a weight below 1/2, else g - (g - m) * (1 - weight).
    """
    (rounded,) = struct.unpack("<f", struct.pack("<f", weight))
    return rounded if rounded < 0.5 else -(1.0 - rounded)


def adamw(exp_avg: Tensor, exp_avg_sq: Tensor, *, beta1: float, beta2: float, eps: float, weight_decay: float) -> Rule:
    return Rule(
        _adamw,
        (exp_avg, exp_avg_sq),
        (_lerp_factor(1.0 - beta1), float(beta2), 1.0 - beta2, float(eps)),
        Scalars(_adamw_scalars_kernel, 3, (_float64_bits(beta1), _float64_bits(beta2), float(weight_decay))),
    )


# Lion


@triton.jit
def _lion(p, g, m, none, factors, scalars, lr, steps, tensor):
    beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay = factors
    rate = tl.load(lr)
    c = m * beta1 + g * one_minus_beta1
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, tl.where(c == 0.0, 0.0, c)))  # a NaN reaches the weight
    p = p * (1.0 - rate * weight_decay)
    return p - sign * rate, m * beta2 + g * one_minus_beta2, none


def lion(exp_avg: Tensor, *, beta1: float, beta2: float, weight_decay: float) -> Rule:
    return Rule(_lion, (exp_avg,), (float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, float(weight_decay)))


# SGD


@triton.jit
def _decayed(p, g, weight_decay):
    return tl.where(weight_decay != 0.0, g + p * weight_decay, g)


@triton.jit
def _averaged(b, g, momentum, one_minus_dampening, steps, tensor):
    return tl.where(tl.load(steps + tensor) == 1.0, g, b * momentum + g * one_minus_dampening)


@triton.jit
def _sgd(p, g, b, none, factors, scalars, lr, steps, tensor):
    return p - _decayed(p, g, factors[0]) * tl.load(lr), b, none


@triton.jit
def _sgd_momentum(p, g, b, none, factors, scalars, lr, steps, tensor):
    momentum, one_minus_dampening, weight_decay = factors
    b = _averaged(b, _decayed(p, g, weight_decay), momentum, one_minus_dampening, steps, tensor)
    return p - b * tl.load(lr), b, none


@triton.jit
def _sgd_nesterov(p, g, b, none, factors, scalars, lr, steps, tensor):
    momentum, one_minus_dampening, weight_decay = factors
    g = _decayed(p, g, weight_decay)
    b = _averaged(b, g, momentum, one_minus_dampening, steps, tensor)
    return p - (g + b * momentum) * tl.load(lr), b, none


def sgd(
    momentum_buffer: Tensor | None, *, momentum: float, dampening: float, nesterov: bool, weight_decay: float
) -> Rule:
    if momentum == 0.0:
        return Rule(_sgd, (None,), (float(weight_decay),))
    factors = float(momentum), 1.0 - dampening, float(weight_decay)
    return Rule(_sgd_nesterov if nesterov else _sgd_momentum, (momentum_buffer,), factors)


RULES: dict[str, Callable[..., Rule]] = {"indexed_adamw_": adamw, "indexed_lion_": lion, "indexed_sgd_": sgd}
