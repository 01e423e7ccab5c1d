"""Mask patterns: single elements, aligned runs within a row, or aligned square tiles.

A tensor is treated as a matrix: the last dimension is its columns, all others together its rows; a vector is one row, a
scalar one element. A unit of a pattern is `height` rows by `width` columns, aligned to multiples of both, and cut off
at the right and bottom edge of the matrix. Each pattern's units consist of units of the pattern before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_BAND_ELEMENTS = 2**24

# pattern -> (height, width) of a unit, from the least to the most specific.
PATTERNS: dict[str, tuple[int, int]] = {
    "element": (1, 1),
    "run16": (1, 16),
    "run32": (1, 32),
    "tile64": (64, 64),
    "tile128": (128, 128),
}


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor's shape as a matrix."""
    columns = shape[-1] if len(shape) else 1
    return math.prod(shape[:-1]), columns


def unit_grid(shape: Sequence[int], pattern: str) -> tuple[int, int]:
    """Return the number of units of a pattern, (top to bottom, left to right)."""
    height, width = PATTERNS[pattern]
    rows, columns = matrix_shape(shape)
    return -(-rows // height), -(-columns // width)


def unit_sizes(units: Tensor, shape: Sequence[int], pattern: str) -> Tensor:
    """Return the number of elements of some units, numbered row by row over `unit_grid`."""
    height, width = PATTERNS[pattern]
    rows, columns = matrix_shape(shape)
    _, across = unit_grid(shape, pattern)
    heights = (rows - units // across * height).clamp(max=height)
    return heights * (columns - units % across * width).clamp(max=width)


def broken_unit(indices: Tensor, shape: Sequence[int], pattern: str) -> int | None:
    """Return the number of a unit, counted row by row, that `indices` contains in part only; None if there is none.

    Args:
        indices: [nnz] sorted unique positions in the flattened tensor, all in range.
    """
    height, width = PATTERNS[pattern]
    if pattern == "element" or indices.numel() == 0:
        return None
    rows, columns = matrix_shape(shape)
    runs = _aligned_runs(indices, width) if columns % width == 0 else None
    if runs is not None and height == 1:
        return None
    # Processed in bands of whole rows of units, which bounds the scratch memory.
    positions, across = (indices, columns) if runs is None else (runs, columns // width)
    band = height * max(1, _BAND_ELEMENTS // (height * across))
    inner = torch.tensor(range(band * across, rows * across, band * across), dtype=positions.dtype, device="cpu")
    cuts = [0, *torch.searchsorted(positions, inner).tolist(), positions.numel()]
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        if begin == end:
            continue
        broken = _broken_in_band(positions[begin:end], i * band, rows, across, height, width if runs is None else 1)
        if broken is not None:
            return broken
    return None


def _aligned_runs(indices: Tensor, width: int) -> Tensor | None:
    """Return the runs that sorted unique `indices` consist of, or None. Fast path for rows of whole runs."""
    if indices.numel() % width:
        return None
    first, last = indices[::width], indices[width - 1 :: width]
    runs = first // width
    return runs if bool(((last - first == width - 1) & (runs * width == first)).all()) else None


def _broken_in_band(positions: Tensor, first_row: int, rows: int, columns: int, height: int, width: int) -> int | None:
    across = -(-columns // width)
    first_unit = first_row // height * across
    row = positions // columns
    counts = torch.bincount((row // height) * across + (positions - row * columns) // width - first_unit)
    units = counts.nonzero().view(-1)
    unit_row, unit_column = (units + first_unit) // across, units % across
    heights = (rows - unit_row * height).clamp(max=height)
    widths = (columns - unit_column * width).clamp(max=width)
    broken = (counts[units] != heights * widths).nonzero()
    return first_unit + int(units[broken[0]]) if broken.numel() else None


def most_specific_pattern(masks: Iterable[tuple[Tensor, Sequence[int]]]) -> str:
    """Return the last of `PATTERNS` that fits (indices, shape) of every tensor."""
    found = len(PATTERNS) - 1
    names = list(PATTERNS)
    for indices, shape in masks:
        # Units consist of units of the pattern before, so that the first pattern that does not fit ends the search.
        for i in range(1, found + 1):
            if broken_unit(indices, shape, names[i]) is not None:
                found = i - 1
                break
    return names[found]


def expand_units(units: Tensor, shape: Sequence[int], pattern: str) -> Tensor:
    """Return the sorted positions of all elements of some units, in the dtype of `units`.

    Args:
        units: [k] int32 or int64, sorted and unique, numbered row by row over `unit_grid`. With int32, all positions
            must be below 2**31.
    """
    height, width = PATTERNS[pattern]
    if pattern == "element":
        return units
    rows, columns = matrix_shape(shape)
    _, units_across = unit_grid(shape, pattern)
    unit_row, first_column = units // units_across, units % units_across * width
    column = first_column[:, None] + torch.arange(width, dtype=units.dtype, device=units.device)
    if height == 1:
        return (unit_row[:, None] * columns + column)[column < columns]
    unit_rows, counts = torch.unique_consecutive(unit_row, return_counts=True)
    parts = []
    for r, in_row in zip(unit_rows.tolist(), column.split(counts.tolist()), strict=True):
        row = torch.arange(r * height, min((r + 1) * height, rows), dtype=units.dtype, device=units.device)
        parts.append((row[:, None] * columns + in_row[in_row < columns]).view(-1))
    return torch.cat(parts) if parts else units
