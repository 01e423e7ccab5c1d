"""Exact top-k over tensors that are read one at a time, by counting bit patterns instead of sorting.

A score is a float32 >= 0, whose bits, read as an int32, have the order of the numbers. Two rounds of counting over the
tensors, by the upper and then by the lower 16 bits, find the k-th largest score exactly. The order is total: higher
score first, then the earlier tensor, then the lower position. Scores of zero are never selected.

What is selected are the units of a pattern: single elements, or whole runs or tiles with the sum of their scores. They
are counted by their elements. Counts are integers, and sums have a fixed order, so that a CPU and a GPU select the same
units.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks.patterns import PATTERNS, stack_shape, unit_grid, unit_sizes

_LOW_BITS = 16
# Elements processed at a time, which bounds the scratch memory to some 50 MB.
_CHUNK = 2**22
# Elements summed at a time, which bounds the scratch memory to some 100 MB; a multiple of every unit's sides.
_BLOCK = 2**22
_BLOCK_COLUMNS = 2**15


@dataclass(frozen=True)
class UnitScores:
    """The scores of one tensor's units, in the order of their positions.

    bits: [units] int32 of float32 scores >= 0, on any device.
    sizes: [units] int32, elements of each unit, on the same device; None if every unit is one element.
    """

    bits: Tensor
    sizes: Tensor | None = None

    @property
    def scoring(self) -> int:
        """Number of elements of the units with a score above zero."""
        return elements(self, self.bits > 0)


def elements(scores: UnitScores, where: Tensor) -> int:
    """Return the number of elements of the units selected by a [units] bool tensor."""
    return int(where.count_nonzero() if scores.sizes is None else scores.sizes[where].sum())


def positions(where: Tensor) -> Tensor:
    """Ascending int64 positions of the true elements of a flat bool tensor, on its device."""
    if where.device.type == "cpu":
        # About ten times as fast as torch on two cores.
        return torch.from_numpy(np.flatnonzero(where.numpy()))
    return where.nonzero().view(-1)


def unit_scores(bits: Tensor, shape: Sequence[int], pattern: str) -> UnitScores:
    """Return the summed score of each unit of a pattern, rounded to float32 once, and each unit's size.

    Sums are float64, by pairwise elementwise additions of neighbours: their order is fixed, so that they have the same
    bits on every device and with any number of threads.

    Args:
        bits: [numel] int32 of float32 scores >= 0.
        shape: shape of the tensor.
        pattern: see `masks.patterns`.

    Returns:
        Units numbered as in `masks.patterns`, on the device of `bits`.
    """
    if pattern == "element":
        return UnitScores(bits)
    height, width = PATTERNS[pattern]
    matrices, rows, columns = stack_shape(shape)
    if rows % height == 0:  # the units are those of one matrix
        matrices, rows = 1, matrices * rows
    down, across = unit_grid(shape, pattern)
    scores = bits.view(torch.float32).view(matrices, rows, columns)
    sums = torch.empty(down, across, dtype=torch.float32, device=bits.device)
    band = height * max(1, _BLOCK // (height * min(_BLOCK_COLUMNS, max(1, columns))))
    for matrix, matrix_sums in zip(scores, sums.view(matrices, -(-rows // height), across), strict=True):
        for top in range(0, rows, band):
            for left in range(0, columns, _BLOCK_COLUMNS):
                block = _block_sums(matrix[top : top + band, left : left + _BLOCK_COLUMNS], height, width)
                i, j = top // height, left // width
                matrix_sums[i : i + block.shape[0], j : j + block.shape[1]] = block
    sizes = unit_sizes(torch.arange(down * across, device=bits.device), shape, pattern)
    return UnitScores(sums.view(-1).view(torch.int32), sizes.to(torch.int32))


def _block_sums(scores: Tensor, height: int, width: int) -> Tensor:
    """[R, C] float32 -> [units down, units across] float64."""
    rows, columns = scores.shape
    padded = F.pad(scores.double(), (0, -columns % width, 0, -rows % height))
    down, across = padded.shape[0] // height, padded.shape[1] // width
    runs = _halved(padded.view(down * height, across, width))
    return _halved(runs.view(down, height, across).transpose(1, 2))


def _halved(values: Tensor) -> Tensor:
    """Return sums over the last dimension, whose size is a power of two."""
    while values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


class Histogram:
    """The number of elements with each of 65536 values, stored sparsely: tensors of one model have few values."""

    def __init__(self, counts: np.ndarray) -> None:
        self._values = np.flatnonzero(counts)
        # Entry i is the number of elements >= values[i]; the last entry is 0.
        self._at_least = np.append(np.cumsum(counts[self._values][::-1])[::-1], 0)

    @property
    def total(self) -> int:
        return int(self._at_least[0])

    def at_least(self, value: int) -> int:
        """Return the number of elements >= value."""
        return int(self._at_least[np.searchsorted(self._values, value)])


def upper_histogram(scores: UnitScores) -> Histogram:
    """Count the upper 16 bits of all scores above zero."""
    return _histogram(scores, 1, 2**31 - 1, _LOW_BITS)


def lower_histogram(scores: UnitScores, upper: int) -> Histogram:
    """Count the lower 16 bits of the scores above zero whose upper 16 bits are `upper`."""
    first = upper << _LOW_BITS
    return _histogram(scores, max(1, first), first + 2**_LOW_BITS - 1, 0)


def _histogram(scores: UnitScores, first: int, last: int, shift: int) -> Histogram:
    """Count the 16 bits above the lowest `shift`, of the scores whose bits are in [first, last]."""
    counts = np.zeros(2**_LOW_BITS, dtype=np.int64)
    parts = scores.bits.split(_CHUNK)
    sizes = itertools.repeat(None) if scores.sizes is None else scores.sizes.split(_CHUNK)
    for part, of_units in zip(parts, sizes, strict=False):
        counts += _counts(part, of_units, first, last, shift)
    return Histogram(counts)


def _counts(bits: Tensor, sizes: Tensor | None, first: int, last: int, shift: int) -> np.ndarray:
    # Zeros, most of the scores, are left out first: counting many equal values is slow, because each increment depends
    # on the one before. Weighted counts are float64, which is exact for these integers.
    if bits.device.type == "cpu":
        # Three to nine times as fast as torch on two cores.
        array = bits.numpy()
        inside = (array >= first) & (array <= last)
        values = (array[inside] >> shift) & (2**_LOW_BITS - 1)
        return np.bincount(values, None if sizes is None else sizes.numpy()[inside], 2**_LOW_BITS).astype(np.int64)
    chosen = (bits >= first) & (bits <= last)
    weights = None if sizes is None else sizes[chosen].double()
    counted = torch.bincount((bits[chosen] >> shift) & (2**_LOW_BITS - 1), weights, 2**_LOW_BITS)
    return counted.cpu().numpy().astype(np.int64)


def kth_value(histograms: Mapping[str, Histogram], above: Mapping[str, int], floors: Mapping[str, int], k: int) -> int:
    """Return the largest value v at which all tensors together keep at least k elements.

    At v, a tensor keeps `above` plus the elements of its histogram that are >= v, or its floor if that is more.

    Args:
        k: more than the sum of the floors, and at most the number of elements kept at v = 0.
    """
    low, high = 0, 2**_LOW_BITS
    while high - low > 1:
        middle = (low + high) // 2
        kept = sum(max(floors[name], above[name] + h.at_least(middle)) for name, h in histograms.items())
        low, high = (middle, high) if kept >= k else (low, middle)
    return low


class GlobalSelection:
    """Selects the best units of all tensors together, after each tensor's own floor.

    Every tensor keeps its best units until they have `floors[name]` elements or more. Then the best of all other units
    are selected, in the total order, until the next one would exceed the quota. Call `count` for every tensor, then
    `refine` for every tensor, then `select` for every tensor in the tensors' order.
    """

    def __init__(self, floors: Mapping[str, int], quota: int) -> None:
        self.requested, self._requested_floors = quota, dict(floors)
        self._quota = quota
        self._floors: dict[str, int] = {}
        self._uppers: dict[str, Histogram] = {}
        self._lowers: dict[str, Histogram] = {}
        self._over: dict[str, int] = {}
        self._ties: dict[str, int] = {}
        self._upper: int | None = None
        self._capacity: int | None = None  # elements that may still be taken at the threshold
        # Bits of the least score that counts towards the quota; None if the floors meet it.
        self.threshold: int | None = None

    def count(self, name: str, scores: UnitScores) -> None:
        """First round: count the upper 16 bits."""
        self._floors[name] = reaching(scores, self._requested_floors[name])
        self._uppers[name] = upper_histogram(scores)

    @property
    def floor_total(self) -> int:
        """Elements that the floors alone keep, known after the first round."""
        return sum(self._floors.values())

    @property
    def reachable(self) -> int:
        """Elements of all units with a score above zero, but at most the quota; known after the first round."""
        return min(self.requested, sum(histogram.total for histogram in self._uppers.values()))

    def refine(self, name: str, scores: UnitScores) -> None:
        """Second round: count the lower 16 bits at the threshold's upper bits."""
        if self._upper is None:
            # Never more than the elements with a score above zero. If the floors meet the quota, no search is needed.
            self._quota = self.reachable
            none = dict.fromkeys(self._uppers, 0)
            beyond = self._quota > self.floor_total
            self._upper = kth_value(self._uppers, none, self._floors, self._quota) if beyond else 2**_LOW_BITS
            self._over = {n: h.at_least(self._upper + 1) for n, h in self._uppers.items()}
        self._lowers[name] = (
            lower_histogram(scores, self._upper) if self._upper < 2**_LOW_BITS else Histogram(np.zeros(1, np.int64))
        )

    def select(self, name: str, scores: UnitScores) -> Tensor:
        """Third round: return the sorted int64 positions, on the CPU, of the units that are kept."""
        if self._capacity is None:
            self._set_threshold()
        assert self._capacity is not None
        threshold = 1 if self.threshold is None else self.threshold
        kept = max(self._floors[name], self._over[name])
        ties = max(0, self._over[name] + self._ties[name] - kept)
        if ties <= self._capacity:
            more = ties
        else:
            more = fitting(scores, kept + self._capacity, threshold) - kept if self._capacity else 0
        # The first unit that does not fit ends the selection; no lower-ranked unit takes its place.
        self._capacity = self._capacity - more if more == ties else 0
        return best(scores, kept + more, threshold)

    def _set_threshold(self) -> None:
        upper = self._upper
        assert upper is not None
        if upper == 2**_LOW_BITS:
            self._ties, self._capacity = dict.fromkeys(self._lowers, 0), 0
            return
        lower = kth_value(self._lowers, self._over, self._floors, self._quota)
        self.threshold = (upper << _LOW_BITS) + lower
        self._ties = {n: h.at_least(lower) - h.at_least(lower + 1) for n, h in self._lowers.items()}
        self._over = {n: self._over[n] + h.at_least(lower + 1) for n, h in self._lowers.items()}
        self._capacity = self._quota - sum(max(self._floors[n], over) for n, over in self._over.items())


