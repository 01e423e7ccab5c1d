"""Set operations on positions, given as sorted unique integer tensors: intersection, union, complement."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2**24


def intersection_size(first: Tensor, second: Tensor) -> int:
    """Count the positions in both. All functions take [nnz] sorted unique CPU tensors of one integer dtype."""
    merged = _merged(first, second)
    return int(np.count_nonzero(merged[1:] == merged[:-1]))


def intersection(first: Tensor, second: Tensor) -> Tensor:
    """Return the positions in both, sorted."""
    merged = _merged(first, second)
    return _as_tensor(merged[1:][merged[1:] == merged[:-1]])


def union(first: Tensor, second: Tensor) -> Tensor:
    """Return the positions in either, sorted."""
    merged = _merged(first, second)
    new = np.ones(merged.size, dtype=bool)
    np.not_equal(merged[1:], merged[:-1], out=new[1:])
    return _as_tensor(merged[new])


def complement(positions: Tensor, numel: int) -> Tensor:
    """Return the positions from 0 to numel - 1 that are not in `positions`, sorted, in the same dtype."""
    given = positions.numpy()
    left = np.empty(numel - given.size, dtype=given.dtype)
    free = np.empty(min(numel, _CHUNK), dtype=bool)
    begin = 0
    for start in range(0, numel, _CHUNK):
        end = min(start + _CHUNK, numel)
        free[:] = True
        cuts = np.searchsorted(given, np.array((start, end), dtype=given.dtype))
        free[given[slice(*cuts)] - start] = False
        found = np.flatnonzero(free[: end - start])
        left[begin : begin + found.size] = found + start
        begin += found.size
    return _as_tensor(left)


def _as_tensor(array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(array)
    # numpy's empty arrays have a stride of 0, for which torch refuses a view of the bytes.
    return tensor if array.size else tensor.new_empty(0)


def _merged(first: Tensor, second: Tensor) -> np.ndarray:
    """Return both in one ascending array, with common positions twice in a row.

    numpy's stable sort detects the two ascending runs and merges them: two masks of 5 % of 10^8 elements took 46 ms on
    an AMD EPYC, and torch.searchsorted of one in the other 119 ms.
    """
    merged = np.concatenate((first.numpy(), second.numpy()))
    merged.sort(kind="stable")
    return merged
