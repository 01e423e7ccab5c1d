"""Scores of whole runs and tiles: the sum over their elements, the same bits on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask_patterns import PATTERNS, matrix_shape, unit_grid
from .score_selection import UnitScores

# Elements summed at a time, in blocks whose sides are multiples of every unit's: bounds the scratch to some 100 MB.
_BLOCK = 2**22
_BLOCK_COLUMNS = 2**15


def unit_scores(bits: Tensor, shape: Sequence[int], pattern: str) -> UnitScores:
    """The summed score of each unit of a pattern, rounded to float32 once, and each unit's size.

    The sums are float64 and added pairwise, neighbours first, by elementwise additions alone: their order is fixed, and
    neither the device nor the number of threads changes a bit.

    Args:
        bits: [numel] int32 of float32 scores >= 0.
        shape: of the tensor they belong to.
        pattern: see `mask_patterns`.

    Returns:
        Units counted row by row over `unit_grid`, on the device of `bits`.
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
    """Sums over the last dimension, whose size is a power of two."""
    while values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


def unit_sizes(shape: Sequence[int], pattern: str, device: torch.device) -> Tensor:
    """[units] int32, the elements of each unit, row by row over `unit_grid`; those at the edges have fewer."""
    height, width = PATTERNS[pattern]
    rows, columns = matrix_shape(shape)
    down, across = unit_grid(shape, pattern)
    heights = (rows - height * torch.arange(down, device=device)).clamp(max=height)
    widths = (columns - width * torch.arange(across, device=device)).clamp(max=width)
    return (heights[:, None] * widths).to(torch.int32).view(-1)
