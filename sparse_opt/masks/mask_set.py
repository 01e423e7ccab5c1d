"""MaskSet: the active elements of a model's parameters; RandomMask: one that is drawn when the model is known."""

from __future__ import annotations

import builtins
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ..errors import MaskError, listed
from ..tensors import (
    canonical_names,
    combined_digest,
    dtype_name,
    floating_parameters_of,
    named_parameters_of,
    sharing_parameters,
    tensor_digest,
)
from . import mask_files
from .parameters import Part, group_by_layer, group_by_part, layer_of, router_names
from .patterns import PATTERNS, most_specific_pattern
from .positions import checked_positions, index_dtype, intersection_size, positions_of_bool
from .sampling import random_indices, random_indices_of_all


@dataclass(frozen=True)
class MaskStats:
    """Statistics of a mask over some parameters: `nnz` active of `numel` elements."""

    nnz: int
    numel: int

    @classmethod
    def sum(cls, stats: Iterable[MaskStats]) -> MaskStats:
        """Return the statistics of several parameters together."""
        stats = list(stats)
        return cls(sum(s.nnz for s in stats), sum(s.numel for s in stats))

    @property
    def density(self) -> float:
        """nnz / numel; 0 if there are no elements."""
        return self.nnz / self.numel if self.numel else 0.0

    @property
    def sparsity(self) -> float:
        """1 - density."""
        return 1.0 - self.density


@dataclass(frozen=True)
class RandomMask:
    """The arguments of `MaskSet.random` for a model that is not known yet; optimizers and trainers draw the mask.

    Raises:
        MaskError: density, pattern or pool is out of range.
    """

    density: float
    pattern: str = "element"
    seed: int = 0
    pool: str = "tensor"
    routers: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.density <= 1.0:
            raise MaskError(f"mask density is {self.density}, expected 0 to 1")
        if self.pattern not in PATTERNS:
            raise MaskError(f"mask pattern is {self.pattern!r}, expected one of {', '.join(PATTERNS)}")
        if self.pool not in ("tensor", "global"):
            raise MaskError(f"pool is {self.pool!r}, expected tensor or global")


