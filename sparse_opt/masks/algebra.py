"""Set algebra of masks: union, intersection, inversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

from torch import Tensor

from ..errors import MaskError
from . import positions as position_sets
from .mask_set import MaskSet
from .patterns import PATTERNS


def union(masks: Sequence[MaskSet]) -> MaskSet:
    """Return the mask of the elements that are active in any of the masks.

    It lists every parameter that any of them lists. Its pattern is the least specific of theirs, which holds for every
    union, intersection and inversion of their units. Its metadata have the operation, the methods and digests of the
    masks, and the model if all have the same one.

    Raises:
        MaskError: fewer than two masks, or a parameter has different shapes in two of them; names it.
    """
    _require_shapes(masks)
    names = list(dict.fromkeys(name for mask in masks for name in mask.names))
    return _combined("union", masks, names, position_sets.union)


def intersect(masks: Sequence[MaskSet]) -> MaskSet:
    """Return the mask of the elements that are active in all of the masks.

    It lists the parameters that all of them list; pattern and metadata are as in `union`.

    Raises:
        MaskError: fewer than two masks, no parameter listed by all, or a parameter has different shapes in two of them;
            names it.
    """
    _require_shapes(masks)
    names = [name for name in masks[0].names if all(name in mask for mask in masks)]
    if not names:
        raise MaskError(f"the {len(masks)} masks have no parameter in common, expected masks of one model")
    return _combined("intersect", masks, names, position_sets.intersection)


def invert(mask: MaskSet) -> MaskSet:
    """Return the mask of the listed parameters' elements that are not active in `mask`.

    Takes 4 bytes for each of them; pattern and metadata are as in `union`.
    """
    indices = {n: position_sets.complement(mask[n], math.prod(shape)) for n, shape in mask.shapes.items()}
    return MaskSet._of_checked(indices, mask.shapes, mask.pattern, _metadata("invert", [mask]))


def _combined(
    operation: str, masks: Sequence[MaskSet], names: Sequence[str], combine: Callable[[Tensor, Tensor], Tensor]
) -> MaskSet:
    indices, shapes = {}, {}
    for name in names:
        having = [mask for mask in masks if name in mask]
        indices[name] = reduce(combine, (mask[name] for mask in having))
        shapes[name] = having[0].shapes[name]
    pattern = min((mask.pattern for mask in masks), key=list(PATTERNS).index)
    return MaskSet._of_checked(indices, shapes, pattern, _metadata(operation, masks))


def _metadata(operation: str, masks: Sequence[MaskSet]) -> dict[str, str]:
    metadata = {
        "method": operation,
        "source_methods": ", ".join(mask.metadata.get("method", "unknown") for mask in masks),
        "source_digests": ", ".join(mask.digest for mask in masks),
    }
    models = {mask.metadata.get("model") for mask in masks}
    model = models.pop()
    if not models and model is not None:
        metadata["model"] = model
    return metadata


def _require_shapes(masks: Sequence[MaskSet]) -> None:
    if len(masks) < 2:
        raise MaskError(f"found {len(masks)} masks, expected two or more")
    shapes: dict[str, tuple[int, ...]] = {}
    for mask in masks:
        for name, shape in mask.shapes.items():
            if shapes.setdefault(name, shape) != shape:
                raise MaskError(f"{name} is {list(shapes[name])} in one mask, {list(shape)} in another")
