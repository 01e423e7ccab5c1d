"""Functional ops on the active elements of whole lists of tensors. docs/ops.md has an example of each.

Each op takes the dense tensors of a model as a list, and the data of the active elements as flat compact buffers.
Segment i, the compact slots [starts[i], ends[i]), belongs to dense tensor i, and `indices` holds positions in that
flattened tensor, sorted and unique within the segment. Slots outside all segments do not change, nor do elements
outside the mask. With `run_length` r, `indices` holds the first position of each run of r consecutive elements.

The tensors of a list share one device and one dtype and are contiguous; a ValueError names the first invalid tensor.
Positions are not checked; `MaskSet` has checked them. `backend` is one of reference, cpu, triton, cuda or auto.

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
