"""Where the named weights of a message are in a receiver's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..errors import ForeignMessage
from ..masks.patterns import matrix_shape
from ..tensors import BITS_DTYPE, dtype_name, is_wrapper, named_parameters_of
from .encoding import Layout, LayoutTensor

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Destination:
    """A part of a named weight, as it is stored in a tensor of the receiver.

    The weight is seen as a matrix (`masks.patterns.matrix_shape`: the last dimension is its columns, all others its
    rows; a vector is one row). Fused projections, tensor-parallel slices, padded vocabularies and FSDP shards all have
    this form. A weight may have several destinations; active elements without one are skipped.

    Args:
        tensor: [r1 - r0, c1 - c0], of the weight's dtype, with any strides.
        rows: (r0, r1), None for all rows.
        columns: (c0, c1), None for all columns.
    """

    tensor: Tensor
    rows: Range | None = None
    columns: Range | None = None


@dataclass(frozen=True, eq=False)
class Placed:
    """A destination that has been checked: rows [r0, r1) and columns [c0, c1) are at `tensor` [r1 - r0, c1 - c0]."""

    tensor: Tensor
    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def memory(self) -> Tensor:
        """The memory of the destination from its first to its last element, as integers."""
        tensor = self.tensor
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((extent,), (1,)) if tensor.numel() else tensor.new_empty(0)
        return flat.view(BITS_DTYPE[flat.element_size()])

    def overlaps(self, other: Placed) -> bool:
        return self.r0 < other.r1 and other.r0 < self.r1 and self.c0 < other.c1 and other.c0 < self.c1


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of the layout with its destinations.

    The primary destinations are disjoint, so that each element is read from one of them at most.
    """

    entry: LayoutTensor
    primary: tuple[Placed, ...]
    others: tuple[Placed, ...]

    @property
    def destinations(self) -> tuple[Placed, ...]:
        return self.primary + self.others

    def is_plain(self, part: Placed) -> bool:
        """Whether a destination has the whole tensor contiguously, so that positions are offsets in its memory."""
        rows, columns = self.entry.matrix
        row_stride, column_stride = part.tensor.stride()
        whole = (part.r0, part.r1, part.c0, part.c1) == (0, rows, 0, columns)
        return whole and (column_stride == 1 or columns == 1) and (row_stride == columns or rows == 1)

    def find(self, part: Placed, positions: Tensor) -> tuple[Tensor | slice, Tensor]:
        """Return which of some positions [n] int64 are in a destination, and their offsets in its memory."""
        if self.is_plain(part):
            return slice(None), positions
        columns = self.entry.matrix[1]
        row, column = positions // columns, positions % columns
        inside = (row >= part.r0) & (row < part.r1) & (column >= part.c0) & (column < part.c1)
        row_stride, column_stride = part.tensor.stride()
        return inside, ((row - part.r0) * row_stride + (column - part.c0) * column_stride)[inside]

    @cached_property
    def is_whole(self) -> bool:
        """Whether every element has a destination. False if only overlapping destinations together cover them."""
        rows, columns = self.entry.matrix
        return sum((p.r1 - p.r0) * (p.c1 - p.c0) for p in self.primary) == rows * columns


def place(layout: Layout, destinations: Mapping[str, Sequence[Destination]]) -> dict[str, PlacedTensor]:
    """Return the tensors with active elements by name, with their destinations.

    Raises:
        ForeignMessage: a name has no entry in `destinations`, a destination does not fit the weight, or destinations
            are on several devices, or on the meta device; names the weight.
    """
    placed = {}
    device: torch.device | None = None
    for entry in layout.tensors:
        if not entry.nnz:
            continue
        if entry.name not in destinations:
            raise ForeignMessage(f"the mask has {entry.name!r}, which the receiver does not have")
        parts = [_placed(entry, destination) for destination in destinations[entry.name]]
        primary: list[Placed] = []
        for part in parts:
            device = part.tensor.device if device is None else device
            if part.tensor.device != device:
                raise ForeignMessage(f"{entry.name!r} is on {part.tensor.device}, expected {device} as the others")
            if device.type == "meta":
                raise ForeignMessage(f"{entry.name!r} is on the meta device, expected it in memory: load the weights")
            if not any(part.overlaps(p) for p in primary):
                primary.append(part)
        placed[entry.name] = PlacedTensor(entry, tuple(primary), tuple(p for p in parts if p not in primary))
    return placed


def refuse_shared(placed: Mapping[str, PlacedTensor]) -> None:
    """Raise ForeignMessage if two weights with active elements are in one place, and would overwrite each other."""
    names: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in placed.items():
        for part in tensor.destinations:
            memory = part.tensor
            if not (tensor.entry.nnz and memory.numel()):
                continue
            other = names.setdefault((memory.data_ptr(), tuple(memory.shape), memory.stride()), name)
            if other != name:
                raise ForeignMessage(
                    f"{other!r} and {name!r} share their memory here, and are two weights in the message"
                )


def whole_weight(name: str, weight: Tensor) -> Destination:
    """Return the destination of a whole weight.

    Raises:
        ForeignMessage: the weight cannot be viewed as a matrix; names it.
    """
    if is_wrapper(weight):
        raise ForeignMessage(
            f"{name!r} is a {type(weight).__name__}: pass destinations of the plain tensors that it is made of"
        )
    try:
        return Destination(weight.detach().view(matrix_shape(weight.shape)))
    except RuntimeError as error:
        raise ForeignMessage(
            f"{name!r} of shape {list(weight.shape)} has strides {list(weight.stride())} and is no view of a matrix: "
            "pass destinations"
        ) from error


def _placed(entry: LayoutTensor, destination: Destination) -> Placed:
    rows, columns = entry.matrix
    r0, r1 = destination.rows or (0, rows)
    c0, c1 = destination.columns or (0, columns)
    tensor = destination.tensor.detach()
    where = f"a destination of {entry.name!r}"
    if not (0 <= r0 <= r1 <= rows and 0 <= c0 <= c1 <= columns):
        raise ForeignMessage(
            f"{where} has rows {r0}:{r1} and columns {c0}:{c1}, expected ranges within {rows} x {columns}"
        )
    if is_wrapper(tensor) or tensor.layout != torch.strided:
        raise ForeignMessage(f"{where} is a {type(tensor).__name__} of layout {tensor.layout}, expected a plain tensor")
    if tuple(tensor.shape) != (r1 - r0, c1 - c0):
        raise ForeignMessage(f"{where} is {list(tensor.shape)}, expected {[r1 - r0, c1 - c0]}")
    if dtype_name(tensor) != entry.dtype:
        raise ForeignMessage(f"{where} is {dtype_name(tensor)}, expected {entry.dtype}")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ForeignMessage(f"{where} has strides {list(tensor.stride())}, expected an address for each element")
    return Placed(tensor, r0, r1, c0, c1)


def first_moved(weights: nn.Module | Mapping[str, Tensor], addresses: Mapping[str, int]) -> str | None:
    """Return the name of a weight that is no longer at its `data_ptr()` in `addresses`; None if there is none."""
    found = named_parameters_of(weights)
    return next((n for n, address in addresses.items() if n not in found or found[n].data_ptr() != address), None)
