"""Exchange: new values of some elements of tensors, which change places with the tensors' own in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import DeltaError
from ..masks.positions import index_dtype
from ..ops.bound import BoundOps
from ..tensors import as_bits
from .change import expanded


@dataclass(eq=False)
class _Group:
    """Elements of tensors of one device, dtype and layout of the indices."""

    ops: BoundOps
    values: Tensor  # [elements]: the new ones or, while they are entered, those that they replaced
    entered: bool = False


class ElementSwap:
    """Values for some elements of tensors, which change places with the tensors' own in one pass.

    Memory: the index and the value of each element, 4 bytes for bf16 where two-byte indices suffice, else 6; of runs,
    an index for each run.

    Args:
        parts: (tensor, indices, values, run length), of contiguous tensors that share no element. The indices are
            ascending, int32 or int64; with a run length they are the first elements of aligned runs.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, Tensor, Tensor, int]]) -> None:
        kinds: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for tensor, indices, values, run_length in parts:
            narrow = run_length == 1 and indices.dtype == torch.int32 and ops.can_narrow(indices)
            key = (tensor.device, tensor.dtype, indices.dtype, run_length, narrow)
            kinds.setdefault(key, []).append((tensor, indices, values))
        self._groups = [_group(parts, run_length, narrow) for (*_, run_length, narrow), parts in kinds.items()]

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values."""
        bases = (group.ops.index_bases for group in self._groups)
        return sum(group.ops.indices.nbytes + group.values.nbytes for group in self._groups) + sum(
            base.nbytes for base in bases if base is not None
        )

    @property
    def values(self) -> list[Tensor]:
        """The values that are not in the tensors now: the new ones or, while they are entered, the replaced ones."""
        return [group.values for group in self._groups]

    def swap_(self, *, entered: bool) -> None:
        """Put the new values into the tensors, or take them out. Can be repeated or undone after an exception."""
        for group in self._groups:
            if group.entered != entered:
                group.ops.indexed_swap_(group.values)
                group.entered = entered


class Exchange:
    """New values of the elements that differ between tensors of a module and their new contents.

    Args:
        model: has the tensors as parameters or buffers.
        changes: (name, tensor, new contents, run length), one after the other: new contents are freed before the next
            ones are made. Tensors are contiguous; of several at one address, the first is exchanged. With a run
            length, all elements of an aligned run are exchanged if one of them differs.

    Attributes:
        tensors: by name, those that are exchanged.
        nbytes: bytes of indices and values.
    """

    def __init__(self, model: nn.Module, changes: Iterable[tuple[str, Tensor, Tensor, int]]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[str, tuple[Mapping[str, Tensor | None], str, torch.device]] = {}
        self._elements = ElementSwap(self._parts(model, changes))
        self.nbytes = self._elements.nbytes

    def _parts(
        self, model: nn.Module, changes: Iterable[tuple[str, Tensor, Tensor, int]]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        places: dict[int, tuple[Mapping[str, Tensor | None], str]] = {
            id(tensor): (owner, key)
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for key, tensor in owner.items()
        }
        addresses: set[int] = set()
        for name, tensor, new, run_length in changes:
            if tensor.data_ptr() in addresses:  # tied in this model, but not in the delta's
                continue
            addresses.add(tensor.data_ptr())
            self.tensors[name] = tensor
            self._places[name] = *places[id(tensor)], tensor.device
            indices, values = changed_elements(tensor.detach(), new, run_length)
            yield tensor, indices, values.view(tensor.dtype), run_length

    def enter_(self) -> None:
        """Put the new values into the tensors, and keep those that they replace."""
        self._exchange_(entered=True)

    def leave_(self) -> None:
        """Undo `enter_`, bit for bit."""
        self._exchange_(entered=False)

    def _exchange_(self, *, entered: bool) -> None:
        for name, (owner, key, device) in self._places.items():
            if owner.get(key) is not (tensor := self.tensors[name]) or tensor.device != device:
                raise DeltaError(f"{name} of the model was replaced, or moved to another device, since it was decoded")
        self._elements.swap_(entered=entered)
        torch.clear_autocast_cache()  # it holds casts of the previous weights


def changed_elements(old: Tensor, new: Tensor, run_length: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the changed elements and their new bits or, with a run length, of the changed runs.

    Args:
        old, new: contiguous, of one shape and dtype.
    """
    bits = as_bits(new)
    indices, values, _ = ops.delta_encode([as_bits(old)], [bits])
    if run_length > 1:
        runs = (indices // run_length).unique_consecutive().to(torch.int64)
        return (runs * run_length).to(index_dtype(new.numel())), bits[expanded(runs, run_length)]
    return indices.clone(), values.clone()  # `delta_encode` may return views of larger buffers


def _group(parts: list[tuple[Tensor, Tensor, Tensor]], run_length: int, narrow: bool) -> _Group:
    tensors, indices, values = (list(column) for column in zip(*parts, strict=True))
    ends = list(accumulate(len(part) for part in values))
    starts = [0, *ends[:-1]]
    packed, bases = torch.cat(indices), None
    if narrow:
        packed, bases = ops.narrow_indices(packed, starts, ends)
    bound = ops.bind(tensors, packed, starts, ends, run_length=run_length, index_bases=bases)
    return _Group(bound, torch.cat(values))
