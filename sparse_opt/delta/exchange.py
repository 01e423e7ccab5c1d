"""Exchange: new values of some elements of tensors, which change places with the tensors' own in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    values: Tensor  # [elements]: the new ones or, while the exchange is entered, those that they replaced
    entered: bool = False


class Exchange:
    """New values of the elements that differ between tensors and their new contents.

    Memory: the index and the value of each element, 4 bytes for bf16 where two-byte indices suffice, else 6; of runs,
    an index for each run.

    Args:
        model: has the tensors as parameters or buffers.
        changes: (name, tensor, new contents, run length), one after the other: new contents are freed before the next
            ones are made. Tensors are contiguous; of several at one address, the first is exchanged. With a run
            length, all elements of an aligned run are exchanged if one of them differs.
    """

    def __init__(self, model: nn.Module, changes: Iterable[tuple[str, Tensor, Tensor, int]]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[str, tuple[Mapping[str, Tensor | None], str, torch.device]] = {}
        places: dict[int, tuple[Mapping[str, Tensor | None], str]] = {
            id(tensor): (owner, key)
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for key, tensor in owner.items()
        }
        addresses: set[int] = set()
        kinds: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for name, tensor, new, run_length in changes:
            if tensor.data_ptr() in addresses:  # tied in this model, but not in the delta's
                continue
            addresses.add(tensor.data_ptr())
            self.tensors[name] = tensor
            self._places[name] = *places[id(tensor)], tensor.device
            bits = as_bits(new)
            indices, values, _ = ops.delta_encode([as_bits(tensor.detach())], [bits])
            if run_length > 1:
                runs = (indices // run_length).unique_consecutive().to(torch.int64)
                values = bits[expanded(runs, run_length)]
                indices = (runs * run_length).to(index_dtype(tensor.numel()))
            narrow = run_length == 1 and indices.dtype == torch.int32 and ops.can_narrow(indices)
            key = (tensor.device, tensor.dtype, indices.dtype, run_length, narrow)
            # Cloned, because `delta_encode` may return views of larger buffers.
            kinds.setdefault(key, []).append((tensor, indices.clone(), values.view(tensor.dtype).clone()))
        self._groups = [_group(parts, run_length, narrow) for (*_, run_length, narrow), parts in kinds.items()]

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values."""
        bases = (group.ops.index_bases for group in self._groups)
        return sum(group.ops.indices.nbytes + group.values.nbytes for group in self._groups) + sum(
            base.nbytes for base in bases if base is not None
        )

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
        for group in self._groups:
            if group.entered != entered:  # a call that an exception interrupted can be repeated or undone
                group.ops.indexed_swap_(group.values)
                group.entered = entered
        torch.clear_autocast_cache()  # it holds casts of the previous weights


def _group(parts: list[tuple[Tensor, Tensor, Tensor]], run_length: int, narrow: bool) -> _Group:
    tensors, indices, values = (list(column) for column in zip(*parts, strict=True))
    ends = list(accumulate(len(part) for part in values))
    starts = [0, *ends[:-1]]
    packed, bases = torch.cat(indices), None
    if narrow:
        packed, bases = ops.narrow_indices(packed, starts, ends)
    bound = ops.bind(tensors, packed, starts, ends, run_length=run_length, index_bases=bases)
    return _Group(bound, torch.cat(values))