class TensorSelection:
    """Selects the best units of each tensor separately: as many as fit its share, or cover a larger floor."""

    threshold: int | None = None  # no common one

    def __init__(self, floors: Mapping[str, int], shares: Mapping[str, int]) -> None:
        self._floors, self._shares = floors, shares
        self.requested = 0
        self.reachable = 0

    def select(self, name: str, scores: UnitScores) -> Tensor:
        """Return the sorted int64 positions, on the CPU, of the units that are kept."""
        requested = max(self._floors[name], self._shares[name])
        self.requested += requested
        self.reachable += min(requested, scores.scoring)
        kept = max(reaching(scores, self._floors[name]), fitting(scores, self._shares[name]))
        return best(scores, kept)


def reaching(scores: UnitScores, least: int) -> int:
    """Return the number of elements of the fewest best units that together have at least `least` elements.

    Units are ranked by score, equal scores by position. If all units with a score above zero have fewer elements, it is
    the number of theirs.
    """
    scoring = scores.scoring
    if scores.sizes is None or least == 0 or scoring <= least:
        return min(least, scoring)
    _, ends = _ranked(scores, _cut(scores, least))
    return int(ends[torch.searchsorted(ends, least)])


def fitting(scores: UnitScores, most: int, threshold: int = 1) -> int:
    """Return how many elements the best units with score bits >= threshold have, at most `most`."""
    available = elements(scores, scores.bits >= threshold)
    if scores.sizes is None or available <= most:
        return min(most, available)
    _, ends = _ranked(scores, max(threshold, _cut(scores, most + 1)))
    units = int(torch.searchsorted(ends, most, right=True))
    return int(ends[units - 1]) if units else 0


