"""Functional ops on the active elements of whole lists of tensors.

Each op takes the dense tensors of a model as a list, and the data of the active elements as flat compact buffers.
Segment i, the compact slots [starts[i], ends[i]), belongs to dense tensor i, and `indices` holds positions in that
flattened tensor, sorted and unique within the segment. A segment may be empty. Slots outside all segments do not
change, so that a step can leave out a tensor without a gradient. Elements outside the mask keep their bits.

A mask of runs, r consecutive elements each, needs one index per run: with `run_length` r, a power of two, `indices`
holds the first position of every run, nnz / r in all, and slot s of the compact buffers has the position
indices[s // r] + s % r. Buffers, starts and ends still count slots; starts and ends are multiples of r. A run may begin
anywhere in its tensor and cross the end of a row. To swap the 64 elements 8-39 and 96-127:

    indexed_swap_([weight], held, torch.tensor([8, 96]), [0], [64], run_length=32)

For a mask of single elements, `narrow_indices` compresses int32 indices to two bytes each: uint16 offsets for
`indices`, and an int32 base for every 256 slots and each segment for `index_bases`.

The tensors of a list share one device and one dtype and are contiguous; a ValueError names the first invalid tensor.
Positions are not checked, because comparing them with the tensors' sizes would read them back from the device;
`MaskSet` has checked them. `backend` is one of reference, cpu, triton, cuda or auto; see `sparse_opt.backends`.

`bind` prepares the ops for a fixed list of tensors, so that repeated calls take less host time.

The same ops are `torch.ops.sparse_opt.*`, with fakes and mutation schemas, for torch.compile and export.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import memory_errors
from . import registry as registry
from .bound import BoundOps, bind
from .namespace import PUBLIC
from .narrow import can_narrow, narrow_indices
from .step_functions import StepFunction, step_function
from .step_ops import STEP_OPS
from .tiles import tile_table

__all__ = [
    "STEP_OPS",
    "BoundOps",
    "bind",
    "can_narrow",
    "delta_apply_",
    "delta_encode",
    "indexed_replace_",
    "indexed_swap_",
    "masked_grad_gather_",
    "narrow_indices",
    "tile_table",
    "tile_weight_grad_",
    *STEP_OPS,
]

_ops = getattr(torch.ops, PUBLIC)

globals().update({name: step_function(name) for name in STEP_OPS})

if TYPE_CHECKING:

    def __getattr__(name: str) -> StepFunction: ...  # the step ops


@torch.no_grad()
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
    _ops.masked_grad_gather_(
        out,
        dense,
        indices,
        starts,
        ends,
        scale=scale,
        accumulate=accumulate,
        sum_sq=sum_sq,
        found_inf=found_inf,
        run_length=run_length,
        index_bases=index_bases,
        backend=backend,
    )


@torch.no_grad()
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

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    _ops.tile_weight_grad_(
        out,
        grad_outputs,
        inputs,
        tiles,
        starts,
        ends,
        tile_size=tile_size,
        scale=scale,
        accumulate=accumulate,
        sum_sq=sum_sq,
        found_inf=found_inf,
        backend=backend,
    )


@torch.no_grad()
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
    _ops.indexed_swap_(
        dense, compact, indices, starts, ends, run_length=run_length, index_bases=index_bases, backend=backend
    )


@torch.no_grad()
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

    Only elements whose bits differ between the two are written, so that a call moves little more than the compact
    buffers through memory if most are equal. Where `dense` does not hold `before`, other elements keep what they hold.

    Args:
        dense: n tensors, bf16, fp16 or fp32.
        before, after: [nnz] of the dtype of `dense`, or fp32, such as master weights, of which `dense` holds the
            values rounded to its dtype.
        indices, starts, ends, run_length, index_bases: as in `indexed_adamw_`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    _ops.indexed_replace_(
        dense, before, after, indices, starts, ends, run_length=run_length, index_bases=index_bases, backend=backend
    )


@torch.no_grad()
def delta_encode(
    old: Sequence[Tensor], new: Sequence[Tensor], *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the elements whose bits differ between `old` and `new`, and return their positions and new values.

    Compares bits, not numbers: -0.0 differs from 0.0, and two NaNs are equal only if their payloads are.

    Args:
        old, new: n tensors each, pairwise of one shape, all of one dtype with elements of 1, 2, 4 or 8 bytes.

    Returns:
        indices: [changed] positions in each flattened tensor, ascending; int32, or int64 if a tensor has more than
            2**31 - 1 elements.
        values: [changed] of the tensors' dtype, the new bits.
        counts: [n] int64 on the CPU, the number of changes in each tensor. The call synchronizes to return them. With
            backend cuda, indices and values may still be being written on the current stream; other streams must wait
            for it.

    Temporary memory: one bit per element on a CPU and with backend triton. With cuda, 12 bytes for every 2048 elements
    or more, and buffers for the expected number of changes: estimated from the last call on tensors of this size, or
    from a sample if there was none or it found more than one change in nine elements; buffers for all elements where
    those take at most 64 MiB. Indices and values may be views of buffers up to a third larger.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    with memory_errors():
        return _ops.delta_encode(old, new, backend=backend)


@torch.no_grad()
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
    _ops.delta_apply_(dense, indices, values, starts, ends, backend=backend)
