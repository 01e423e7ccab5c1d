"""Patches of whole states: one `delta.codec.Patch` per dtype, over whole tensors or over a mask's elements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from .. import ops
from ..backends import why_unavailable
from ..errors import DeltaLogError, MaskError
from ..files import one_line
from ..masks.mask_set import MaskSet
from ..tensors import as_bits
from . import codec
from .codec import Patch, PatchError
from .files import MASK_NAME, StepHeader, opened
from .state import StateLayout, TensorSpec


class LogMask:
    """The mask of a log; gathers and scatters its elements of tensors, on the tensors' device.

    Keeps a copy of the positions on each device where it was used.
    """

    def __init__(self, mask: MaskSet) -> None:
        self.mask = mask
        self._positions: dict[tuple[tuple[str, ...], torch.device], _Positions] = {}

    @classmethod
    def load(cls, directory: Path, header: StepHeader, layout: StateLayout) -> LogMask:
        """Read the mask in a log's directory.

        Raises:
            DeltaLogError: it is missing or damaged, is not the mask named in the header, or does not fit the layout.
        """
        path, where = directory / MASK_NAME, header.file.where
        try:
            mask = MaskSet.load(path)
        except MaskError as error:
            raise DeltaLogError(f"{where}: needs the mask of the log: {error}") from error
        if mask.digest != header.mask_digest:
            raise DeltaLogError(f"{where}: needs the mask {header.mask_digest}, but {path} is the mask {mask.digest}")
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        for name in mask.names:
            if shapes.get(name) != mask.shapes[name]:
                raise DeltaLogError(f"{where}: the mask {path} has {name}, which the log does not have in this shape")
        return cls(mask)

    @property
    def digest(self) -> str:
        return self.mask.digest

    def numel(self, name: str) -> int:
        """Return the number of a tensor's elements in the mask; 0 for a tensor that the mask does not list."""
        return len(self.mask.indices[name]) if name in self.mask.indices else 0

    def take(self, names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather the mask's elements of contiguous tensors, of one dtype and on one device: copies, [numel] each."""
        at = self._at(names, tensors[0].device)
        compact = torch.empty(at.ends[-1], dtype=as_bits(tensors[0]).dtype, device=tensors[0].device)
        dense = [as_bits(tensor) for tensor in tensors]
        if why_unavailable(compact.device.type, compact.device):
            for tensor, start, end in zip(dense, at.starts, at.ends, strict=True):
                compact[start:end] = tensor[at.indices[start:end]]
        else:
            torch.ops.sparse_opt_native.indexed_take_(dense, compact, at.indices, at.starts, at.ends)
        return [compact[s:e].view(tensors[0].dtype) for s, e in zip(at.starts, at.ends, strict=True)]

    def put_(self, names: Sequence[str], tensors: Sequence[Tensor], compact: Sequence[Tensor]) -> None:
        """Scatter `compact`, as returned by `take`, into the tensors."""
        at = self._at(names, tensors[0].device)
        values = torch.cat([as_bits(part) for part in compact])
        ops.delta_apply_([as_bits(tensor) for tensor in tensors], at.indices, values, at.starts, at.ends)

    def _at(self, names: Sequence[str], device: torch.device) -> _Positions:
        key = (tuple(names), device)
        if key not in self._positions:
            none = torch.empty(0, dtype=torch.int32, device="cpu")
            parts = [self.mask.indices.get(name, none) for name in names]
            wide = any(part.dtype == torch.int64 for part in parts)
            indices = torch.cat([part.to(torch.int64) if wide else part for part in parts])
            ends = list(accumulate(len(part) for part in parts))
            self._positions[key] = _Positions(indices.to(device), [0, *ends[:-1]], ends)
        return self._positions[key]


@dataclass(frozen=True)
class _Positions:
    """Concatenated positions of several tensors: those of tensor i are [starts[i], ends[i])."""

    indices: Tensor
    starts: list[int]
    ends: list[int]


class MaskedState:
    """The mask's elements of a state, on its devices."""

    def __init__(self, mask: LogMask, layout: StateLayout, state: Mapping[str, Tensor]) -> None:
        self.mask, self._layout = mask, layout
        self._elements = self._taken(state)

    def encode(self, new: Mapping[str, Tensor], *, advance: bool) -> StatePatch:
        """Encode the patch to the mask's elements of `new`; see `delta.patches.encode`."""
        groups = {
            dtype: codec.encode(self._elements[dtype], after, advance=advance)
            for dtype, after in self._taken(new).items()
        }
        return StatePatch(self._layout, groups, self.mask)

    def _taken(self, state: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        kinds = {dtype: [spec.name for spec in specs] for dtype, specs in by_dtype(self._layout).items()}
        return {dtype: self.mask.take(names, [state[name] for name in names]) for dtype, names in kinds.items()}


@dataclass(frozen=True)
class StatePatch:
    """The changes of a state. groups: dtype (`bfloat16`) -> patch of its tensors in the layout's order."""

    layout: StateLayout
    groups: Mapping[str, Patch]
    mask: LogMask | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Return name -> number of changed elements."""
        return {
            spec.name: count
            for dtype, specs in by_dtype(self.layout).items()
            for spec, count in zip(specs, self.groups[dtype].counts.tolist(), strict=True)
        }

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self.groups.values())

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors of a patch file, on the devices where they were computed."""
        return {f"{dtype}.{name}": part for dtype, patch in self.groups.items() for name, part in patch.parts().items()}

    def apply_(self, state: Mapping[str, Tensor], where: str) -> None:
        """Apply the patch to a state of contiguous tensors. Raises a DeltaLogError, prefixed by `where`, on damage."""
        for dtype, specs in by_dtype(self.layout).items():
            _apply_([(spec.name, state[spec.name]) for spec in specs], self.groups[dtype], self.mask, where)


def encode(
    layout: StateLayout,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    *,
    masked: MaskedState | None = None,
    advance: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> StatePatch:
    """Encode the patch from `old` to `new`: contiguous tensors of the layout, all of one dtype on one device.

    With a mask, the patch is over the mask's elements if nothing else has changed, and otherwise over all elements.

    Args:
        masked: the mask's elements of `old`.
        advance: also copy the bits of `new` to `old` and `masked`. After an error their contents are undefined.
        meanwhile: see `delta.codec.encode`; called at least once.
    """
    groups = {}
    for dtype, specs in by_dtype(layout).items():
        before, after = [old[spec.name] for spec in specs], [new[spec.name] for spec in specs]
        groups[dtype] = codec.encode(before, after, advance=advance, meanwhile=meanwhile)
    whole = StatePatch(layout, groups)
    if masked is None:
        return whole
    compact = masked.encode(new, advance=advance)
    return compact if compact.counts == whole.counts else whole


def copy_(old: Mapping[str, Tensor], new: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Copy the bits of the named tensors of `new` to those of `old`."""
    if names:
        torch._foreach_copy_([as_bits(old[name]) for name in names], [as_bits(new[name]) for name in names])


def unpack(header: StepHeader, layout: StateLayout, mask: LogMask | None, payload: Mapping[str, Tensor]) -> StatePatch:
    """Build the patch from a file's tensors. Checks everything that does not require decoding.

    Raises:
        DeltaLogError: the payload does not fit the layout.
    """
    kinds = by_dtype(layout)
    parts: dict[str, dict[str, Tensor]] = {dtype: {} for dtype in kinds}
    for key, tensor in payload.items():
        dtype, _, part = key.partition(".")
        if dtype not in kinds:
            raise DeltaLogError(f"{header.file.where}: damaged: it holds {key}, but no tensor of the log is {dtype}")
        parts[dtype][part] = tensor
    groups = {}
    for dtype, specs in kinds.items():
        with _naming_patch(header, dtype):
            numels = _numels(specs, mask)
            groups[dtype] = Patch.from_parts(parts[dtype], specs[0].torch_dtype, numels)
    return StatePatch(layout, groups, mask)


class TensorPatches:
    """Applies patch files to one tensor alone, reading only that tensor's records."""

    def __init__(self, layout: StateLayout, name: str) -> None:
        self._spec = next(spec for spec in layout.tensors if spec.name == name)
        self._group = by_dtype(layout)[self._spec.dtype]

    def apply_(self, header: StepHeader, mask: LogMask | None, tensor: Tensor) -> None:
        """Apply one patch to the tensor. Raises DeltaLogError if the patch is damaged."""
        spec, prefix = self._spec, f"{self._spec.dtype}."
        with opened(header.file) as content, _naming_patch(header, spec.dtype):
            names = {key.removeprefix(prefix): key for key in content.names if key.startswith(prefix)}
            records = names.pop("records", None)
            if records is None:
                raise PatchError(f"it holds {sorted(names)}, expected records")
            patch = Patch.of_tensor_in(
                {part: content.read(key) for part, key in names.items()},
                content.entries[records].numel,
                lambda begin, end: content.read_range(records, begin, end),
                spec.torch_dtype,
                _numels(self._group, mask),
                self._group.index(spec),
            )
        _apply_([(spec.name, tensor)], patch, mask, header.file.where)


def _numels(specs: Sequence[TensorSpec], mask: LogMask | None) -> list[int]:
    """Return, for each tensor, the number of elements that a patch is coded over."""
    return [spec.numel if mask is None else mask.numel(spec.name) for spec in specs]


@contextlib.contextmanager
def _naming_patch(header: StepHeader, dtype: str) -> Iterator[None]:
    try:
        yield
    except PatchError as error:
        raise DeltaLogError(f"{header.file.where}: damaged: the patch of {dtype}: {one_line(error)}") from error


def by_dtype(layout: StateLayout) -> dict[str, list[TensorSpec]]:
    """Group the layout's tensors by dtype, in the layout's order."""
    kinds: dict[str, list[TensorSpec]] = {}
    for spec in layout.tensors:
        kinds.setdefault(spec.dtype, []).append(spec)
    return kinds


def _apply_(tensors: Sequence[tuple[str, Tensor]], patch: Patch, mask: LogMask | None, where: str) -> None:
    names, dense = [name for name, _ in tensors], [tensor for _, tensor in tensors]
    elements = dense if mask is None else mask.take(names, dense)
    try:
        codec.apply_(elements, patch)
    except PatchError as error:
        raise DeltaLogError(f"{where}: damaged: {one_line(error)}") from error
    if mask is not None:
        mask.put_(names, dense, elements)
