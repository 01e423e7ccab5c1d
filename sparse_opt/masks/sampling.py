"""Samples random positions without replacement, reproducibly on every machine from a seed and a tensor's name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from .patterns import expand_units, unit_grid, unit_sizes
from .positions import index_dtype

# Bounds the scratch of one round of draws to 128 MiB.
_DRAWS_PER_ROUND = 2**24


def random_indices(name: str, shape: Sequence[int], density: float, pattern: str, seed: int) -> Tensor:
    """Return the sorted positions of floor(density * units + 0.5) units of a pattern, drawn uniformly.

    Their dtype is `positions.index_dtype`'s, from the start, because a mask may have a billion positions.
    """
    units = math.prod(unit_grid(shape, pattern))
    drawn = _sample(units, math.floor(density * units + 0.5), _stream(f"{seed}:{name}"))
    return expand_units(drawn.to(index_dtype(math.prod(shape))), shape, pattern)


def random_indices_of_all(
    shapes: Mapping[str, Sequence[int]], density: float, pattern: str, seed: int
) -> dict[str, Tensor]:
    """Return the sorted positions of units drawn uniformly from those of all tensors together, by name.

    Units are drawn in a random order until the next one would exceed floor(density * numel + 0.5) elements.
    """
    names = sorted(shapes)
    cuts = np.cumsum([math.prod(unit_grid(shapes[name], pattern)) for name in names])
    numel = sum(math.prod(shape) for shape in shapes.values())
    quota = math.floor(density * numel + 0.5)
    # With many units, those that are left out are drawn; their number is rounded up, so that the quota holds as well.
    inverted = 2 * quota > numel
    marked = _mark(names, shapes, cuts, pattern, numel - quota if inverted else quota, inverted, _stream(str(seed)))
    found = {}
    for name, units in zip(names, np.split(marked, cuts[:-1]), strict=True):
        drawn = torch.from_numpy(~units if inverted else units).nonzero().view(-1)
        found[name] = expand_units(drawn.to(index_dtype(math.prod(shapes[name]))), shapes[name], pattern)
    return {name: found[name] for name in shapes}


def _mark(
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    cuts: np.ndarray,
    pattern: str,
    count: int,
    exceed: bool,
    source: np.random.PCG64,
) -> np.ndarray:
    """Mark random units of all tensors, a bool each, that have `count` elements, or part of a unit fewer or more."""
    marked = np.zeros(int(cuts[-1]) if len(cuts) else 0, dtype=np.bool_)

    def size(tensor: int, units: np.ndarray) -> int:
        return int(unit_sizes(torch.from_numpy(units), shapes[names[tensor]], pattern).sum())

    largest = max((size(i, np.zeros(1, dtype=np.int64)) for i, n in enumerate(cuts) if n), default=1)
    total = 0
    # As many draws at a time as cannot exceed the count; then one by one.
    while (n_draws := min((count - total) // largest, _DRAWS_PER_ROUND)) > 0:
        marked[source.random_raw(n_draws) % np.uint64(marked.size)] = True
        parts = np.split(marked, cuts[:-1])
        total = sum(size(i, np.flatnonzero(part)) for i, part in enumerate(parts))
    while total < count:
        unit = int(source.random_raw() % marked.size)
        if not marked[unit]:
            tensor = int(np.searchsorted(cuts, unit, side="right"))
            of_unit = size(tensor, np.array([unit - (int(cuts[tensor - 1]) if tensor else 0)]))
            if total + of_unit > count and not exceed:
                break
            marked[unit] = True
            total += of_unit
    return marked


def _stream(key: str) -> np.random.PCG64:
    # The raw stream of a numpy bit generator never changes between versions; those of its distributions may.
    return np.random.PCG64(xxhash.xxh3_128_intdigest(key.encode()))


def _sample(n: int, k: int, source: np.random.PCG64) -> Tensor:
    """Return k of range(n), sorted: positions are drawn with replacement until k different ones are marked."""
    inverted = 2 * k > n
    count = n - k if inverted else k
    marked = np.zeros(n, dtype=np.bool_)
    positions = torch.from_numpy(marked)
    missing = count
    while missing:
        # At most as many draws as are missing, so that no position is marked too many.
        draws = source.random_raw(min(missing, _DRAWS_PER_ROUND)) % np.uint64(n)
        # torch scatters several times faster than numpy; numpy counts several times faster than torch.
        positions.index_fill_(0, torch.from_numpy(draws.astype(np.int64)), True)
        missing = count - int(np.count_nonzero(marked))
    return (positions.logical_not_() if inverted else positions).nonzero().view(-1)
