"""MaskSet: which elements of a model's parameters may change."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import MaskError
from ..tensors import (
    canonical_names,
    combined_digest,
    dtype_name,
    named_parameters_of,
    sharing_parameters,
    tensor_digest,
)
from . import files as mask_files
from .parameters import PARTS, Part, component_of, in_layer_order, layer_of
from .patterns import PATTERNS, broken_unit, most_specific_pattern
from .positions import intersection_size
from .sampling import random_indices

_SHOWN_MISMATCHES = 3
_FIRST_INT64_NUMEL = 2**31
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class MaskStats:
    """How much of `numel` elements a mask takes."""

    nnz: int
    numel: int

    @property
    def density(self) -> float:
        """nnz / numel; 0 where there are no elements."""
        return self.nnz / self.numel if self.numel else 0.0

    @property
    def sparsity(self) -> float:
        """1 - density."""
        return 1.0 - self.density


class MaskSet:
    """Parameter name -> sorted unique positions of its active elements, and the pattern they keep to.

    Everything is checked once, here: ops and kernels trust the positions, so do not write to the tensors. Equality
    compares names, shapes and positions; pattern and metadata are descriptions and take no part in it.

    Args:
        indices: name -> [nnz] integer tensor of positions in the flattened parameter, strictly ascending. Kept on the
            CPU as int32, as int64 for parameters of 2**31 elements and more. An empty tensor is a parameter without
            active elements.
        shapes: name -> shape of the parameter, for the same names.
        pattern: one of element, run16, run32, tile64, tile128 (see `masks.patterns`); the positions must keep to it.
        metadata: strings that travel with the file: method, sparsity (percent), step, model and the like.

    Raises:
        MaskError: a name, dtype, position, pattern or metadata entry is wrong; names the tensor.
    """

    def __init__(
        self,
        indices: Mapping[str, Tensor],
        shapes: Mapping[str, Sequence[int]],
        *,
        pattern: str = "element",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if pattern not in PATTERNS:
            raise MaskError(f"mask pattern is {pattern!r}, wanted one of {', '.join(PATTERNS)}")
        if set(indices) != set(shapes):
            odd = sorted(set(indices) ^ set(shapes))
            raise MaskError(f"indices and shapes name different tensors: {_listed(odd)}")
        checked = {name: _checked(name, tensor, shapes[name], pattern) for name, tensor in indices.items()}
        self._fill(checked, shapes, pattern, metadata)

    def _fill(
        self,
        indices: dict[str, Tensor],
        shapes: Mapping[str, Sequence[int]],
        pattern: str,
        metadata: Mapping[str, str] | None,
    ) -> None:
        for key, value in (metadata or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise MaskError(f"mask metadata {key!r} is {value!r}, wanted a string")
        self.indices: Mapping[str, Tensor] = MappingProxyType(indices)
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({n: tuple(map(int, shapes[n])) for n in indices})
        self.pattern = pattern
        self.metadata: dict[str, str] = dict(metadata or {})
        self._digest: str | None = None

    @classmethod
    def _of_checked(
        cls,
        indices: dict[str, Tensor],
        shapes: Mapping[str, Sequence[int]],
        pattern: str,
        metadata: Mapping[str, str] | None,
    ) -> MaskSet:
        """A mask of positions that are right by construction or were checked before."""
        mask = cls.__new__(cls)
        mask._fill(indices, shapes, pattern, metadata)
        return mask

    @classmethod
    def random(
        cls,
        model_or_shapes: nn.Module | Mapping[str, Tensor | Sequence[int]],
        *,
        density: float,
        pattern: str = "element",
        seed: int = 0,
    ) -> MaskSet:
        """A uniformly random mask, the same on every machine for one seed.

        Each tensor gets round(density * units) units of the pattern (elements, runs or tiles; halves round up), drawn
        without replacement from a stream of the seed and the tensor's name, so that neither the order nor the presence
        of other tensors changes them. Takes time linear in numel, and one byte of scratch per unit of the largest
        tensor.

        Args:
            model_or_shapes: a module, whose floating-point parameters are taken, tied ones once under their first
                name; or name -> tensor or shape.
            density: share of active units, 0 to 1.
            pattern: see `MaskSet`.
            seed: any integer.

        Raises:
            MaskError: density or pattern out of range; or two parameters of the model share memory.
        """
        if not 0.0 <= density <= 1.0:
            raise MaskError(f"mask density is {density}, wanted 0 to 1")
        if pattern not in PATTERNS:
            raise MaskError(f"mask pattern is {pattern!r}, wanted one of {', '.join(PATTERNS)}")
        shapes: dict[str, tuple[int, ...]] = {}
        if isinstance(model_or_shapes, nn.Module):
            params = named_parameters_of(model_or_shapes)
            require_own_memory(params, params)
            firsts = canonical_names(params)
            shapes = {n: tuple(p.shape) for n, p in params.items() if firsts[n] == n and p.is_floating_point()}
        else:
            for name, item in model_or_shapes.items():
                shapes[name] = tuple(item.shape) if isinstance(item, Tensor) else tuple(map(int, item))
        indices = {
            name: random_indices(name, shape, density, pattern, seed).to(_index_dtype(math.prod(shape)))
            for name, shape in shapes.items()
        }
        metadata = {"method": "random", "sparsity": f"{100 * (1 - density):.10g}", "seed": str(seed)}
        return cls._of_checked(indices, shapes, pattern, metadata)

    @classmethod
    def from_bool(cls, masks: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> MaskSet:
        """A mask from bool tensors shaped like the parameters; the pattern is the most specific one that all keep to.

        Raises:
            MaskError: a name is no string, or a tensor is not bool, not dense or without values; names it.
        """
        indices, shapes = {}, {}
        for name, tensor in masks.items():
            if not isinstance(name, str):
                raise MaskError(f"a mask has the name {name!r}, wanted a parameter's name")
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
                found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise MaskError(f"mask of {name} is {found}, wanted a bool tensor")
            if tensor.layout != torch.strided or tensor.is_meta:
                what = "on the meta device" if tensor.is_meta else str(tensor.layout)
                raise MaskError(f"mask of {name} is {what}, wanted a dense tensor with values")
            positions = tensor.detach().cpu().reshape(-1).nonzero().view(-1)
            indices[name] = positions.to(_index_dtype(tensor.numel()))
            shapes[name] = tuple(tensor.shape)
        pattern = most_specific_pattern((indices[name], shapes[name]) for name in indices)
        return cls._of_checked(indices, shapes, pattern, metadata)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | Mapping[str, Tensor] | None = None) -> MaskSet:
        """Read a mask file: `.safetensors` as `save` writes it, or a `.pt` dictionary of bool tensors.

        A `.pt` file holds name -> bool tensor, plain or under the key `masks`; strings and numbers beside it become
        metadata. It is read with `weights_only=True`: a file with any other Python object is refused.

        Args:
            path: the file.
            model: if given, the mask is checked against it and renamed: `load(path).resolve(model)`.

        Raises:
            MaskError: the file is missing, damaged, foreign, or does not fit the model; names the file.
        """
        path = Path(path)
        content = mask_files.read(path)
        try:
            if isinstance(content, mask_files.BoolMasks):
                mask = cls.from_bool(content.masks, metadata=content.metadata)
            else:
                mask = cls(content.indices, content.shapes, pattern=content.pattern, metadata=content.metadata)
                if mask.digest != content.digest:
                    raise MaskError(f"the positions have digest {mask.digest}, the file says {content.digest}")
            return mask if model is None else mask.resolve(model)
        except MaskError as error:
            raise MaskError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> Path:
        """Write the mask as one safetensors file, atomically, replacing a file of that name; returns the path.

        Raises:
            MaskError: the suffix is not `.safetensors`, a metadata key is reserved, or the file cannot be written.
        """
        path = Path(path)
        mask_files.write(path, self.indices, self.shapes, self.pattern, self.sparsity, self.metadata, self.digest)
        return path

    def save_bool(self, path: str | Path, *, plain: builtins.bool = False) -> Path:
        """Write the mask as a `.pt` dictionary of bool tensors, for other tools, atomically; returns the path.

        Holds and writes one byte for each element of the listed parameters. The pattern is not written: `load` finds
        the most specific one.

        Args:
            path: ends in .pt, .pth or .bin; a file of that name is replaced.
            plain: name -> tensor and nothing else; otherwise the tensors stand under `masks`, and the metadata beside
                them under `metadata`.

        Raises:
            MaskError: another suffix, a mask that lists no parameters, or the file cannot be written.
        """
        path = Path(path)
        mask_files.write_bool(path, {name: self.bool(name) for name in self.indices}, self.metadata, plain=plain)
        return path

    def resolve(self, model: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> MaskSet:
        """This mask under a model's own names, in the model's order.

        Tied parameters (one parameter, or tensors over the same memory, under several names) count once, under the
        first name; a mask that lists several of the names must say the same for each. Two different `Parameter`s that
        share memory are not tied: each would get a gradient of its own.

        Args:
            model: a module, or its parameters as name -> tensor or (name, tensor) pairs.

        Raises:
            MaskError: a name is not the model's, a shape differs, or tied names disagree; lists the mismatches. Or a
                parameter with active elements shares memory with another one.
        """
        params = named_parameters_of(model)
        require_own_memory(params, [name for name, positions in self.indices.items() if positions.numel()])
        firsts = canonical_names(params)
        problems: list[str] = []
        found: dict[str, Tensor] = {}
        for name, positions in self.indices.items():
            if name not in params:
                problems.append(f"{name} is not a parameter of the model")
            elif self.shapes[name] != tuple(params[name].shape):
                problems.append(
                    f"{name} is {list(self.shapes[name])} in the mask, {list(params[name].shape)} in the model"
                )
            elif firsts[name] in found and not torch.equal(found[firsts[name]], positions):
                problems.append(f"{name} is tied to {firsts[name]} in the model, but the mask differs between the two")
            else:
                found[firsts[name]] = positions
        if problems:
            raise MaskError(f"mask does not fit the model: {_listed(problems, '; ')}")
        ordered = {name: found[name] for name in params if name in found}
        shapes = {name: tuple(params[name].shape) for name in ordered}
        return self._of_checked(ordered, shapes, self.pattern, self.metadata)

    def bool(self, name: str) -> Tensor:
        """The mask of one parameter as a bool tensor of its shape, on the CPU."""
        dense = torch.zeros(math.prod(self.shapes[name]), dtype=torch.bool, device="cpu")
        dense[self[name].long()] = True
        return dense.view(self.shapes[name])

    def jaccard(self, other: MaskSet) -> float:
        """Elements active in both over elements active in either; 1 if both masks are empty.

        A parameter that only one of the masks lists counts as empty in the other.

        Raises:
            MaskError: a parameter has different shapes in the two masks.
        """
        both = 0
        for name in self.indices.keys() & other.indices.keys():
            if self.shapes[name] != other.shapes[name]:
                raise MaskError(
                    f"{name} is {list(self.shapes[name])} in one mask, {list(other.shapes[name])} in the other"
                )
            both += intersection_size(self[name], other[name])
        either = self.nnz + other.nnz - both
        return both / either if either else 1.0

    def per_tensor(self) -> dict[str, MaskStats]:
        """Figures of each parameter, in the mask's order."""
        return {n: MaskStats(t.numel(), math.prod(self.shapes[n])) for n, t in self.indices.items()}

    def per_layer(self) -> dict[int | None, MaskStats]:
        """Figures of each layer in ascending order: the first integer in a dotted name; None, last, holds the rest."""
        sums = self.grouped(layer_of)
        return {layer: sums[layer] for layer in in_layer_order(sums)}

    def per_part(self) -> dict[Part, MaskStats]:
        """Figures of each part of a model (`components.component_of`) that the mask lists, in the order of `PARTS`."""
        sums = self.grouped(lambda name: component_of(name).part)
        return {part: sums[part] for part in PARTS if part in sums}

    def grouped(self, key_of: Callable[[str], _Key]) -> dict[_Key, MaskStats]:
        """Figures summed over the parameters whose names have the same key."""
        sums: dict[_Key, MaskStats] = {}
        for name, figures in self.per_tensor().items():
            before = sums.get(key_of(name), MaskStats(0, 0))
            sums[key_of(name)] = MaskStats(before.nnz + figures.nnz, before.numel + figures.numel)
        return sums

    def density_of(self, model: nn.Module | Mapping[str, Tensor]) -> float:
        """Active elements over all elements of a model's parameters, also those the mask does not list; tied ones once.

        Raises:
            MaskError: the mask does not fit the model.
        """
        params = named_parameters_of(model)
        firsts = canonical_names(params)
        numel = sum(p.numel() for name, p in params.items() if firsts[name] == name)
        return MaskStats(self.resolve(model).nnz, numel).density

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that the mask lists, also those without active elements."""
        return tuple(self.indices)

    @property
    def nnz(self) -> int:
        """Active elements."""
        return sum(t.numel() for t in self.indices.values())

    @property
    def numel(self) -> int:
        """Elements of all listed parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def density(self) -> float:
        """nnz / numel over the listed parameters."""
        return MaskStats(self.nnz, self.numel).density

    @property
    def sparsity(self) -> float:
        """1 - density."""
        return 1.0 - self.density

    @property
    def digest(self) -> str:
        """xxh3_128 over names, shapes and positions, as 32 hex digits; independent of the order of the names."""
        if self._digest is None:
            self._digest = combined_digest(
                (name, dtype_name(t), self.shapes[name], tensor_digest(t)) for name, t in self.indices.items()
            )
        return self._digest

    def __getitem__(self, name: str) -> Tensor:
        return self.indices[name]

    def __contains__(self, name: object) -> builtins.bool:
        return name in self.indices

    def __len__(self) -> int:
        return len(self.indices)

    def __eq__(self, other: object) -> builtins.bool:
        if not isinstance(other, MaskSet):
            return NotImplemented
        return self.shapes == other.shapes and all(torch.equal(t, other[n]) for n, t in self.indices.items())

    # Compared by content and mutable in its metadata; object types the attribute as a method.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"MaskSet({len(self)} tensors, {self.nnz} of {self.numel} elements active, "
            f"sparsity {self.sparsity:.4%}, pattern {self.pattern})"
        )


