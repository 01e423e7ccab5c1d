"""The ops: the signature, the docstring and the schema of each, in one table.

The schema of `torch.ops.sparse_opt.x` follows from the signature of `x` in this file, and the schema of
`torch.ops.sparse_opt_native.x`, for which the extension registers its kernels, follows from that one. The signatures of
the optimizer steps follow from step_ops.py.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from .namespace import PUBLIC
from .step_ops import STEP_OPS, StepOp

_ops = getattr(torch.ops, PUBLIC)
_Function = TypeVar("_Function", bound=Callable[..., Any])

SCHEMAS: dict[str, str] = {}  # name -> schema, with the name
_TYPES = {  # other types have the same name in a schema
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "Sequence[Tensor] | None": "Tensor[]?",
    "Sequence[int]": "SymInt[]",
    "str | None": "str?",
    "None": "()",
    "tuple[Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor)",
}


def _schema(function: Callable[..., Any], written: Sequence[str]) -> str:
    signature, arguments = inspect.signature(function), []
    for i, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        kind = _TYPES.get(parameter.annotation, parameter.annotation)
        if name in written:
            kind = kind.replace("Tensor", f"Tensor(a{i}!)")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{kind} {name}{default}")
    return f"{function.__name__}({', '.join(arguments)}) -> {_TYPES[signature.return_annotation]}"


def _op(*written: str) -> Callable[[_Function], _Function]:
    """Add the schema of a declared function to `SCHEMAS`, and return a function that calls the op of torch.

    Args:
        written: the arguments that the op writes to.
    """

    def declare(function: _Function) -> _Function:
        name = function.__name__
        SCHEMAS[name] = _schema(function, written)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(_ops, name)(*args, **kwargs)

        return cast(_Function, torch.no_grad()(call))

    return declare


def native_schema(name: str) -> str:
    """Return the schema of a native op; a native step op can also count its steps, or only check its arguments."""
    schema = SCHEMAS[name].replace("SymInt[]", "int[]").replace(", str? backend=None", "").replace(", *)", ")")
    if name in STEP_OPS:
        schema = schema.replace("Tensor steps", "Tensor(s!) steps")
        schema = schema.replace(") ->", ", bool count_steps=False, bool check_only=False) ->")
    return schema


@_op("out", "sum_sq", "found_inf")
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
    backend: str | None = None,
) -> None:
    """Gather or accumulate out (+)= scale * dense[indices]; compute sums of squares and a non-finite flag on the way.

    Args:
        out: [nnz] bf16, fp16 or fp32, written at the slots of the segments. The sum is computed in fp32.
        dense: n tensors, bf16, fp16 or fp32.
        indices, starts, ends, run_length, index_bases: as in `indexed_adamw_`.
        scale: one fp32 element on the device.
        accumulate: add to `out` instead of overwriting it.
        sum_sq: [n] fp32, set to the sum of squares of each segment as stored in `out`; the same bits on every run
            of one backend, and equal up to rounding between backends.
        found_inf: one fp32 element, set to inf if a stored value is inf or NaN, otherwise unchanged.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """


@_op("out", "sum_sq", "found_inf")
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
    token_offsets: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Compute only the active tiles of linear layers' weight gradients, without a dense gradient.

    Weight i, [rows, columns] as in `torch.nn.Linear`, has the gradient grad_outputs[i]^T @ inputs[i], summed over all
    leading dimensions. For each active tile, out (+)= scale * that tile of the gradient. Products and sums are fp32 (no
    TF32), in the same order on every run on the same device; different backends add in different orders.

    Args:
        out: [nnz] bf16, fp16 or fp32, the compact gradient as the other ops take it; written at the tiles' slots.
        grad_outputs: n tensors [..., rows], gradients of the layers' outputs; bf16, fp16 or fp32.
        inputs: n tensors [..., columns] of the same dtype and leading sizes, the layers' inputs. The same tensor may
            appear several times, for layers that share an input. For a weight stored [in, out] (transformers'
            `Conv1D`), exchange the two lists.
        tiles: [k, 4] int64 from `tile_table`.
        starts, ends: n host integers each: weight i has the tiles [starts[i], ends[i]), which may be empty.
        tile_size: 64 or 128, as passed to `tile_table`.
        scale, accumulate, found_inf: as in `masked_grad_gather_`.
        sum_sq: [n] fp32, set to the sum of squares of each weight's part of `out`, as stored; the same bits on every
            run of one backend, and equal up to rounding between backends.
        token_offsets: [experts] int32, of a mixture of experts, as for torch's `grouped_mm`: the tokens are sorted by
            expert, and those of expert e are [token_offsets[e - 1], token_offsets[e]), from 0 on for the first. Weight
            i is then [experts, rows, columns], in `tile_table` too. The gradient of an expert without tokens is 0.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """


