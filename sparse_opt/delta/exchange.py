"""Exchange: new values of some elements of tensors, which change places with the tensors' own in one pass.

A quantised layer keeps its weight, and gets an overlay of the new values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import DeltaError
from ..masks.positions import index_dtype
from ..ops.bound import BoundOps
from ..quantised_layers import QuantisedWeight
from ..tensors import as_bits
from .change import expanded

if TYPE_CHECKING:
    from ..optim.quantised import Overlay, Scratch


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
    """New values of the elements that differ between weights of a module and their new contents.

    Args:
        model: has the tensors as parameters or buffers, and the quantised layers.
        changes: (name, tensor or quantised layer, new contents, run length), one after the other: new contents are
            freed before the next ones are made. Tensors are contiguous; of several at one address, the first is
            exchanged. With a run length, all elements of an aligned run are exchanged if one of them differs.

    Attributes:
        tensors: by name, those that are exchanged.
        nbytes: bytes of indices and values.

    Raises:
        DeltaError: a quantised layer has an overlay already; names it.
    """

    def __init__(self, model: nn.Module, changes: Iterable[tuple[str, Tensor | QuantisedWeight, Tensor, int]]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._overlays: list[Overlay] = []
        self._places: dict[str, tuple[Mapping[str, Tensor | None], str, torch.device]] = {}
        self._elements = ElementSwap(self._parts(model, changes))
        self.nbytes = self._elements.nbytes + sum(overlay.nbytes for overlay in self._overlays)

    def _parts(
        self, model: nn.Module, changes: Iterable[tuple[str, Tensor | QuantisedWeight, Tensor, int]]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        places: dict[int, tuple[Mapping[str, Tensor | None], str]] = {
            id(tensor): (owner, key)
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for key, tensor in owner.items()
        }
        addresses: set[int] = set()
        scratches: Mapping[str, Scratch] = {}
        for name, tensor, new, run_length in changes:
            if isinstance(tensor, QuantisedWeight):
                scratches = scratches or _scratches(model)
                self._overlays.append(_overlay(tensor, scratches[tensor.name], new, run_length))
                continue
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
        for overlay in self._overlays:
            _require_place(overlay)
        self._elements.swap_(entered=entered)
        for overlay in self._overlays:
            if entered:
                overlay.install()
            elif overlay.is_installed:
                overlay.remove()
        torch.clear_autocast_cache()  # it holds casts of the previous weights


def _scratches(model: nn.Module) -> Mapping[str, Scratch]:
    from ..optim.quantised import scratches_of

    return scratches_of(model)


def _overlay(layer: QuantisedWeight, scratch: Scratch, new: Tensor, run_length: int) -> Overlay:
    from ..optim import quantised

    try:
        quantised.require_own_forward(layer)
    except ValueError as error:
        raise DeltaError(str(error)) from error
    starts, values = changed_elements(layer.dequantised(), new, run_length)
    positions = starts if run_length == 1 else expanded(starts // run_length, run_length).to(starts.dtype)
    overlay = quantised.Overlay(layer, scratch, positions.cpu(), run_length, values=values.view(new.dtype))
    _require_place(overlay)
    return overlay


def _require_place(overlay: Overlay) -> None:
    from ..optim.quantised import overlay_of

    name = overlay.layer.name
    if overlay.was_moved:
        raise DeltaError(f"{name} of the model was replaced, or moved to another device, since it was decoded")
    if overlay_of(overlay.layer) not in (None, overlay):
        raise DeltaError(
            f"{name} of the model has trained weights over its quantised base already, of an optimizer or a delta: "
            "load the model again, or remove that delta"
        )


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
