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
# Elements worked on at a time, which bounds the scratch to some 50 MB.
_CHUNK = 2**22


def change_bits(before: Tensor, after: Tensor) -> Tensor:
    """[numel] int32, the bits of abs(after - before) in float32, of two contiguous floating-point tensors.

    float64 is subtracted as such, since its change may be lost in float32; all other dtypes are exact in float32. A
    NaN score has bits above those of infinity, 0x7F800000.
    """
    wide = torch.float64 if after.dtype == torch.float64 else torch.float32
    bits = torch.empty(after.numel(), dtype=torch.int32)
    for out, old, new in zip(*(t.view(-1).split(_CHUNK) for t in (bits, before, after)), strict=True):
        out.view(torch.float32).copy_((new.to(wide) - old.to(wide)).abs_())
    return bits


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
    """Upper 16 bits of all scores above zero. `bits`: [numel] int32 of float32 scores >= 0."""
    counts = np.zeros(2**_LOW_BITS, dtype=np.int64)
    for part in bits.split(_CHUNK):
        # Most scores are zero in most runs, and counting many of one value is slow: each waits for the one before.
        array = part.numpy()
        upper = np.bincount(array[array > 0] >> _LOW_BITS)
        counts[: len(upper)] += upper
    return Histogram(counts)


def lower_histogram(bits: Tensor, upper: int) -> Histogram:
    """Lower 16 bits of the scores above zero whose upper 16 bits are `upper`."""
    counts = np.zeros(2**_LOW_BITS, dtype=np.int64)
    first, last = max(1, upper << _LOW_BITS), (upper << _LOW_BITS) + 2**_LOW_BITS - 1
    for part in bits.split(_CHUNK):
        array = part.numpy()
        lower = np.bincount(array[(array >= first) & (array <= last)] & (2**_LOW_BITS - 1))
        counts[: len(lower)] += lower
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


def top(bits: Tensor, k: int, threshold: int | None = None) -> Tensor:
    """[k] sorted int64 positions of the k largest scores of one tensor.

    Args:
        bits: [numel] int32 of float32 scores >= 0.
        k: at most as many as are above zero.
        threshold: the bits of the k-th largest score where they are known; a wrong guess costs time only.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    for at in (threshold, None):
        guess = _kth_largest(bits, k) if at is None else at
        over = (bits > guess).nonzero().view(-1)
        room = k - over.numel()
        ties = (bits == guess).nonzero().view(-1)[: max(room, 0)]
        if guess > 0 and ties.numel() == room:
            return torch.cat([over, ties]).sort().values if room else over
    raise ValueError(f"{k} of {int(bits.count_nonzero())} scores above zero were asked for")


def _kth_largest(bits: Tensor, k: int) -> int:
    name, none = "", {"": 0}
    uppers = {name: upper_histogram(bits)}
    upper = crossing(uppers, none, none, k)
    over = {name: uppers[name].at_least(upper + 1)}
    return (upper << _LOW_BITS) + crossing({name: lower_histogram(bits, upper)}, over, none, k)