@_op("dense", "compact")
def indexed_swap_(
    dense: Sequence[Tensor],
    compact: Tensor,
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    run_length: int = 1,
    index_bases: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Exchange dense[indices] with `compact`, bit for bit; a second call restores both.

    Args:
        dense: n tensors of one dtype with elements of 1, 2, 4 or 8 bytes.
        compact: [nnz] of the same dtype.
        indices, starts, ends, run_length, index_bases: as in `indexed_adamw_`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """


@_op("dense")
def indexed_replace_(
    dense: Sequence[Tensor],
    before: Tensor,
    after: Tensor,
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    run_length: int = 1,
    index_bases: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Set dense[indices] to `after`, where it holds `before`; nothing is read from `dense`.

    Only elements whose bits differ between the two are written.

    Args:
        dense: n tensors, bf16, fp16 or fp32.
        before, after: [nnz] of the dtype of `dense`, or fp32, such as master weights, of which `dense` holds the values
            rounded to its dtype.
        indices, starts, ends, run_length, index_bases: as in `indexed_adamw_`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """


@_op()
def delta_encode(  # type: ignore[empty-body]
    old: Sequence[Tensor], new: Sequence[Tensor], *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the elements whose bits differ between `old` and `new`, and return their positions and new values.

    Compares bits, not numbers: -0.0 differs from 0.0, and two NaNs are equal only if their payloads are. The call
    synchronizes.

    Args:
        old, new: n tensors each, pairwise of one shape, all of one dtype with elements of 1, 2, 4 or 8 bytes.

    Returns:
        indices: [changed] positions in each flattened tensor, ascending; int32, or int64 if a tensor has more than
            2**31 - 1 elements. They and the values may be views of larger buffers.
        values: [changed] of the tensors' dtype, the new bits.
        counts: [n] int64 on the CPU, the number of changes in each tensor.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """


@_op("dense")
def delta_apply_(
    dense: Sequence[Tensor],
    indices: Tensor,
    values: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    backend: str | None = None,
) -> None:
    """Apply the result of `delta_encode` to the old tensors: dense[indices] = values, bit for bit.

    Args:
        dense: n tensors of one dtype with elements of 1, 2, 4 or 8 bytes.
        indices, values: [changed], as from `delta_encode`.
        starts, ends: n host integers each; the running sums of `counts`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """


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


def _step_signature(op: StepOp) -> inspect.Signature:
    """Return the signature of a step op: that of `StepFunction` with the op's states and options in their places."""
    parameters: list[inspect.Parameter] = []
    for common in list(inspect.signature(StepFunction.__call__).parameters.values())[1:]:
        if common.kind is common.VAR_POSITIONAL:
            states = {state: "Tensor | None" if state in op.optional else "Tensor" for state in op.states}
            for own, annotation in {**states, "lr": "Tensor", "steps": "Tensor"}.items():
                parameters.append(inspect.Parameter(own, common.POSITIONAL_OR_KEYWORD, annotation=annotation))
        elif common.kind is not common.VAR_KEYWORD:
            parameters.append(common)
        if common.name == "params_hold_master":
            for own, default in op.options.items():
                parameters.append(common.replace(name=own, default=default, annotation=type(default).__name__))
    return inspect.Signature(parameters, return_annotation="None")


def _docstring(op: StepOp) -> str:
    def arguments(names: Sequence[str]) -> str:
        described = (f"{key}: {text}" for key, text in op.arguments.items() if key.split(", ")[0] in names)
        wrap = textwrap.TextWrapper(width=120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        return "\n".join(wrap.fill(text) for text in described)

    return _DOCSTRING.format(
        summary=op.summary,
        states=", ".join(f"`{state}`" for state in op.states),
        reference=op.reference,
        state_arguments=arguments(op.states),
        option_arguments=arguments(list(op.options)),
    )


def _step_function(op: StepOp) -> StepFunction:
    def function(*args: Any, **kwargs: Any) -> None: ...

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = _docstring(op)
    function.__signature__ = _step_signature(op)  # type: ignore[attr-defined]
    return _op("params", *op.states, "master", "weights")(function)


STEP_FUNCTIONS: dict[str, StepFunction] = {op.name: _step_function(op) for op in STEP_OPS.values()}
