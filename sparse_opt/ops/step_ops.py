"""The optimizer steps: one definition of each, from which everything that names it or its arguments follows.

`STEP_OPS` gives the functions of `sparse_opt.ops` with their signatures and docstrings, the schemas of
`torch.ops.sparse_opt.*` and `torch.ops.sparse_opt_native.*`, the argument checks, the reference implementation, and
what the optimizers pass. docs/adding_an_op.md lists the remaining places where an op is implemented.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Update = Callable[..., tuple[Any, ...]]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class StepOp:
    """One optimizer step on the active elements of a list of tensors: see `step_op`."""

    name: str
    states: tuple[str, ...]  # compact buffers [nnz], all fp32 or all bf16; at most two, for random_words
    options: Mapping[str, float | bool]  # Python scalars and their defaults
    update: Update
    summary: str  # the first line of the docstring
    reference: str  # paper or implementation that the op follows
    arguments: Mapping[str, str]  # docstrings of the states and options
    optional: Mapping[str, str]  # state -> option; the state may be None if that is 0
    why_invalid: Callable[[Options], str]  # "", or why the options are invalid

    def used_states(self, options: Options) -> tuple[str, ...]:
        """Return the names of the states that a step with these options reads and writes."""
        return tuple(name for name in self.states if name not in self.optional or options[self.optional[name]] != 0.0)


STEP_OPS: dict[str, StepOp] = {}


def step_op(
    summary: str,
    *,
    reference: str,
    arguments: Mapping[str, str],
    optional: Mapping[str, str] | None = None,
    why_invalid: Callable[[Options], str] = lambda options: "",
) -> Callable[[Update], Update]:
    """Define the step op of a function's name, whose arithmetic the function is. The arguments are those of `StepOp`.

    The function gets the active elements of one tensor, all fp32: the weights, the gradients, then the states. It
    returns the weights and the states of the next step; a state that is None does not change. Every operation is
    rounded on its own. `lr` is a device tensor of one element, `step` the number of the tensor's step, from 1. All
    other keyword arguments are the options of the op, with their defaults.
    """

    def define(update: Update) -> Update:
        parameters = inspect.signature(update).parameters.values()
        states = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
        options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("lr", "step")}
        STEP_OPS[update.__name__] = StepOp(
            update.__name__, tuple(states), options, update, summary, reference, arguments, optional or {}, why_invalid
        )
        return update

    return define


def _why_invalid_betas(options: Options) -> str:
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


@step_op(
    "One AdamW step on the active elements",
    reference='Loshchilov and Hutter, "Decoupled weight decay regularization", https://arxiv.org/abs/1711.05101',
    arguments={
        "exp_avg, exp_avg_sq": "[nnz], both fp32 or both bf16.",
        "beta1, beta2, eps, weight_decay": "as in `torch.optim.AdamW`.",
    },
    why_invalid=_why_invalid_betas,
)
def indexed_adamw_(p, g, exp_avg, exp_avg_sq, *, lr, step, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01):
    # lr / (1 - beta1^step) and sqrt(1 - beta2^step) in fp64: 1 - beta^step loses its digits in fp32 at small steps.
    step_size = (lr.double() / (1.0 - beta1**step)).float()
    sqrt_bias_correction2 = torch.tensor(math.sqrt(1.0 - beta2**step), dtype=torch.float32, device=lr.device)
    p = p * (1.0 - lr * weight_decay)
    m = _lerp(exp_avg, g, 1.0 - beta1)
    v = exp_avg_sq * beta2 + (g * g) * (1.0 - beta2)
    # In fp64 and then rounded, which gives the correctly rounded root; torch's fp32 sqrt on a CPU does not.
    denom = v.double().sqrt().float() / sqrt_bias_correction2 + eps
    return p - (m / denom) * step_size, m, v


@step_op(
    "One Lion step on the active elements",
    reference='Chen et al., "Symbolic discovery of optimization algorithms", https://arxiv.org/abs/2302.06675',
    arguments={
        "exp_avg": "[nnz] fp32 or bf16.",
        "beta1": "weight of `exp_avg` in the average whose sign is the update.",
        "beta2": "weight of `exp_avg` in its own next value.",
        "weight_decay": "decoupled, as in `torch.optim.AdamW`.",
    },
    why_invalid=_why_invalid_betas,
)
def indexed_lion_(p, g, exp_avg, *, lr, step, beta1=0.9, beta2=0.99, weight_decay=0.0):
    c = exp_avg * beta1 + g * (1.0 - beta1)
    sign = torch.where(c.isnan(), c, c.sign())  # torch's sign of NaN is 0, which would hide it
    p = p * (1.0 - lr * weight_decay)
    return p - sign * lr, exp_avg * beta2 + g * (1.0 - beta2)


def _why_invalid_sgd(options: Options) -> str:
    momentum, dampening = options["momentum"], options["dampening"]
    if options["nesterov"] and (momentum <= 0.0 or dampening != 0.0):
        return f"nesterov needs momentum > 0 and dampening 0, found momentum {momentum!r} and dampening {dampening!r}"
    return ""


@step_op(
    "One SGD step on the active elements",
    reference="`torch.optim.SGD`",
    arguments={
        "momentum_buffer": "[nnz] fp32 or bf16, or None with `momentum` 0. Step 1 sets it to the gradient; "
        "with `momentum` 0 it does not change.",
        "momentum, dampening, nesterov, weight_decay": "as in `torch.optim.SGD`; the decay is added to the gradient.",
    },
    optional={"momentum_buffer": "momentum"},
    why_invalid=_why_invalid_sgd,
)
def indexed_sgd_(p, g, momentum_buffer, *, lr, step, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0):
    if weight_decay != 0.0:
        g = g + p * weight_decay
    b = momentum_buffer
    if b is not None:
        b = g if step == 1 else b * momentum + g * (1.0 - dampening)
        g = g + b * momentum if nesterov else b
    return p - g * lr, b
