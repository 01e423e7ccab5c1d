"""What a mask selects: the units of a pattern, which are single elements or whole runs or tiles, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks.patterns import PATTERNS, matrix_shape, unit_grid

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
        Units numbered row by row over `unit_grid`, on the device of `bits`.
    """
    if pattern == "element":
        return UnitScores(bits)
    height, width = PATTERNS[pattern]
    rows, columns = matrix_shape(shape)
    down, across = unit_grid(shape, pattern)
    scores = bits.view(torch.float32).view(rows, columns)
    sums = torch.empty(down, across, dtype=torch.float32, device=bits.device)
    band = height * max(1, _BLOCK // (height * min(_BLOCK_COLUMNS, max(1, columns))))
    for top in range(0, rows, band):
        for left in range(0, columns, _BLOCK_COLUMNS):
            block = _block_sums(scores[top : top + band, left : left + _BLOCK_COLUMNS], height, width)
            i, j = top // height, left // width
            sums[i : i + block.shape[0], j : j + block.shape[1]] = block
    return UnitScores(sums.view(-1).view(torch.int32), unit_sizes(shape, pattern, bits.device))


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


def unit_sizes(shape: Sequence[int], pattern: str, device: torch.device) -> Tensor:
    """Return the number of elements of each unit, [units] int32, row by row over `unit_grid`; smaller at the edges."""
    height, width = PATTERNS[pattern]
    rows, columns = matrix_shape(shape)
    down, across = unit_grid(shape, pattern)
    heights = (rows - height * torch.arange(down, device=device)).clamp(max=height)
    widths = (columns - width * torch.arange(across, device=device)).clamp(max=width)
    return (heights[:, None] * widths).to(torch.int32).view(-1)
