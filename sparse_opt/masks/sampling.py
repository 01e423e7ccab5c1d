"""Samples random positions without replacement, reproducibly on every machine from a seed and a tensor's name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from .checks import index_dtype
from .patterns import expand_units, unit_grid

# Bounds the scratch of one round of draws to 128 MiB.
_DRAWS_PER_ROUND = 2**24


def random_indices(name: str, shape: Sequence[int], density: float, pattern: str, seed: int) -> Tensor:
    """Return the sorted positions of floor(density * units + 0.5) units of a pattern, drawn uniformly.

    Their dtype is `checks.index_dtype`'s, from the start, because a mask may have a billion positions.
    """
    units = math.prod(unit_grid(shape, pattern))
    # The raw stream of a numpy bit generator never changes between versions; those of its distributions may.
    source = np.random.PCG64(xxhash.xxh3_128_intdigest(f"{seed}:{name}".encode()))
    drawn = _sample(units, math.floor(density * units + 0.5), source)
    return expand_units(drawn.to(index_dtype(math.prod(shape))), shape, pattern)


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
