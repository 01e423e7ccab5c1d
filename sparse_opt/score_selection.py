"""Exact top-k over tensors that are seen one at a time, by counting bit patterns instead of sorting.

A score is a float32 >= 0, whose bits, read as an int32, order as the numbers do. Two rounds of counting over the
tensors, by the upper and then by the lower 16 bits, find the k-th largest score exactly. The order is total: higher
score first, then the earlier tensor, then the lower position. Scores of zero are never selected.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_LOW_BITS = 16
# Bounds the int64 copy that counting makes.
_CHUNK = 2**24


def score_bits(scores: Tensor) -> Tensor:
    """[numel] int32 of float32 scores >= 0, not NaN."""
    return scores.contiguous().view(-1).view(torch.int32)


class Histogram:
    """How often each of 65536 values occurs, kept sparsely: tensors of one model use few of them."""

    def __init__(self, counts: np.ndarray) -> None:
        self._values = np.flatnonzero(counts)
        # Entry i counts what is >= values[i]; the last one is 0.
        self._from = np.append(np.cumsum(counts[self._values][::-1])[::-1], 0)

    @property
    def total(self) -> int:
        return int(self._from[0])

    def at_least(self, value: int) -> int:
        """How many are >= value."""
        return int(self._from[np.searchsorted(self._values, value)])


def upper_histogram(bits: Tensor) -> Histogram:
    """Upper 16 bits of all scores above zero."""
    counts = np.zeros(2**_LOW_BITS, dtype=np.int64)
    for part in bits.split(_CHUNK):
        counts += torch.bincount(part[part > 0] >> _LOW_BITS, minlength=2**_LOW_BITS).numpy()
    return Histogram(counts)


def lower_histogram(bits: Tensor, upper: int) -> Histogram:
    """Lower 16 bits of the scores above zero whose upper 16 bits are `upper`."""
    counts = np.zeros(2**_LOW_BITS, dtype=np.int64)
    for part in bits.split(_CHUNK):
        same = part[(part >> _LOW_BITS == upper) & (part > 0)]
        counts += torch.bincount(same & (2**_LOW_BITS - 1), minlength=2**_LOW_BITS).numpy()
    return Histogram(counts)


def crossing(histograms: Mapping[str, Histogram], above: Mapping[str, int], floors: Mapping[str, int], k: int) -> int:
    """The largest value v at which the tensors together keep k or more.

    A tensor keeps the larger of its floor and of what lies at v or higher: `above` plus its histogram's part.

    Args:
        k: at most what is kept at v = 0, and more than the sum of the floors.
    """
    low, high = 0, 2**_LOW_BITS
    while high - low > 1:
        middle = (low + high) // 2
        kept = sum(max(floors[name], above[name] + h.at_least(middle)) for name, h in histograms.items())
        low, high = (middle, high) if kept >= k else (low, middle)
    return low


def top(bits: Tensor, k: int) -> Tensor:
    """[k] sorted int64 positions of the k largest scores of one tensor; at most as many as are above zero."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    name, none = "", {"": 0}
    uppers = {name: upper_histogram(bits)}
    upper = crossing(uppers, none, none, k)
    over = {name: uppers[name].at_least(upper + 1)}
    lowers = {name: lower_histogram(bits, upper)}
    threshold = (upper << _LOW_BITS) + crossing(lowers, over, none, k)
    chosen = bits > threshold
    ties = (bits == threshold).nonzero().view(-1)
    chosen[ties[: k - int(chosen.count_nonzero())]] = True
    return chosen.nonzero().view(-1)
