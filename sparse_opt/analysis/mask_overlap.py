"""Overlap of masks, compared with the overlap expected by chance at the same density of every tensor.

By chance means that the active elements of each tensor are drawn uniformly, independently of the other mask. If a and b
of the N elements of a tensor are active in the two masks, the number of common elements I is hypergeometric:

    mean m = a b / N,   variance v = a b (N - a) (N - b) / (N^2 (N - 1)).

Means and variances add up over tensors, so they are exact for a layer, a component and the whole model, and so are the
expectations m / a and m / b of the overlaps |A and B| / |A| and |A and B| / |B|. The Jaccard index is a ratio,
I / (S - I) with S = a + b; its expectation is computed from the Taylor series at m (delta method) to second order:

    m / (S - m) + S v / (S - m)^3,

which is within 1e-6 of the exact expectation for tensors with thousands of active elements.

Source: N. L. Johnson, A. W. Kemp, S. Kotz, Univariate Discrete Distributions, chapter 6, for the moments.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce

from ..errors import MaskError
from ..masks.experts import count_by_expert, experts_of, group_by_expert
from ..masks.mask_set import MaskSet
from ..masks.parameters import Part, group_by_layer, group_by_part
from ..masks.positions import intersection, intersection_size
from ..progress import progress_bar


@dataclass(frozen=True)
class Overlap:
    """The overlap of two masks in one tensor, or in several together (`+`).

    Attributes:
        numel: elements.
        first, second: active elements of each mask.
        both: elements active in both.
        both_chance, both_chance_variance: mean and variance of `both` by chance.
    """

    numel: int
    first: int
    second: int
    both: int
    both_chance: float
    both_chance_variance: float

    @classmethod
    def of_counts(cls, numel: int, first: int, second: int, both: int) -> Overlap:
        """Return the overlap in one tensor."""
        mean = first * second / numel if numel else 0.0
        # With at most one element, both counts determine the overlap.
        variance = mean * (numel - first) * (numel - second) / (numel * (numel - 1)) if numel > 1 else 0.0
        return cls(numel, first, second, both, mean, variance)

    def __add__(self, other: Overlap) -> Overlap:
        mine, its = asdict(self), asdict(other)
        return Overlap(**{key: mine[key] + its[key] for key in mine})

    @classmethod
    def sum(cls, overlaps: Iterable[Overlap]) -> Overlap:
        """Several tensors together, at least one."""
        return reduce(cls.__add__, overlaps)

    @property
    def jaccard(self) -> float:
        """both / (first + second - both); NaN where neither mask has an active element."""
        return _ratio(self.both, self.first + self.second - self.both)

    @property
    def jaccard_chance(self) -> float:
        """Expectation of `jaccard` by chance, to second order (see the module); NaN as there."""
        total = self.first + self.second
        either = total - self.both_chance
        return _ratio(self.both_chance, either) + _ratio(total * self.both_chance_variance, either**3)

    @property
    def jaccard_chance_sd(self) -> float:
        """Standard deviation of `jaccard` by chance, to first order: S sqrt(v) / (S - m)^2; NaN as there."""
        total = self.first + self.second
        return _ratio(total * math.sqrt(self.both_chance_variance), (total - self.both_chance) ** 2)

    @property
    def of_first(self) -> float:
        """both / first: the share of the first mask's active elements that are in both; NaN if it has none."""
        return _ratio(self.both, self.first)

    @property
    def of_first_chance(self) -> float:
        """Expectation of `of_first` by chance, exact; NaN as there."""
        return _ratio(self.both_chance, self.first)

    @property
    def of_second(self) -> float:
        """both / second, with `of_second_chance`."""
        return _ratio(self.both, self.second)

    @property
    def of_second_chance(self) -> float:
        return _ratio(self.both_chance, self.second)


@dataclass(frozen=True)
class Comparison:
    """Two masks, by their labels, and their overlap in each tensor and each expert, by (layer, number)."""

    first: str
    second: str
    tensors: Mapping[str, Overlap]
    experts: Mapping[tuple[int | None, int], Overlap]

    @property
    def total(self) -> Overlap:
        """Overlap over all tensors."""
        return Overlap.sum(self.tensors.values())

    @property
    def layers(self) -> dict[int | None, Overlap]:
        """Overlap in each layer, ascending; None, last, is outside of all layers."""
        return {layer: Overlap.sum(of) for layer, of in group_by_layer(self.tensors).items()}

    @property
    def parts(self) -> dict[Part, Overlap]:
        """Overlap in each part of the model that has tensors here, in the order of `parameters.PARTS`."""
        return {part: Overlap.sum(of) for part, of in group_by_part(self.tensors).items()}


def compare_masks(masks: Mapping[str, MaskSet], *, common: bool = False) -> list[Comparison]:
    """Compare every pair of masks, in their order.

    Args:
        masks: label -> mask, at least two. All must list the same parameters with the same shapes.
        common: if the masks list different parameters, compare over the parameters that all of them list.

    Raises:
        MaskError: there are fewer than two masks, one does not list a parameter or has it in another shape, or they
            have no parameter in common; names the masks and the parameter.

    Warns:
        UserWarning: the metadata of a mask name another model than those of the first; once for each name.
    """
    if len(masks) < 2:
        raise MaskError(f"found {len(masks)} masks to compare, expected two or more")
    names = _compared_names(masks, common)
    sizes = {name: math.prod(shape) for name, shape in next(iter(masks.values())).shapes.items()}
    comparisons = []
    for (a, first), (b, second) in progress_bar(
        [*itertools.combinations(masks.items(), 2)], what="compare", unit="pair"
    ):
        tensors, experts = {}, {}
        for name in names:
            shape = first.shapes[name]
            if own := experts_of(name, shape):
                sets = first[name], second[name], intersection(first[name], second[name])
                counts = zip(*(count_by_expert(of, name, shape).values() for of in sets), strict=True)
                size = sizes[name] // len(own)
                experts[name] = {e: Overlap.of_counts(size, *of) for e, of in zip(own, counts, strict=True)}
            both = intersection_size(first[name], second[name])
            tensors[name] = Overlap.of_counts(sizes[name], first[name].numel(), second[name].numel(), both)
        by_expert = {expert: Overlap.sum(of) for expert, of in group_by_expert(experts).items()}
        comparisons.append(Comparison(a, b, tensors, by_expert))
    return comparisons


def _compared_names(masks: Mapping[str, MaskSet], common: bool) -> list[str]:
    (label, first), *others = masks.items()
    warned: set[str | None] = set()
    for other_label, other in others:
        for name in dict.fromkeys([*first.names, *other.names]):
            if name not in first or name not in other:
                if common:
                    continue
                has, has_not = (label, other_label) if name in first else (other_label, label)
                raise MaskError(
                    f"{name} is in {has} and not in {has_not}: expected masks of one model "
                    "('common' compares over the parameters that all masks list)"
                )
            if first.shapes[name] != other.shapes[name]:
                raise MaskError(
                    f"{name} is {list(first.shapes[name])} in {label} and {list(other.shapes[name])} in {other_label}: "
                    "expected masks of one model"
                )
        models = [mask.metadata.get("model") for mask in (first, other)]
        if None not in models and models[0] != models[1] and models[1] not in warned:
            warned.add(models[1])
            warnings.warn(f"{label} was made for the model {models[0]}, {other_label} for {models[1]}", stacklevel=3)
    names = [name for name in first.names if all(name in other for _, other in others)]
    if not names:
        raise MaskError(f"{', '.join(masks)} have no parameter in common, expected masks of one model")
    return names


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
