"""Random positions without replacement, the same on every machine for one seed and name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from .patterns import expand_units, unit_grid

# Bounds the scratch of one round of draws to 128 MiB.
_DRAWS_PER_ROUND = 2**24


def random_indices(name: str, shape: Sequence[int], density: float, pattern: str, seed: int) -> Tensor:
    """Sorted int64 positions of floor(density * units + 0.5) units of a pattern, uniform over all such choices."""
    units = math.prod(unit_grid(shape, pattern))
    # The raw stream of a numpy bit generator never changes between versions; those of its distributions may.
    source = np.random.PCG64(xxhash.xxh3_128_intdigest(f"{seed}:{name}".encode()))
    return expand_units(_sample(units, math.floor(density * units + 0.5), source), shape, pattern)


def _sample(n: int, k: int, source: np.random.PCG64) -> Tensor:
    """[k] of range(n), sorted: positions are drawn with replacement until k different ones are marked."""
    # Drawing what to leave out when that is less keeps the expected number of draws below 1.4 k.
    inverted = 2 * k > n
    wanted = n - k if inverted else k
    marked = np.zeros(n, dtype=np.bool_)
    positions = torch.from_numpy(marked)
    missing = wanted
    while missing:
        # Never more draws than are missing, so that none has to be taken back.
        draws = source.random_raw(min(missing, _DRAWS_PER_ROUND)) % np.uint64(n)
        # torch scatters several times as fast as numpy, which counts as much faster.
        positions.index_fill_(0, torch.from_numpy(draws.astype(np.int64)), True)
        missing = wanted - int(np.count_nonzero(marked))
    return (positions.logical_not_() if inverted else positions).nonzero().view(-1)
