"""The active elements of one dtype, read, compared and written on a device: by plain torch, or by Triton kernels.

Plain torch is backend "reference": the definition of what the Triton kernels do (triton_index.py), and the
implementation for CPUs. It holds the units of the mask message: 4 bytes for each element, run or tile, and 8 in tensors
of 2**31 or more elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..errors import BackendUnavailable
from ..masks.patterns import PATTERNS, expand_units, unit_grid
from ..tensors import BITS_DTYPE
from .destinations import PlacedTensor
from .digest import digest_sum, mix, zero_extended
from .encoding import Group, Layout, active_elements, bitmap_of, set_bits
from .triton_index import TritonChanges, TritonIndex

_BLOCK = 2**20  # elements whose positions are computed at once; a row of tiles may have more


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
    return bitmap_of(changed), totals, new[numbers[:capacity]]


def select(new: Tensor, bitmap: Tensor, count: int) -> Tensor:
    """Return the elements [count] of `new` [n] that a bitmap marks, in order."""
    return new[set_bits(bitmap)[:count]]


class ReferenceIndex:
    """The active elements of one dtype in a receiver's or sender's tensors.

    Args:
        group, layout: their order, and the pattern of the mask.
        units: as in a mask message, by name.
        placed: the tensors with their destinations, by name.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        units: Mapping[str, Tensor],
        placed: Mapping[str, PlacedTensor],
        device: torch.device,
    ) -> None:
        self._group, self._device = group, device
        self._blocks: list[_Block] = []
        for start, name in zip(group.starts, layout.names(group), strict=False):
            self._blocks += _blocks(placed[name], units[name].to(device), layout.pattern, start)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that the index holds, by purpose."""
        return {"positions": sum(block.units.nbytes for block in self._blocks)}

    def warm_up(self, *, read_old: bool) -> None:
        """Compile the kernels of the other methods and of `changes`, without a read or write of a weight.

        Args:
            read_old: of the calls of `ReferenceChanges.sums` that will follow.
        """

    def take(self) -> Tensor:
        """Return the active values [nnz]. Elements without a destination are 0."""
        out = torch.zeros(self._group.nnz, dtype=self._group.torch_dtype, device=self._device)
        for block in self._blocks:
            positions = block.positions()
            for part in block.tensor.primary:
                inside, offsets = block.tensor.find(part, positions)
                _bits(out)[block.begin : block.end][inside] = part.memory[offsets]
        return out

    def put(self, values: Tensor, valid: Tensor | None = None) -> None:
        """Write the active values [nnz] to all destinations; nothing if `valid`, [1] bool on their device, is False."""
        if valid is not None and not valid:
            return
        for block in self._blocks:
            positions = block.positions()
            of_block = _bits(values)[block.begin : block.end]
            for part in block.tensor.destinations:
                inside, offsets = block.tensor.find(part, positions)
                part.memory[offsets] = of_block[inside]

    def changes(self, bitmap: Tensor, capacity: int) -> ReferenceChanges:
        """Return the changed elements of an update, to verify and to write them.

        Args:
            bitmap: [bitmap_bytes(nnz)] uint8.
            capacity: how many values the message has for them; of use to other backends only.
        """
        return ReferenceChanges(self._group, self._blocks, bitmap)


class ReferenceChanges:
    """The changed elements of an update, and where they are."""

    def __init__(self, group: Group, blocks: Sequence[_Block], bitmap: Tensor) -> None:
        self._group = group
        self._numbers = set_bits(bitmap)
        self._found = list(_found(blocks, self._numbers, group.nnz))

    def sums(self, changed: Tensor, *, read_old: bool) -> Tensor:
        """Return [3] int64: the digest of the changed values, that of the values in their place, and the set bits.

        Args:
            changed: [n], the values of the elements that the bitmap marks.
            read_old: False returns 0 for the values in their place, and does not read them.
        """
        count = torch.tensor(self._numbers.numel(), dtype=torch.int64, device=self._numbers.device)
        numbers = self._numbers[self._numbers < self._group.nnz][: changed.numel()]
        first = self._group.first
        sent = mix(numbers + first, zero_extended(changed[: numbers.numel()])).sum()
        old = torch.zeros((), dtype=torch.int64, device=numbers.device)
        if read_old:
            for block, within, positions in self._found:
                for part in block.tensor.primary:
                    inside, offsets = block.tensor.find(part, positions)
                    held = zero_extended(part.memory[offsets].view(self._group.torch_dtype))
                    old += mix(self._numbers[within][inside] + first, held).sum()
        return torch.stack([sent, old, count])

    def write(self, changed: Tensor) -> None:
        """Write the changed values to all destinations. `sums` must have been compared with the message first."""
        for block, within, positions in self._found:
            for part in block.tensor.destinations:
                inside, offsets = block.tensor.find(part, positions)
                part.memory[offsets] = _bits(changed)[within][inside]


@dataclass(frozen=True)
class _Block:
    """Consecutive active elements of a tensor.

    Positions are computed from the units for one block at a time, since they take 8 bytes for each element.
    """

    begin: int  # the elements are begin:end of the group
    end: int
    units: Tensor  # as in a mask message
    pattern: str
    tensor: PlacedTensor

    def positions(self) -> Tensor:
        """Return the ascending positions [end - begin] of the elements in the tensor, int64."""
        return expand_units(self.units.to(torch.int64), self.tensor.entry.shape, self.pattern)


def _found(blocks: Sequence[_Block], numbers: Tensor, nnz: int) -> Iterator[tuple[_Block, slice, Tensor]]:
    """Yield the blocks that have some of ascending `numbers`: which of them, and their positions in the tensor."""
    bounds = torch.tensor([*(block.begin for block in blocks), nnz], dtype=torch.int64, device=numbers.device)
    cuts = torch.searchsorted(numbers, bounds).tolist()
    for block, low, high in zip(blocks, cuts, cuts[1:], strict=False):
        if low < high:
            yield block, slice(low, high), block.positions()[numbers[low:high] - block.begin]


def _blocks(tensor: PlacedTensor, units: Tensor, pattern: str, start: int) -> Iterator[_Block]:
    """Yield the blocks of a tensor, whose first active element has the number `start`."""
    height, width = PATTERNS[pattern]
    size = max(1, _BLOCK // (height * width))
    cuts = torch.arange(0, units.numel(), size, device=units.device)[1:]
    if height > 1:
        # A row of tiles is in one block, because the elements of its tiles alternate.
        across = unit_grid(tensor.entry.shape, pattern)[1]
        ends = torch.unique_consecutive(units // across, return_counts=True)[1].cumsum(0)
        cuts = ends[torch.searchsorted(ends, cuts)].unique()
    for part in units.tensor_split(cuts.tolist()):
        if part.numel():
            end = start + active_elements(part, tensor.entry, pattern)
            yield _Block(start, end, part, pattern, tensor)
            start = end


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS_DTYPE[tensor.element_size()])


Index = ReferenceIndex | TritonIndex
Changes = ReferenceChanges | TritonChanges


class Backend(NamedTuple):
    """The functions of a backend, as those of this file."""

    digest_sum: Callable[[Tensor, int], Tensor]
    compare: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
    select: Callable[[Tensor, Tensor, int], Tensor]
    index_type: type[Index]

    def build_indices(
        self, layout: Layout, units: Mapping[str, Tensor], placed: Mapping[str, PlacedTensor], device: torch.device
    ) -> tuple[Index, ...]:
        """Return for each group of a layout where its active elements are.

        Args:
            units: as in a mask message, by name.
            placed: the tensors with their destinations, by name.
        """
        return tuple(self.index_type(group, layout, units, placed, device) for group in layout.groups)


def choose(device: torch.device, name: str | None) -> Backend:
    """Return the backend of this name, or for None the fastest one on the device.

    Raises:
        ValueError: there is no backend of this name.
        BackendUnavailable: it cannot run on the device.
    """
    if name not in (None, "reference", "triton"):
        raise ValueError(f"backend is {name!r}, expected 'reference', 'triton' or None")
    if name == "reference" or (name is None and device.type != "cuda"):
        return Backend(digest_sum, compare, select, ReferenceIndex)
    if cause := backends.why_unavailable("triton", device):
        raise BackendUnavailable(f"backend 'triton' of weight_sync cannot run: {cause}")
    kernels: Any = backends.triton_module()[0]
    triton = kernels.weight_sync
    return Backend(triton.digest_sum, triton.compare, triton.select, TritonIndex)
