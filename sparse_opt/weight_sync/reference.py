"""Reads, compares and writes the active weights of one dtype in plain torch, on any device.

This is the definition of what the Triton kernels do, and the implementation for CPUs. It holds 8 to 16 bytes per active
element and destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks.patterns import expand_units
from ..tensors import BITS_DTYPE
from .destinations import Placed, PlacedTensor
from .digest import digest_sum, mix, zero_extended
from .layout import Group

__all__ = ["ReferenceIndex", "compare", "digest_sum", "select"]


def bitmap_bytes(nnz: int) -> int:
    """Return the size of a bitmap over nnz elements, a multiple of 8 bytes."""
    return -(-nnz // 64) * 8


def compare(old: Tensor, new: Tensor, first: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the values of consecutive elements bit by bit.

    Args:
        old, new: [n] values of one dtype.
        first: element number of the first one.
        capacity: the most changed values to return.

    Returns:
        The bitmap of the changed elements, [bitmap_bytes(n)] uint8, with element e as bit e % 8 of byte e // 8;
        [3] int64: the digest of `new`, the digest of its changed elements, and their number; and the first changed
        values, in order. The last tensor may be longer than there are changes, and is not initialized behind them.
    """
    changed = _bits(old) != _bits(new)
    numbers = changed.nonzero().view(-1)
    sent = mix(numbers + first, zero_extended(new[numbers])).sum()
    totals = torch.stack([digest_sum(new, first), sent, changed.sum()])
    return _packed(changed), totals, new[numbers[:capacity]]


def select(new: Tensor, bitmap: Tensor, count: int) -> Tensor:
    """Return the elements [count] of `new` [n] that a bitmap marks, in order."""
    return new[_numbers(bitmap)[:count]]


