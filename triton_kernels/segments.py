"""The programs of one launch for a list of tensors, and the tensor and slots of a program.

A list of one tensor needs no tables. Its address and segment are kernel arguments, so that a gradient hook, which has
another tensor on every call, uploads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import BITS_DTYPE, SLOTS
from .tables import block_table, check_list, pointer_table

# Slots that share an index base: see `sparse_opt.ops.narrow_indices`.
FRAME = tl.constexpr(256)


class Segments(NamedTuple):
    """A kernel's arguments for the segments: `blocks`, or for one tensor `start` and `end`."""

    blocks: Tensor | None  # [programs, 2] int64
    firsts: Tensor | None  # [n + 1] int64
    start: int
    end: int
    programs: int  # 0 when all segments are empty


def segments(
    tensors: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int], device: torch.device, slots: int = SLOTS
) -> Segments:
    """The programs for a list of segments, of `slots` compact slots each."""
    if not len(tensors) == len(starts) == len(ends):
        raise ValueError(
            f"{len(starts)} starts and {len(ends)} ends for {len(tensors)} tensors, expected equal numbers"
        )
    if len(starts) == 1:
        start, end = starts[0], ends[0]
        return Segments(None, None, start, end, triton.cdiv(end, slots) - start // slots if end > start else 0)
    blocks = block_table(starts, ends, slots, device)
    return Segments(blocks.rows, blocks.firsts, 0, 0, blocks.programs)


def addresses(name: str, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A pointer table of the tensors, or the one tensor itself."""
    if len(tensors) == 1:
        check_list(name, tensors, device)
        return tensors[0]
    return pointer_table(name, tensors, device)


def bits(tensor: Tensor) -> Tensor:
    """The same storage as integers of the same size."""
    return tensor.view(BITS_DTYPE[tensor.element_size()])


def bits_addresses(name: str, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    table = addresses(name, tensors, device)
    return bits(table) if len(tensors) == 1 else table


@triton.jit
def block_of(blocks, start, end, BLOCK: tl.constexpr, ALIGNED: tl.constexpr = False):
    """(tensor, slots [BLOCK] int64, mask [BLOCK]) of this program. ALIGNED: all cuts are multiples of 16."""
    program = tl.program_id(0).to(tl.int64)
    if blocks is None:
        tensor = program * 0
        cut = (start // BLOCK + program) * BLOCK
        first = tl.maximum(cut, start)
        count = tl.minimum(cut + BLOCK, end) - first
    else:
        first = tl.load(blocks + 2 * program)
        packed = tl.load(blocks + 2 * program + 1)
        tensor = packed >> 32
        count = packed & 0xFFFFFFFF
    count = count.to(tl.int32)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
        count = tl.multiple_of(count, 16)
    lane = tl.arange(0, BLOCK)
    return tensor, first + lane, lane < count


@triton.jit
def positions_of(indices, index_bases, tensor, slots, mask, RUN: tl.constexpr):
    """[BLOCK] int64: the positions of the slots in their dense tensor.

    Each index is the start of RUN consecutive elements, or an offset from the base of its FRAME slots.
    """
    if index_bases is not None:
        base = tl.load(index_bases + slots // FRAME + tensor, mask=mask, other=0)
        offset = tl.load(indices + slots, mask=mask, other=0, eviction_policy="evict_first")
        return base.to(tl.int64) + offset.to(tl.int64)
    elif RUN == 1:
        return tl.load(indices + slots, mask=mask, other=0, eviction_policy="evict_first").to(tl.int64)
    else:
        first = tl.load(indices + slots // RUN, mask=mask, other=0, eviction_policy="evict_first").to(tl.int64)
        return first + slots % RUN


@triton.jit
def address_of(table, blocks, tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr = False):
    """The address of a dense tensor: from the pointer table, or `table` itself for one tensor.

    ALIGNED: all are multiples of 16 bytes. The compiler loses this hint if the caller sets it on the returned value.
    """
    if blocks is None:
        return table
    else:
        address = tl.load(table + tensor).to(tl.pointer_type(DTYPE))
        if ALIGNED:
            address = tl.multiple_of(address, 16)
        return address
