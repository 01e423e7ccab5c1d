"""Functional ops on the active elements of whole lists of tensors.

Each op takes the dense tensors of a model as a list and what belongs to the active elements as flat compact buffers.
Segment i, the compact slots [starts[i], ends[i]), belongs to dense tensor i, and `indices` holds positions in that
flattened tensor, sorted and unique within the segment. A segment may be empty; slots outside all segments are left
alone, which is how a tensor without a gradient sits out a step. Elements outside the mask keep their bits.

A mask that takes its elements in runs, r consecutive ones at a time, needs one index for each run: with `run_length` r,
a power of two, `indices` holds the first position of every run, nnz / r of them, and slot s of the compact buffers has
the position indices[s // r] + s % r. Buffers, starts and ends count slots as ever; starts and ends are multiples of r.
A run may begin anywhere in its tensor and go on from one row into the next. To swap the 64 elements 8-39 and 96-127:

    indexed_swap_([weight], held, torch.tensor([8, 96]), [0], [64], run_length=32)

Where a mask takes elements one by one, `narrow_indices` puts int32 indices into two bytes each: uint16 offsets, and an
int32 base for every 256 slots and each segment, for the ops' `indices` and `index_bases`.

The tensors of a list share one device and one dtype and are contiguous; a tensor in error is named in a ValueError.
Positions are trusted: comparing them with the tensors' sizes would read them back from the device, and `MaskSet` has
done it. `backend` is one of reference, cpu, triton, cuda or auto; see `sparse_opt.backends`.

The same ops are `torch.ops.sparse_opt.*`, with fakes and mutation schemas, for torch.compile and export.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import registry as registry
from .narrow import can_narrow, narrow_indices
from .tiles import tile_table

__all__ = [
    "can_narrow",
    "delta_apply_",
    "delta_encode",
    "indexed_adamw_",
    "indexed_sgd_",
    "indexed_swap_",
    "masked_grad_gather_",
    "narrow_indices",
    "tile_table",
    "tile_weight_grad_",
]


@torch.no_grad()
def indexed_adamw_(
    params: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    steps: Tensor,
    *,
    grad: Tensor | None = None,
    dense_grads: Sequence[Tensor] | None = None,
    master: Tensor | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip_coef: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    run_length: int = 1,
    index_bases: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """AdamW on the active elements: updates `params`, `exp_avg`, `exp_avg_sq` and `master` in place.

    Loshchilov and Hutter, "Decoupled weight decay regularization", https://arxiv.org/abs/1711.05101, in fp32
    whatever the storage. Nothing is read back from the device, so a call can be captured in a CUDA graph
    (backend `reference` excepted).

    Args:
        params: n tensors, bf16, fp16 or fp32, any shapes.
        indices: [nnz / run_length] int32 or int64; or [nnz] uint16 beside `index_bases`.
        starts, ends: n host integers each.
        exp_avg, exp_avg_sq: [nnz] fp32 or bf16, both the same.
        lr: one fp32 element on the device.
        steps: [n] fp32, the number of this step for each tensor, counted from 1.
        grad: [nnz] bf16, fp16 or fp32, the compact gradient; or
        dense_grads: n tensors shaped like `params`, read at the indices. Exactly one of the two.
        master: [nnz] fp32 weights that are updated in place of the stored ones, which become their rounded copy.
        beta1, beta2, eps, weight_decay: as in `torch.optim.AdamW`.
        clip_coef: one fp32 element that the gradient is multiplied by.
        grad_scale: one fp32 element that the gradient is divided by first, as `torch.amp.GradScaler` sets it.
        found_inf: one fp32 element; if it is not zero, nothing changes.
        stochastic_rounding: round 16-bit stores (moments; parameters without a master) up or down at random, from
            Philox2x32-7 with key `seed` and counter (compact slot, step), 32 bits each, their high words mixed in: a
            repeated step repeats its bits. A finite value stays finite: past the largest finite value of the dtype it
            becomes that one.
        seed: 0 <= seed < 2**63.
        run_length: consecutive elements that each index stands for, a power of two; 1 where a mask takes elements one
            by one. With a mask of pattern `run32` (see `MaskSet`) 32: fewer indices, and neighbours moved together.
        index_bases: [nnz // 256 + n] int32, with `indices` in uint16 and run_length 1: see `narrow_indices`.

    Raises:
        ValueError: an argument of the wrong dtype, device, shape, length or layout.
        BackendUnavailable: the named backend cannot run on these tensors.
    """
    torch.ops.sparse_opt.indexed_adamw_(
        params,
        indices,
        starts,
        ends,
        exp_avg,
        exp_avg_sq,
        lr,
        steps,
        grad=grad,
        dense_grads=dense_grads,
        master=master,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        clip_coef=clip_coef,
        grad_scale=grad_scale,
        found_inf=found_inf,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
        run_length=run_length,
        index_bases=index_bases,
        backend=backend,
    )


@torch.no_grad()
def indexed_sgd_(
    params: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    momentum_buffer: Tensor | None,
    lr: Tensor,
    steps: Tensor,
    *,
    grad: Tensor | None = None,
    dense_grads: Sequence[Tensor] | None = None,
    master: Tensor | None = None,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_coef: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    run_length: int = 1,
    index_bases: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """SGD on the active elements, as `torch.optim.SGD`: updates `params`, `momentum_buffer` and `master` in place.

    Args:
        momentum_buffer: [nnz] fp32 or bf16, or None with `momentum` 0. At step 1 it becomes the gradient itself; with
            `momentum` 0 it is left as it is.
        momentum, dampening, nesterov, weight_decay: as in `torch.optim.SGD`; the decay is part of the gradient.
        Others: as in `indexed_adamw_`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    torch.ops.sparse_opt.indexed_sgd_(
        params,
        indices,
        starts,
        ends,
        momentum_buffer,
        lr,
        steps,
        grad=grad,
        dense_grads=dense_grads,
        master=master,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        clip_coef=clip_coef,
        grad_scale=grad_scale,
        found_inf=found_inf,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
        run_length=run_length,
        index_bases=index_bases,
        backend=backend,
    )


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
    """out (+)= scale * dense[indices], with the sum of squares and a non-finite flag from the same pass.

    Args:
        out: [nnz] bf16, fp16 or fp32, written at the slots of the segments. The sum is made in fp32.
        dense: n tensors, bf16, fp16 or fp32.
        indices, starts, ends, run_length, index_bases: as in `indexed_adamw_`.
        scale: one fp32 element on the device.
        accumulate: add to `out` instead of overwriting it.
        sum_sq: [n] fp32, set to the sum of squares of each segment as stored in `out`; the same bits on every run
            of one backend, and equal to rounding between backends.
        found_inf: one fp32 element, set to inf if a stored value is inf or NaN, else left alone.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    torch.ops.sparse_opt.masked_grad_gather_(
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
    """The active tiles of linear layers' weight gradients, and nothing else of them: no dense gradient is made.

    Weight i, [rows, columns] as `torch.nn.Linear` has it, has the gradient grad_outputs[i]^T @ inputs[i], summed over
    all leading dimensions. Of each active tile, out (+)= scale * its part of that. Products and sums are fp32 (no
    TF32), in the same order on every run on the same device; different backends add in different orders.

    Args:
        out: [nnz] bf16, fp16 or fp32, the compact gradient that the other ops take; written at the tiles' slots.
        grad_outputs: n tensors [..., rows], gradients of the layers' outputs; bf16, fp16 or fp32.
        inputs: n tensors [..., columns] of the same dtype and leading sizes, the layers' inputs. Layers that share
            theirs name it several times. A weight that is stored [in, out] (transformers' `Conv1D`) takes the two lists
            the other way round.
        tiles: [k, 4] int64 from `tile_table`.
        starts, ends: n host integers each: weight i has the tiles [starts[i], ends[i]), maybe none.
        tile_size: 64 or 128, the one that `tiles` was made with.
        scale, accumulate, found_inf: as in `masked_grad_gather_`.
        sum_sq: [n] fp32, set to the sum of squares of each weight's part of `out`, as stored; the same bits on every
            run of one backend, and equal to rounding between backends.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    torch.ops.sparse_opt.tile_weight_grad_(
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
    """Exchange dense[indices] with `compact`, bit for bit; twice is the identity.

    Args:
        dense: n tensors of one dtype with elements of 1, 2, 4 or 8 bytes.
        compact: [nnz] of the same dtype.
        indices, starts, ends, run_length, index_bases: as in `indexed_adamw_`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    torch.ops.sparse_opt.indexed_swap_(
        dense, compact, indices, starts, ends, run_length=run_length, index_bases=index_bases, backend=backend
    )


@torch.no_grad()
def delta_encode(
    old: Sequence[Tensor], new: Sequence[Tensor], *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the bits of `new` differ from those of `old`, and what they are there.

    Compares bits, not numbers: -0.0 differs from 0.0, and a NaN equals itself only with the same payload.

    Args:
        old, new: n tensors each, pairwise of one shape, all of one dtype with elements of 1, 2, 4 or 8 bytes.

    Returns:
        indices: [changed] positions in each flattened tensor, ascending; int32, or int64 if a tensor has more than
            2**31 - 1 elements.
        values: [changed] of the tensors' dtype, the new bits.
        counts: [n] int64 on the CPU, the number of changes in each tensor. The call waits until the device knows them;
            with backend cuda indices and values may still be on their way then: other streams wait for this one.

    Memory while it runs: a bit for each element on a CPU and with backend triton; with cuda 12 bytes for every 2048
    elements or more, and room for as many changes as the last call on tensors of this size lets expect, or, where there
    was none or it found more than one in nine, a sample; for all elements where that is 64 MiB at most. Indices and
    values may be the front of buffers a third larger.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    return torch.ops.sparse_opt.delta_encode(old, new, backend=backend)


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
    """dense[indices] = values, bit for bit: what `delta_encode` found, put into the tensors it was found against.

    Args:
        dense: n tensors of one dtype with elements of 1, 2, 4 or 8 bytes.
        indices, values: [changed], as from `delta_encode`.
        starts, ends: n host integers each; the running sums of `counts`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`.
    """
    torch.ops.sparse_opt.delta_apply_(dense, indices, values, starts, ends, backend=backend)
