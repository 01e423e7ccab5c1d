"""The step ops as functions with real signatures and docstrings, made from the table of step ops."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .namespace import PUBLIC
from .step_ops import STEP_OPS

_ops = getattr(torch.ops, PUBLIC)

_DOCSTRING = """\
{summary}: updates `params`, {states}, `master` and `weights` in place.

Follows {reference}. Arithmetic is fp32 for every storage dtype. Nothing is read back from the device, so a call can be
captured in a CUDA graph (except with backend `reference`).

Args:
    params: n tensors, bf16, fp16 or fp32, any shapes.
    indices: [nnz / run_length] int32 or int64; or, with `index_bases`, [nnz] uint16.
    starts, ends: n host integers each.
{state_arguments}
    lr: one fp32 element on the device.
    steps: [n] fp32, the number of this step for each tensor, counted from 1.
    grad: [nnz] bf16, fp16 or fp32, the compact gradient. Pass exactly one of `grad` and `dense_grads`.
    dense_grads: n tensors shaped like `params`, read at the indices.
    master: [nnz] fp32 master weights; the update is applied to them, and `params` receives the rounded result.
    weights: [nnz], of the dtype of `params`: a copy of their active elements, which is read in their place. The step
        writes both, `params` where a bit changes. Not with `master`.
    params_hold_master: the active elements of `params` are those of `master`, rounded, and need not be read.
{option_arguments}
    clip_coef: one fp32 element by which the gradient is multiplied.
    grad_scale: one fp32 element by which the gradient is divided before clipping, as set by `torch.amp.GradScaler`.
    found_inf: one fp32 element; if it is not zero, nothing changes.
    stochastic_rounding: round 16-bit stores (states; parameters without a master) up or down at random. The random bits
        are those of Philox2x32-7 with key `seed` and counter (compact slot, step), 32 bits each, with their high words
        mixed in, so that a repeated step gives the same bits. A finite value stays finite: values beyond the largest
        finite value of the dtype are rounded to it.
    seed: 0 <= seed < 2**63.
    run_length: number of consecutive elements per index, a power of two; 1 for a mask of single elements, 32 for a mask
        of pattern `run32` (see `MaskSet`). Longer runs need fewer indices and move neighbours together.
    index_bases: [nnz // 256 + n] int32, with `indices` in uint16 and run_length 1: see `narrow_indices`.

Raises:
    ValueError: an argument of the wrong dtype, device, shape, length or layout, or an option out of range.
    BackendUnavailable: the named backend cannot run on these tensors.
"""


class StepFunction(Protocol):
    """What all step ops have in common.

    The op's states, `lr` and `steps` follow `ends`, and its options `params_hold_master`.
    """

    def __call__(
        self,
        params: Sequence[Tensor],
        indices: Tensor,
        starts: Sequence[int],
        ends: Sequence[int],
        *states_lr_steps: Tensor | None,
        grad: Tensor | None = None,
        dense_grads: Sequence[Tensor] | None = None,
        master: Tensor | None = None,
        weights: Tensor | None = None,
        params_hold_master: bool = False,
        clip_coef: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        run_length: int = 1,
        index_bases: Tensor | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> None: ...


def _signature(name: str) -> inspect.Signature:
    op, parameters = STEP_OPS[name], []
    for common in list(inspect.signature(StepFunction.__call__).parameters.values())[1:]:
        if common.kind is common.VAR_POSITIONAL:
            states = {state: "Tensor | None" if state in op.optional else "Tensor" for state in op.states}
            for own, annotation in {**states, "lr": "Tensor", "steps": "Tensor"}.items():
                parameters.append(inspect.Parameter(own, common.POSITIONAL_OR_KEYWORD, annotation=annotation))
        elif common.kind is not common.VAR_KEYWORD:
            parameters.append(common)
        if common.name == "params_hold_master":
            for own, default in op.options.items():
                annotation = type(default).__name__
                parameters.append(common.replace(name=own, default=default, annotation=annotation))
    return inspect.Signature(parameters, return_annotation="None")


def _docstring(name: str) -> str:
    op = STEP_OPS[name]

    def arguments(names: Sequence[str] | dict[str, Any]) -> str:
        described = (f"{key}: {text}" for key, text in op.arguments.items() if key.split(", ")[0] in names)
        wrap = textwrap.TextWrapper(width=120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        return "\n".join(wrap.fill(text) for text in described)

    return _DOCSTRING.format(
        summary=op.summary,
        states=", ".join(f"`{state}`" for state in op.states),
        reference=op.reference,
        state_arguments=arguments(op.states),
        option_arguments=arguments(dict(op.options)),
    )


def step_function(name: str) -> StepFunction:
    """Return a function with the signature of step op `name` that calls the op of torch."""
    signature = _signature(name)
    names = (f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in signature.parameters.values())
    source = f"def {name}{signature}:\n    _ops.{name}({', '.join(names)})"
    # Compiled, as in dataclasses, so that Python binds the arguments and torch.compile traces a plain function.
    defined: dict[str, Any] = {}
    exec(compile(source, f"<sparse_opt.ops.{name}>", "exec", dont_inherit=True), globals(), defined)
    function = defined[name]
    function.__module__, function.__doc__ = __name__.rpartition(".")[0], _docstring(name)
    return torch.no_grad()(function)


_BOUND = ("params", "indices", "starts", "ends", "run_length", "index_bases", "backend")  # arguments of `ops.bind`


def bound_step_method(name: str) -> Any:
    """Return a method of `BoundOps` with the signature of step op `name` without the bound arguments."""
    parameters = [p for p in _signature(name).parameters.values() if p.name not in _BOUND]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([own, *parameters], return_annotation="None")
    arguments = ", ".join(f"{p.name!r}: {p.name}" for p in parameters)
    source = f"def {name}{signature}:\n    self._step({name!r}, {{{arguments}}})"
    defined: dict[str, Any] = {}
    exec(compile(source, f"<sparse_opt.ops.bind.{name}>", "exec", dont_inherit=True), globals(), defined)
    method = defined[name]
    method.__qualname__, method.__doc__ = f"BoundOps.{name}", f"`ops.{name}` on the bound tensors and segments."
    return torch.no_grad()(method)
