"""The optimizer steps: one definition of each, from which everything that names it or its arguments follows.

`STEP_OPS` gives the schemas of `torch.ops.sparse_opt.*` and `torch.ops.sparse_opt_native.*`, the functions of
`sparse_opt.ops` with their signatures and docstrings, the argument checks, the reference implementation, and what the
optimizers pass. docs/adding_an_op.md lists the remaining places where an op is implemented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepOp:
    """One optimizer step on the active elements of a list of tensors.

    `update` defines the arithmetic on the active elements of one tensor, all fp32, where every operation is rounded on
    its own. It is called as update(p, g, *states, lr=, step=, **options) and returns (p, *states); a state that is None
    does not change. `lr` is a device tensor of one element, `step` the number of the tensor's step, from 1.
    """

    name: str
    states: tuple[str, ...]  # compact buffers [nnz], all fp32 or all bf16; at most two, for random_words
    options: Mapping[str, float | bool]  # Python scalars and their defaults
    update: Callable[..., tuple[Any, ...]]
    summary: str  # the first line of the docstring
    reference: str  # paper or implementation that the op follows
    arguments: Mapping[str, str]  # docstrings of the states and options
    optional: Mapping[str, str] = field(default_factory=dict)  # state -> option; the state may be None if that is 0
    why_invalid: Callable[[Mapping[str, Any]], str] = lambda options: ""  # "", or why the options are invalid

    def used_states(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that a step with these options reads and writes."""
        return tuple(name for name in self.states if name not in self.optional or options[self.optional[name]] != 0.0)


def _why_invalid_betas(options: Mapping[str, Any]) -> str:
    for name in ("beta1", "beta2"):
        if not 0.0 <= options[name] < 1.0:
            return f"{name} is {options[name]}, expected 0 <= {name} < 1"
    return ""


def _lerp(m: Tensor, g: Tensor, weight: float) -> Tensor:
    """Compute torch.lerp from `m` to `g` with each operation rounded separately, as in ATen/native/Lerp.h.

    The sum starts at the nearer end: from `m` with a weight near 1, g - m would round a small `g` away, and the result
    for weight 1 would not be `g`.
    """
    weight = torch.tensor(weight, dtype=torch.float32, device="cpu").item()
    return m + (g - m) * weight if weight < 0.5 else g - (g - m) * (1.0 - weight)


def _adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Any, ...]:
    # lr / (1 - beta1^step) and sqrt(1 - beta2^step) in fp64: 1 - beta^step loses its digits in fp32 at small steps.
    step_size = (lr.double() / (1.0 - beta1**step)).float()
    sqrt_bias_correction2 = torch.tensor(math.sqrt(1.0 - beta2**step), dtype=torch.float32, device=lr.device)
    p = p * (1.0 - lr * weight_decay)
    m = _lerp(m, g, 1.0 - beta1)
    v = v * beta2 + (g * g) * (1.0 - beta2)
    # In fp64 and then rounded, which gives the correctly rounded root; torch's fp32 sqrt on a CPU does not.
    denom = v.double().sqrt().float() / sqrt_bias_correction2 + eps
    return p - (m / denom) * step_size, m, v


def _sgd(
    p: Tensor,
    g: Tensor,
    b: Tensor | None,
    *,
    lr: Tensor,
    step: int,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
) -> tuple[Any, ...]:
    if weight_decay != 0.0:
        g = g + p * weight_decay
    if b is not None:
        b = g if step == 1 else b * momentum + g * (1.0 - dampening)
        g = g + b * momentum if nesterov else b
    return p - g * lr, b


def _lion(
    p: Tensor, g: Tensor, m: Tensor, *, lr: Tensor, step: int, beta1: float, beta2: float, weight_decay: float
) -> tuple[Any, ...]:
    c = m * beta1 + g * (1.0 - beta1)
    sign = torch.where(c.isnan(), c, c.sign())  # torch's sign of NaN is 0, which would hide it
    p = p * (1.0 - lr * weight_decay)
    return p - sign * lr, m * beta2 + g * (1.0 - beta2)


def _why_invalid_sgd(options: Mapping[str, Any]) -> str:
    momentum, dampening = options["momentum"], options["dampening"]
    if options["nesterov"] and (momentum <= 0.0 or dampening != 0.0):
        return f"nesterov needs momentum > 0 and dampening 0, found momentum {momentum!r} and dampening {dampening!r}"
    return ""


STEP_OPS: dict[str, StepOp] = {
    op.name: op
    for op in (
        StepOp(
            "indexed_adamw_",
            states=("exp_avg", "exp_avg_sq"),
            options={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
            update=_adamw,
            summary="One AdamW step on the active elements",
            reference='Loshchilov and Hutter, "Decoupled weight decay regularization", https://arxiv.org/abs/1711.05101',
            arguments={
                "exp_avg, exp_avg_sq": "[nnz], both fp32 or both bf16.",
                "beta1, beta2, eps, weight_decay": "as in `torch.optim.AdamW`.",
            },
            why_invalid=_why_invalid_betas,
        ),
        StepOp(
            "indexed_lion_",
            states=("exp_avg",),
            options={"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
            update=_lion,
            summary="One Lion step on the active elements",
            reference='Chen et al., "Symbolic discovery of optimization algorithms", https://arxiv.org/abs/2302.06675',
            arguments={
                "exp_avg": "[nnz] fp32 or bf16.",
                "beta1": "weight of `exp_avg` in the average whose sign is the update.",
                "beta2": "weight of `exp_avg` in its own next value.",
                "weight_decay": "decoupled, as in `torch.optim.AdamW`.",
            },
            why_invalid=_why_invalid_betas,
        ),
        StepOp(
            "indexed_sgd_",
            states=("momentum_buffer",),
            options={"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
            update=_sgd,
            summary="One SGD step on the active elements",
            reference="`torch.optim.SGD`",
            arguments={
                "momentum_buffer": "[nnz] fp32 or bf16, or None with `momentum` 0. Step 1 sets it to the gradient; "
                "with `momentum` 0 it does not change.",
                "momentum, dampening, nesterov, weight_decay": "as in `torch.optim.SGD`; the decay is added to the "
                "gradient.",
            },
            optional={"momentum_buffer": "momentum"},
            why_invalid=_why_invalid_sgd,
        ),
    )
}