def best(scores: UnitScores, kept: int, threshold: int = 1) -> Tensor:
    """Return the sorted int64 positions, on the CPU, of the best units, which together have `kept` elements.

    Args:
        kept: a result of `reaching` or `fitting`.
        threshold: the bits of the least score among them, if known; another value only costs time.
    """
    if kept == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if scores.sizes is None:
        return _top(scores.bits, kept, threshold).cpu()
    known = threshold > 1 and elements(scores, scores.bits >= threshold) >= kept
    order, ends = _ranked(scores, threshold if known else _cut(scores, kept))
    return order[: int(torch.searchsorted(ends, kept)) + 1].sort().values.cpu()


def _ranked(scores: UnitScores, threshold: int) -> tuple[Tensor, Tensor]:
    """Return positions of the units with score bits >= threshold, best first, and cumulative sums of their sizes."""
    assert scores.sizes is not None
    at = positions(scores.bits >= threshold)
    order = at[scores.bits[at].sort(descending=True, stable=True).indices]
    return order, scores.sizes[order].cumsum(0)


def _top(bits: Tensor, k: int, threshold: int) -> Tensor:
    """Return the sorted positions of the k largest scores of single elements; at least k >= 1 are above zero."""
    for lower_bound in (threshold, None):
        at = _cut(UnitScores(bits), k) if lower_bound is None else lower_bound
        over = positions(bits > at)
        missing = k - over.numel()
        ties = positions(bits == at)[: max(missing, 0)]
        if ties.numel() == missing:
            return torch.cat([over, ties]).sort().values if missing else over
    raise ValueError(f"k is {k}, expected at most {int(bits.count_nonzero())}, the number of scores above zero")


def _cut(scores: UnitScores, k: int) -> int:
    """Return the largest bits such that the units with score bits >= these have at least k elements."""
    name, none = "", {"": 0}
    uppers = {name: upper_histogram(scores)}
    upper = kth_value(uppers, none, none, k)
    over = {name: uppers[name].at_least(upper + 1)}
    return (upper << _LOW_BITS) + kth_value({name: lower_histogram(scores, upper)}, over, none, k)
