"""The patch of a whole state: one `patch_codec.Patch` for each dtype, over whole tensors or over a mask's elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import patch_codec
from .atomic_files import one_line
from .delta_files import MASK_NAME, StepHeader, opened
from .delta_state import StateLayout, TensorSpec
from .errors import DeltaLogError, MaskError
from .masks import MaskSet
from .patch_codec import Backend, Patch, PatchError
from .tensor_state import as_bits


class LogMask:
    """The mask of a log: a tensor's elements in it, taken out and put back, on the tensor's device.

    Keeps the positions on each device that it was used on.
    """

    def __init__(self, mask: MaskSet) -> None:
        self.mask = mask
        self._positions: dict[tuple[str, torch.device], Tensor] = {}

    @classmethod
    def load(cls, directory: Path, header: StepHeader, layout: StateLayout) -> LogMask:
        """The mask kept beside a log's steps.

        Raises:
            DeltaLogError: it is missing or damaged, not the one that the header names, or not one for the layout.
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
                raise DeltaLogError(f"{where}: the mask {path} has a tensor {name} that is not the log's")
        return cls(mask)

    @property
    def digest(self) -> str:
        return self.mask.digest

    def numel(self, name: str) -> int:
        """Elements of a tensor in the mask; 0 of one that the mask does not list."""
        return len(self.mask.indices[name]) if name in self.mask.indices else 0

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """[numel] of the tensor's dtype, a copy."""
        return as_bits(tensor).index_select(0, self._at(name, tensor.device)).view(tensor.dtype)

    def put_(self, name: str, tensor: Tensor, compact: Tensor) -> None:
        """Back into a contiguous tensor."""
        as_bits(tensor)[self._at(name, tensor.device)] = as_bits(compact)

    def _at(self, name: str, device: torch.device) -> Tensor:
        key = (name, device)
        if key not in self._positions:
            listed = self.mask.indices.get(name, torch.empty(0, dtype=torch.int32))
            self._positions[key] = listed.to(device)
        return self._positions[key]


@dataclass(frozen=True)
class StatePatch:
    """The changes of a state. groups: dtype (`bfloat16`) -> patch of its tensors in the layout's order."""

    layout: StateLayout
    groups: Mapping[str, Patch]
    mask: LogMask | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Name -> changed elements."""
        return {
            spec.name: count
            for dtype, specs in by_dtype(self.layout).items()
            for spec, count in zip(specs, self.groups[dtype].counts.tolist(), strict=True)
        }

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self.groups.values())

    def parts(self) -> dict[str, Tensor]:
        """The tensors of a patch file, on the devices where they were made."""
        return {f"{dtype}.{name}": part for dtype, patch in self.groups.items() for name, part in patch.parts().items()}

    def apply_(self, state: Mapping[str, Tensor], where: str, backend: Backend | None) -> None:
        """Lead a state of contiguous tensors on. Raises DeltaLogError, which begins with `where`, if damaged."""
        for dtype, specs in by_dtype(self.layout).items():
            _apply_([(spec.name, state[spec.name]) for spec in specs], self.groups[dtype], self.mask, where, backend)


def encode(
    layout: StateLayout,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    level: str,
    mask: LogMask | None,
    backend: Backend | None,
    *,
    advance: bool = False,
) -> StatePatch:
    """The patch from `old` to `new`, contiguous tensors of the layout, those of one dtype on one device.

    Over the mask's elements if there is a mask and nothing else has changed, which is counted over all elements.

    Args:
        advance: give `old` the bits of `new` as well. Where an error is raised, what `old` holds is void.
    """
    if mask is not None:
        compact = _encode(layout, old, new, level, mask, backend, advance=False)
        if compact.counts == count_changes(layout, old, new, backend):
            if advance:
                copy_(old, new, [name for name, count in compact.counts.items() if count])
            return compact
    return _encode(layout, old, new, level, None, backend, advance=advance)


def copy_(old: Mapping[str, Tensor], new: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Give the named tensors of `old` the bits of those of `new`."""
    if names:
        torch._foreach_copy_([as_bits(old[name]) for name in names], [as_bits(new[name]) for name in names])