class MaskSet:
    """Mapping from parameter name to the sorted unique positions of its active elements, and their pattern.

    Positions are checked once, on construction, and not again by ops and kernels: do not write to the tensors. Equality
    compares names, shapes and positions, but not pattern and metadata.

    Args:
        indices: name -> [nnz] integer tensor of positions in the flattened parameter, strictly ascending. Stored on the
            CPU as int32, or as int64 for parameters of 2**31 or more elements. An empty tensor is a parameter without
            active elements.
        shapes: name -> shape of the parameter, for the same names.
        pattern: one of element, run16, run32, tile64, tile128 (see `masks.patterns`); the positions must follow it.
        metadata: strings saved with the mask: method, sparsity (percent), step, model and the like.

    Raises:
        MaskError: a name, dtype, position, pattern or metadata entry is invalid; names the tensor.
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
            raise MaskError(f"mask pattern is {pattern!r}, expected one of {', '.join(PATTERNS)}")
        if set(indices) != set(shapes):
            odd = sorted(set(indices) ^ set(shapes))
            raise MaskError(f"indices and shapes name different tensors: {listed(odd)}")
        checked = {name: checked_positions(name, tensor, shapes[name], pattern) for name, tensor in indices.items()}
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
                raise MaskError(f"mask metadata {key!r} is {value!r}, expected a string")
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
        """Build a mask from positions that are valid by construction or were checked before."""
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
        pool: str = "tensor",
        routers: builtins.bool = False,
    ) -> MaskSet:
        """Draw a uniformly random mask; the same seed gives the same mask on every machine.

        Units of the pattern (elements, runs or tiles) are drawn without replacement. With pool `tensor`, each tensor
        gets round(density * units) of its own (halves round up), from a random stream seeded by the seed and the
        tensor's name, so that they do not depend on the other tensors. A tensor with fewer than 1 / (2 * density) units
        gets none. With pool `global`, units of all tensors are drawn from one stream, in a random order until the next
        one would exceed round(density * numel) elements, so that the whole mask has its density to part of a unit.

        Takes time linear in numel, and one byte of scratch memory per unit of the largest tensor, or of all tensors.

        Args:
            model_or_shapes: a module, whose floating-point parameters are used, tied ones once under their first
                name; or name -> tensor or shape.
            density: fraction of active units, 0 to 1.
            pattern: see `MaskSet`.
            seed: any integer.
            pool: whether the density is that of each tensor (tensor) or of all together (global).
            routers: whether the routers of experts are drawn from too; without them they are not listed, and frozen.

        Raises:
            MaskError: density, pattern or pool is out of range; two parameters of the model share memory; or a density
                above 0 is less than half a unit of every tensor, so that the mask would be empty.
        """
        RandomMask(density, pattern, seed, pool)  # checks them
        shapes = _shapes_of(model_or_shapes)
        if not routers:
            frozen = router_names(shapes)
            shapes = {name: shape for name, shape in shapes.items() if name not in frozen}
        metadata = {"method": "random", "sparsity": f"{100 * (1 - density):.10g}", "seed": str(seed)}
        if pool == "global":
            indices = random_indices_of_all(shapes, density, pattern, seed)
            metadata["pool"] = pool
        else:
            indices = {name: random_indices(name, shape, density, pattern, seed) for name, shape in shapes.items()}
        if density > 0 and any(map(math.prod, shapes.values())) and not any(t.numel() for t in indices.values()):
            where, remedy = "in all tensors together", ""
            if pool == "tensor":
                where, remedy = "in each tensor", "pool='global', which draws from all tensors together, "
            raise MaskError(
                f"the random mask is empty: density {density:g} is less than one unit of {pattern} {where}; use "
                f"{remedy}a larger density or a smaller pattern"
            )
        return cls._of_checked(indices, shapes, pattern, metadata)

    @classmethod
    def experts(
        cls,
        model_or_shapes: nn.Module | Mapping[str, Tensor | Sequence[int]],
        experts: Mapping[int, Iterable[int]] | Mapping[str, Iterable[int]],
        *,
        routers: builtins.bool = False,
    ) -> MaskSet:
        """Return the mask of all weights of some experts of a mixture of experts, their biases included.

        All parameters of experts are listed, so that `density` is the share of the experts' weights. `union` adds other
        weights, such as those of shared experts and attention. The pattern is the most specific that fits: tile128
        without biases.

        Takes 4 bytes for each weight of the experts, 8 in parameters of 2**31 or more elements.

        Args:
            model_or_shapes: as in `random`.
            experts: number of a layer, as in the names of its parameters -> numbers of its experts. Numbers of layers
                may be strings, as in the JSON of ESFT.
            routers: whether all weights of the routers of these layers are active too.

        Raises:
            MaskError: there is no such layer or expert, or the model has no experts; names what there is.
        """
        shapes = _shapes_of(model_or_shapes)
        try:
            chosen = {int(layer): list(numbers) for layer, numbers in experts.items()}
        except ValueError as error:
            raise MaskError(
                f"experts are given by the number of their layer, such as {{3: [0, 17]}}: {error}"
            ) from error
        from .experts import positions_of_experts

        indices, pattern = positions_of_experts(shapes, chosen)
        for name in sorted(router_names(shapes)) if routers else ():
            if layer_of(name) in chosen:
                numel = math.prod(shapes[name])
                indices[name] = torch.arange(numel, dtype=index_dtype(numel), device="cpu")
        ordered = {name: indices[name] for name in shapes if name in indices}
        return cls._of_checked(ordered, {name: shapes[name] for name in ordered}, pattern, {"method": "experts"})

    @classmethod
    def from_bool(cls, masks: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> MaskSet:
        """Build a mask from bool tensors shaped like the parameters, with the most specific pattern that fits all.

        Raises:
            MaskError: a name is not a string, or a tensor is not bool, not dense or on the meta device; names it.
        """
        indices, shapes = {}, {}
        for name, tensor in masks.items():
            indices[name] = positions_of_bool(name, tensor)
            shapes[name] = tuple(tensor.shape)
        pattern = most_specific_pattern((indices[name], shapes[name]) for name in indices)
        return cls._of_checked(indices, shapes, pattern, metadata)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | Mapping[str, Tensor] | None = None) -> MaskSet:
        """Read a mask file: `.safetensors` as written by `save`, or a `.pt` dictionary of bool tensors.

        A `.pt` file holds name -> bool tensor, either directly or under the key `masks`; strings and numbers next to
        that key become metadata. It is read with `weights_only=True`, which refuses any other Python object.

        Args:
            path: the file.
            model: if given, the mask is checked against it and takes its names, as by `load(path).resolve(model)`.

        Raises:
            MaskError: the file is missing, damaged, not a mask, or does not fit the model; names the file.
        """
        path = Path(path)
        content = mask_files.read(path)
        try:
            if isinstance(content, mask_files.BoolMasks):
                mask = cls.from_bool(content.masks, metadata=content.metadata)
            else:
                mask = cls(content.indices, content.shapes, pattern=content.pattern, metadata=content.metadata)
                if mask.digest != content.digest:
                    raise MaskError(
                        f"the positions have digest {mask.digest}, expected {content.digest}, as the file states"
                    )
            return mask if model is None else mask.resolve(model)
        except MaskError as error:
            raise MaskError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> Path:
        """Write the mask to one safetensors file, atomically, replacing an existing file; return the path.

        Raises:
            MaskError: the suffix is not `.safetensors`, a metadata key is reserved, or the file cannot be written.
        """
        path = Path(path)
        mask_files.write(path, self.indices, self.shapes, self.pattern, self.sparsity, self.metadata, self.digest)
        return path

    def resolve(self, model: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> MaskSet:
        """Return this mask with the model's parameter names, in the model's order.

        Tied parameters (one parameter, or tensors over the same memory, under several names) count once, under the
        first name; if the mask lists several of the names, their positions must be equal. Two different `Parameter`s
        that share memory are not tied, because each has its own gradient.

        Args:
            model: a module, or its parameters as name -> tensor or (name, tensor) pairs.

        Raises:
            MaskError: a name is not in the model, a shape differs, or tied names disagree (lists the mismatches); or a
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
            raise MaskError(f"mask does not fit the model: {listed(problems, '; ')}")
        ordered = {name: found[name] for name in params if name in found}
        shapes = {name: tuple(params[name].shape) for name in ordered}
        return self._of_checked(ordered, shapes, self.pattern, self.metadata)

    def bool(self, name: str) -> Tensor:
        """Return the mask of one parameter as a bool tensor of its shape, on the CPU."""
        dense = torch.zeros(math.prod(self.shapes[name]), dtype=torch.bool, device="cpu")
        dense[self[name].long()] = True
        return dense.view(self.shapes[name])

    def jaccard(self, other: MaskSet) -> float:
        """Return the Jaccard index: elements active in both masks / elements active in either; 1 if both are empty.

        A parameter listed by only one of the masks is empty in the other.

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
        """Return the statistics of each parameter, in the mask's order."""
        return {n: MaskStats(t.numel(), math.prod(self.shapes[n])) for n, t in self.indices.items()}

    def per_layer(self) -> dict[int | None, MaskStats]:
        """Return the statistics of each layer (first integer in a dotted name), ascending; None, last, is the rest."""
        return {layer: MaskStats.sum(of) for layer, of in group_by_layer(self.per_tensor()).items()}

    def per_part(self) -> dict[Part, MaskStats]:
        """Return the statistics of each listed part of the model (`parameters.component_of`), in `PARTS` order."""
        return {part: MaskStats.sum(of) for part, of in group_by_part(self.per_tensor()).items()}

    def per_expert(self) -> dict[tuple[int | None, int], MaskStats]:
        """Return the statistics of each expert by (layer, number), ascending; empty without experts."""
        from .experts import count_by_expert, group_by_expert

        counts = {n: count_by_expert(t, n, self.shapes[n]) for n, t in self.indices.items()}
        stats = {
            name: {number: MaskStats(nnz, math.prod(self.shapes[name]) // len(of)) for number, nnz in of.items()}
            for name, of in counts.items()
        }
        return {expert: MaskStats.sum(of) for expert, of in group_by_expert(stats).items()}

    def density_of(self, model: nn.Module | Mapping[str, Tensor]) -> float:
        """Return active elements / elements of all the model's parameters, listed or not; tied ones count once.

        Raises:
            MaskError: the mask does not fit the model.
        """
        params = named_parameters_of(model)
        firsts = canonical_names(params)
        numel = sum(p.numel() for name, p in params.items() if firsts[name] == name)
        return MaskStats(self.resolve(model).nnz, numel).density

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the listed parameters, including those without active elements."""
        return tuple(self.indices)

    @property
    def nnz(self) -> int:
        """Number of active elements."""
        return sum(t.numel() for t in self.indices.values())

    @property
    def numel(self) -> int:
        """Number of elements of all listed parameters."""
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
        """xxh3_128 digest of names, shapes and positions, 32 hex digits; independent of the order of the names."""
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

    # Unhashable: compared by content, with mutable metadata. `object` types the attribute as a method.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"MaskSet({len(self)} tensors, {self.nnz} of {self.numel} elements active, "
            f"sparsity {self.sparsity:.4%}, pattern {self.pattern})"
        )


def as_mask_set(mask: MaskSet | RandomMask | float, params: nn.Module | Mapping[str, Tensor]) -> MaskSet:
    """Return the mask, or draw it for the floating-point parameters; a number is the density of a `RandomMask`.

    Raises:
        TypeError: `mask` has another type.
        MaskError: as `MaskSet.random` raises.
    """
    if isinstance(mask, MaskSet):
        return mask
    if isinstance(mask, numbers.Real) and not isinstance(mask, bool):
        mask = RandomMask(float(mask))
    if not isinstance(mask, RandomMask):
        raise TypeError(f"mask is a {type(mask).__name__}, expected a MaskSet, a RandomMask or a density")
    if not isinstance(params, nn.Module):
        params = {name: p for name, p in params.items() if p.is_floating_point()}
    return MaskSet.random(
        params, density=mask.density, pattern=mask.pattern, seed=mask.seed, pool=mask.pool, routers=mask.routers
    )


def _shapes_of(model_or_shapes: nn.Module | Mapping[str, Tensor | Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a module's floating-point parameters, tied ones once, or of what is given."""
    if isinstance(model_or_shapes, nn.Module):
        params = named_parameters_of(model_or_shapes)
        require_own_memory(params, params)
        return {name: tuple(p.shape) for name, p in floating_parameters_of(model_or_shapes).items()}
    return {
        name: tuple(item.shape if isinstance(item, Tensor) else map(int, item))
        for name, item in model_or_shapes.items()
    }


def require_own_memory(params: Mapping[str, Tensor], active: Iterable[str]) -> None:
    """Raise a MaskError if a parameter named in `active` shares memory with another parameter; names both."""
    ids = {id(params[name]) for name in active if name in params}
    for first, second in sharing_parameters(params):
        if id(params[first]) in ids or id(params[second]) in ids:
            raise MaskError(
                f"{first} and {second} are different parameters that share memory; tie them by using one Parameter for "
                "both, or give each its own"
            )
