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

from typing import TYPE_CHECKING

from . import registry as registry
from .bound import BoundOps, bind
from .narrow import can_narrow, narrow_indices
from .schemas import (
    STEP_FUNCTIONS,
    StepFunction,
    delta_apply_,
    delta_encode,
    indexed_replace_,
    indexed_swap_,
    masked_grad_gather_,
    tile_weight_grad_,
)
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

globals().update(STEP_FUNCTIONS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> StepFunction: ...  # the step ops