def count_changes(
    layout: StateLayout, old: Mapping[str, Tensor], new: Mapping[str, Tensor], backend: Backend | None
) -> dict[str, int]:
    """Name -> elements whose bits differ, of tensors as `encode` takes them. Waits for each device once."""
    counts = {}
    for specs in by_dtype(layout).values():
        pairs = [old[spec.name] for spec in specs], [new[spec.name] for spec in specs]
        found = patch_codec.count_changes(*pairs, backend=backend).tolist()
        counts.update({spec.name: int(count) for spec, count in zip(specs, found, strict=True)})
    return counts


def unpack(header: StepHeader, layout: StateLayout, mask: LogMask | None, payload: Mapping[str, Tensor]) -> StatePatch:
    """The patch of a file's tensors, checked as far as it goes without decoding.

    Raises:
        DeltaLogError: the payload is not one for this layout.
    """
    where = header.file.where
    kinds = by_dtype(layout)
    parts: dict[str, dict[str, Tensor]] = {dtype: {} for dtype in kinds}
    for key, tensor in payload.items():
        dtype, _, part = key.partition(".")
        if dtype not in kinds:
            raise DeltaLogError(f"{where}: damaged: it holds {key}, and no tensor of the log is {dtype}")
        parts[dtype][part] = tensor
    groups = {}
    for dtype, specs in kinds.items():
        numels = [spec.numel if mask is None else mask.numel(spec.name) for spec in specs]
        try:
            groups[dtype] = Patch.from_parts(parts[dtype], header.level, specs[0].torch_dtype, numels)
        except PatchError as error:
            raise DeltaLogError(f"{where}: damaged: the patch of {dtype}: {one_line(error)}") from error
    return StatePatch(layout, groups, mask)


class TensorPatches:
    """Patch files read for one tensor alone: of the records, only the tensor's own are touched."""

    def __init__(self, layout: StateLayout, name: str, backend: Backend | None) -> None:
        self._layout, self._backend = layout, backend
        self._spec = next(spec for spec in layout.tensors if spec.name == name)

    def apply_(self, header: StepHeader, mask: LogMask | None, tensor: Tensor) -> None:
        """Lead the tensor on over one patch. Raises DeltaLogError on a damaged one."""
        spec = self._spec
        specs = by_dtype(self._layout)[spec.dtype]
        group = StateLayout(tuple(specs), {}, frozenset())
        with opened(header.file) as content:
            # The tensors that come out are the mapped file: nothing is read before it is used.
            prefix = f"{spec.dtype}."
            mapped = {key: content.get_tensor(key) for key in content.keys() if key.startswith(prefix)}
            whole = unpack(header, group, mask, mapped).groups[spec.dtype]
            patch = whole.of_tensor([other.name for other in specs].index(spec.name))
            _apply_([(spec.name, tensor)], patch, mask, header.file.where, self._backend)


def by_dtype(layout: StateLayout) -> dict[str, list[TensorSpec]]:
    """The tensors of each dtype, in the layout's order."""
    kinds: dict[str, list[TensorSpec]] = {}
    for spec in layout.tensors:
        kinds.setdefault(spec.dtype, []).append(spec)
    return kinds


def _encode(
    layout: StateLayout,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    level: str,
    mask: LogMask | None,
    backend: Backend | None,
    *,
    advance: bool,
) -> StatePatch:
    groups = {}
    for dtype, specs in by_dtype(layout).items():
        pairs = [(spec.name, old[spec.name], new[spec.name]) for spec in specs]
        if mask is not None:
            pairs = [(name, mask.take(name, a), mask.take(name, b)) for name, a, b in pairs]
        before, after = [a for _, a, _ in pairs], [b for _, _, b in pairs]
        groups[dtype] = patch_codec.encode(before, after, level, advance=advance, backend=backend)
    return StatePatch(layout, groups, mask)


def _apply_(
    tensors: Sequence[tuple[str, Tensor]], patch: Patch, mask: LogMask | None, where: str, backend: Backend | None
) -> None:
    dense = [tensor if mask is None else mask.take(name, tensor) for name, tensor in tensors]
    try:
        patch_codec.apply_(dense, patch, backend=backend)
    except PatchError as error:
        raise DeltaLogError(f"{where}: damaged: {one_line(error)}") from error
    if mask is not None:
        for (name, tensor), compact in zip(tensors, dense, strict=True):
            mask.put_(name, tensor, compact)