class ReferenceIndex:
    """The active elements of one dtype in a receiver's or sender's tensors.

    Args:
        group: their order.
        pattern: of the mask.
        units: as in a mask message, by name.
        placed: the tensors with their destinations, by name.
    """

    def __init__(
        self,
        group: Group,
        names: Sequence[str],
        pattern: str,
        units: Mapping[str, Tensor],
        placed: Mapping[str, PlacedTensor],
        device: torch.device,
    ) -> None:
        self._group, self._device = group, device
        self._primary: list[_Part] = []
        self._others: list[_Part] = []
        for start, name in zip(group.starts, names, strict=False):
            tensor = placed[name]
            positions = expand_units(units[name].to(device, torch.int64), tensor.entry.shape, pattern)
            self._primary += [_Part.of(tensor, p, positions, start) for p in tensor.primary]
            self._others += [_Part.of(tensor, p, positions, start) for p in tensor.others]

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that the index holds, by purpose."""
        parts = [*self._primary, *self._others]
        elements = sum(p.elements.nbytes for p in parts if p.elements is not None)
        return {"positions": elements + sum(p.offsets.nbytes for p in parts)}

    def take(self) -> Tensor:
        """Return the active values [nnz]. Elements without a destination are 0."""
        out = torch.zeros(self._group.nnz, dtype=self._group.torch_dtype, device=self._device)
        for part in self._primary:
            _bits(out)[part.slots] = part.memory[part.offsets]
        return out

    def put(self, values: Tensor) -> None:
        """Write the active values [nnz] to all destinations."""
        for part in (*self._primary, *self._others):
            part.memory[part.offsets] = _bits(values)[part.slots]

    def changes(self, bitmap: Tensor, changed: Tensor) -> ReferenceChanges:
        """Return the changed elements of an update, to verify and to write them.

        Args:
            bitmap: [bitmap_bytes(nnz)] uint8.
            changed: [n], the values of the elements that the bitmap marks.
        """
        return ReferenceChanges(self._group, self._primary, self._others, bitmap, changed)


class ReferenceChanges:
    """The changed elements of an update, and where they are."""

    def __init__(
        self, group: Group, primary: Sequence[_Part], others: Sequence[_Part], bitmap: Tensor, changed: Tensor
    ) -> None:
        self._group, self._primary, self._others, self._changed = group, primary, others, changed
        self._numbers = _numbers(bitmap)

    def sums(self, *, read_old: bool) -> Tensor:
        """Return [3] int64: the digest of the changed values, that of the values in their place, and the set bits.

        Args:
            read_old: False returns 0 for the values in their place, and does not read them.
        """
        count = torch.tensor(self._numbers.numel(), dtype=torch.int64, device=self._numbers.device)
        numbers = self._numbers[self._numbers < self._group.nnz][: self._changed.numel()]
        first = self._group.first
        sent = mix(numbers + first, zero_extended(self._changed[: numbers.numel()])).sum()
        old = torch.zeros((), dtype=torch.int64, device=numbers.device)
        if read_old:
            for part in self._primary:
                which, offsets = part.find(numbers)
                held = zero_extended(part.memory[offsets].view(self._group.torch_dtype))
                old += mix(numbers[which] + first, held).sum()
        return torch.stack([sent, old, count])

    def write(self) -> None:
        """Write the changed values to all destinations. `sums` must have been compared with the message first."""
        for part in (*self._primary, *self._others):
            which, offsets = part.find(self._numbers)
            part.memory[offsets] = _bits(self._changed)[which]


@dataclass(frozen=True)
class _Part:
    """The active elements of a tensor that are stored in one destination."""

    begin: int  # the tensor's active elements are begin:end of the group
    end: int
    elements: Tensor | None  # [k] int64, ascending numbers in the group; None: all from begin to end
    offsets: Tensor  # [k] int64, into memory
    memory: Tensor  # the destination's memory from its first to its last element, as integers

    @classmethod
    def of(cls, tensor: PlacedTensor, placed: Placed, positions: Tensor, start: int) -> _Part:
        columns = tensor.entry.matrix[1]
        row, column = positions // columns, positions % columns
        inside = (row >= placed.r0) & (row < placed.r1) & (column >= placed.c0) & (column < placed.c1)
        row_stride, column_stride = placed.tensor.stride()
        offsets = (row[inside] - placed.r0) * row_stride + (column[inside] - placed.c0) * column_stride
        elements = None if offsets.numel() == positions.numel() else inside.nonzero().view(-1) + start
        return cls(start, start + positions.numel(), elements, offsets, _memory(placed.tensor))

    @property
    def slots(self) -> Tensor | slice:
        return slice(self.begin, self.end) if self.elements is None else self.elements

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return where in ascending `numbers` the elements of this part are, and their offsets."""
        bounds = torch.tensor([self.begin, self.end], dtype=torch.int64, device=numbers.device)
        low, high = torch.searchsorted(numbers, bounds).tolist()
        which = torch.arange(low, high, device=numbers.device)
        if self.elements is None:
            return which, self.offsets[numbers[which] - self.begin]
        if not self.elements.numel():
            return which[:0], self.offsets
        at = torch.searchsorted(self.elements, numbers[which]).clamp(max=self.elements.numel() - 1)
        found = self.elements[at] == numbers[which]
        return which[found], self.offsets[at[found]]


def _memory(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return _bits(tensor.new_empty(0))
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _bits(tensor.as_strided((extent,), (1,)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS_DTYPE[tensor.element_size()])


def _packed(changed: Tensor) -> Tensor:
    padded = torch.zeros(8 * bitmap_bytes(changed.numel()), dtype=torch.uint8, device=changed.device)
    padded[: changed.numel()] = changed
    shifts = torch.arange(8, dtype=torch.uint8, device=changed.device)
    return (padded.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def _numbers(bitmap: Tensor) -> Tensor:
    """Return the ascending numbers of the set bits, int64."""
    return torch.cat([*_set_bits(bitmap), bitmap.new_empty(0, dtype=torch.int64)])


def _set_bits(bitmap: Tensor, chunk: int = 2**20) -> Iterator[Tensor]:
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    for begin in range(0, bitmap.numel(), chunk):
        bits = (bitmap[begin : begin + chunk, None] >> shifts) & 1
        yield bits.view(-1).nonzero().view(-1) + 8 * begin