def require_own_memory(params: Mapping[str, Tensor], active: Iterable[str]) -> None:
    """Raise a MaskError if a parameter named in `active` shares memory with another parameter; names both."""
    ids = {id(params[name]) for name in active if name in params}
    for first, second in sharing_parameters(params):
        if id(params[first]) in ids or id(params[second]) in ids:
            raise MaskError(
                f"{first} and {second} are different parameters that share memory; tie them by using one Parameter for "
                "both, or give each its own"
            )


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < _FIRST_INT64_NUMEL else torch.int64


def _checked(name: str, tensor: Tensor, shape: Sequence[int], pattern: str) -> Tensor:
    """A private CPU copy of one tensor's positions, or the MaskError that names it."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
        found = f"{tensor.dtype} of {tensor.dim()} dimensions" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise MaskError(f"positions of {name} are {found}, wanted int32 or int64 of one dimension")
    if any(int(size) < 0 for size in shape):
        raise MaskError(f"shape of {name} is {list(shape)}, wanted sizes of 0 and more")
    numel = math.prod(map(int, shape))
    positions = tensor.detach().cpu()
    if positions.numel():
        if not bool((positions[1:] > positions[:-1]).all()):
            raise MaskError(f"positions of {name} are not strictly ascending, wanted sorted and unique")
        first, last = int(positions[0]), int(positions[-1])
        if first < 0 or last >= numel:
            raise MaskError(f"positions of {name} run from {first} to {last}, wanted 0 to {numel - 1}")
        broken = broken_unit(positions, shape, pattern)
        if broken is not None:
            raise MaskError(f"positions of {name} take a part of {pattern} unit {broken}, wanted all or none of each")
        return positions.to(_index_dtype(numel), copy=True).contiguous()
    # Not a copy: a tensor made of an empty numpy array has a stride of 0, and keeps it.
    return torch.empty(0, dtype=_index_dtype(numel), device="cpu")


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    more = len(items) - _SHOWN_MISMATCHES
    return separator.join(items[:_SHOWN_MISMATCHES]) + (f"{separator}and {more} more" if more > 0 else "")
