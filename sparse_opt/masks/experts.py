"""Mixtures of experts: the experts of a model's parameters, and the positions of their weights.

transformers keeps the experts of a layer in one parameter for each projection, [experts, ...] (`mlp.experts.down_proj`,
and the biases of GPT-OSS); checkpoints, and older models, have a parameter for each expert
(`mlp.experts.7.down_proj.weight`). Shared experts, which see every token, are no experts here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import MaskError, listed
from .parameters import EXPERTS, in_layer_order, layer_of
from .patterns import most_specific_pattern
from .positions import index_dtype

_EXPERTS = re.compile(rf"{EXPERTS.pattern}(?:(\d+)\.)?")
_Value = TypeVar("_Value")


def experts_of(name: str, shape: Sequence[int]) -> range:
    """Return the numbers of the experts whose weights a parameter has; empty for other parameters."""
    found = _EXPERTS.search(name)
    if found is None:
        return range(0)
    if found[1] is not None:
        return range(int(found[1]), int(found[1]) + 1)
    return range(shape[0]) if shape else range(0)


def experts_by_layer(shapes: Mapping[str, Sequence[int]]) -> dict[int, range]:
    """Return the numbers of the experts of each layer that has any, ascending.

    Raises:
        MaskError: two modules of experts have the same layer number, as in two towers of one model; names both.
    """
    modules: dict[int, str] = {}
    counts: dict[int, int] = {}
    for name, shape in shapes.items():
        layer, found = layer_of(name), _EXPERTS.search(name)
        if found is None or layer is None:
            continue
        module = name[: found.start()] + ".experts"
        if modules.setdefault(layer, module) != module:
            raise MaskError(f"layer {layer} is ambiguous: {modules[layer]} and {module}; name the experts of one model")
        counts[layer] = max(counts.get(layer, 0), experts_of(name, shape).stop)
    return {layer: range(counts[layer]) for layer in sorted(counts)}


def positions_of_experts(
    shapes: Mapping[str, Sequence[int]], experts: Mapping[int, Iterable[int]]
) -> tuple[dict[str, Tensor], str]:
    """Return the sorted positions of all weights of some experts, by name, and the most specific pattern they have.

    Args:
        shapes: name -> shape of a model's parameters.
        experts: layer -> numbers of its experts.

    Returns:
        All parameters of experts are listed, those without a given expert with no positions.

    Raises:
        MaskError: there is no such layer or expert; names those that there are.
    """
    known = experts_by_layer(shapes)
    if not known:
        raise MaskError("the model has no parameter of experts, such as model.layers.0.mlp.experts.down_proj")
    chosen: dict[int, list[int]] = {}
    for layer, numbers in experts.items():
        if layer not in known:
            raise MaskError(f"layer {layer} has no experts; the layers with experts are {listed([*map(str, known)])}")
        chosen[layer] = sorted(set(numbers))
        wrong = [number for number in chosen[layer] if number not in known[layer]]
        if wrong:
            raise MaskError(f"layer {layer} has no expert {wrong[0]}, expected 0 to {known[layer].stop - 1}")
    positions = {}
    for name, shape in shapes.items():
        own, own_layer = experts_of(name, shape), layer_of(name)
        if not own or own_layer not in known:
            continue
        size = math.prod(shape) // len(own)
        firsts = [(number - own.start) * size for number in chosen.get(own_layer, ()) if number in own]
        first = torch.tensor(firsts, dtype=index_dtype(math.prod(shape)), device="cpu")
        positions[name] = (first[:, None] + torch.arange(size, dtype=first.dtype, device="cpu")).view(-1)
    # Whole parameters, and whole matrices of a stack, are of every pattern; the rest are biases, which are small.
    flat = (
        (found, shapes[name])
        for name, found in positions.items()
        if len(shapes[name]) < 3 and 0 < found.numel() < math.prod(shapes[name])
    )
    return positions, most_specific_pattern(flat)


def count_by_expert(positions: Tensor, name: str, shape: Sequence[int]) -> dict[int, int]:
    """Return the number of positions in each expert of a parameter; empty for parameters of no experts."""
    own = experts_of(name, shape)
    size = max(1, math.prod(shape) // max(1, len(own)))
    ends = torch.arange(1, len(own) + 1, dtype=torch.int64, device="cpu") * size
    counts = torch.searchsorted(positions, ends.to(positions.dtype)).diff(prepend=ends.new_zeros(1))
    return dict(zip(own, counts.tolist(), strict=True))


def group_by_expert(values: Mapping[str, Mapping[int, _Value]]) -> dict[tuple[int | None, int], list[_Value]]:
    """Group the values of each parameter's experts by (layer, number of the expert), ascending."""
    groups: dict[tuple[int | None, int], list[_Value]] = {}
    for name, of in values.items():
        for number, value in of.items():
            groups.setdefault((layer_of(name), number), []).append(value)
    order = {layer: i for i, layer in enumerate(in_layer_order(layer for layer, _ in groups))}
    return {expert: groups[expert] for expert in sorted(groups, key=lambda key: (order[key[0]], key[1]))}
