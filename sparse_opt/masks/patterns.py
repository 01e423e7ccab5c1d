"""Mask patterns: single elements, aligned runs within a row, or aligned square tiles.

A tensor of three or more dimensions is a stack of matrices, its last two dimensions: fused experts, [experts, rows,
columns], are one matrix for each expert. A vector is a matrix of one row, a scalar one of one element. A unit of a
pattern is `height` rows by `width` columns of one matrix, aligned to multiples of both, and cut off at the right and
bottom edge of its matrix. Each pattern's units consist of units of the pattern before it.

Positions are those in the flattened tensor: element (e, r, c) of [E, R, C] is (e * R + r) * C + c. Units are numbered
matrix by matrix, and row by row within each: with D = ceil(R / height) and A = ceil(C / width), the unit of that
element is (e * D + r // height) * A + c // width. If `height` divides R, these are the units of the matrix [E * R, C].
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


def stack_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (matrices, rows of each, columns) of a tensor's shape as a stack of matrices."""
    rows, columns = matrix_shape(shape)
    matrices = math.prod(shape[:-2])
    return matrices, rows // max(1, matrices), columns


def unit_grid(shape: Sequence[int], pattern: str) -> tuple[int, int]:
    """Return the number of units of a pattern, (top to bottom through all matrices, left to right)."""
    height, width = PATTERNS[pattern]
    matrices, rows, columns = stack_shape(shape)
    return matrices * -(-rows // height), -(-columns // width)


def unit_sizes(units: Tensor, shape: Sequence[int], pattern: str) -> Tensor:
    """Return the number of elements of some units, numbered as in the module's docstring."""
    width = PATTERNS[pattern][1]
    _, across = unit_grid(shape, pattern)
    _, heights = unit_rows(units // across, shape, pattern)
    return heights * (matrix_shape(shape)[1] - units % across * width).clamp(max=width)


def unit_rows(unit_row: Tensor, shape: Sequence[int], pattern: str) -> tuple[Tensor, Tensor]:
    """Return the first row, and the number of rows, of rows of units.

    Args:
        unit_row: [n] integers, numbers of rows of `unit_grid`.

    Returns:
        Rows are those of the tensor as one matrix (`matrix_shape`).
    """
    height = PATTERNS[pattern][0]
    _, rows, _ = stack_shape(shape)
    down = max(1, -(-rows // height))
    in_matrix = unit_row % down * height
    return unit_row // down * rows + in_matrix, (rows - in_matrix).clamp(max=height)


def whole_units(positions: Tensor, shape: Sequence[int], pattern: str) -> Tensor:
    """Return the ascending numbers of the units that sorted positions consist of, in the dtype of `positions`."""
    height, width = PATTERNS[pattern]
    _, rows, columns = stack_shape(shape)
    row = positions // columns
    column = positions - row * columns
    is_first = (row % max(1, rows) % height == 0) & (column % width == 0)  # the upper left element of a unit
    return _unit_row_of(row[is_first], shape, pattern) * -(-columns // width) + column[is_first] // width


def _unit_row_of(row: Tensor, shape: Sequence[int], pattern: str) -> Tensor:
    """Return the row of units of each row of the tensor as one matrix."""
    height = PATTERNS[pattern][0]
    matrices, rows, _ = stack_shape(shape)
    if matrices == 1 or rows % height == 0:
        return row // height
    return row // rows * -(-rows // height) + row % rows // height


def aligned_runs(positions: Tensor, length: int) -> Tensor | None:
    """Return the numbers of the aligned runs that sorted unique positions consist of; None if any run is incomplete."""
    if positions.numel() % length:
        return None
    first, last = positions[::length], positions[length - 1 :: length]
    runs = first // length
    return runs if bool(((last - first == length - 1) & (runs * length == first)).all()) else None


def broken_unit(indices: Tensor, shape: Sequence[int], pattern: str) -> int | None:
    """Return the number of a unit that `indices` contains in part only; None if there is none.

    Args:
        indices: [nnz] sorted unique positions in the flattened tensor, all in range.
    """
    height, width = PATTERNS[pattern]
    if pattern == "element" or indices.numel() == 0:
        return None
    columns = matrix_shape(shape)[1]
    runs = aligned_runs(indices, width) if columns % width == 0 else None
    if runs is not None and height == 1:
        return None
    # Processed in bands of whole rows of units, which bounds the scratch memory.
    down, _ = unit_grid(shape, pattern)
    positions, across = (indices, columns) if runs is None else (runs, columns // width)
    band = max(1, _BAND_ELEMENTS // (height * across))
    first_rows, _ = unit_rows(torch.arange(band, max(band, down), band, device="cpu"), shape, pattern)
    inner = (first_rows * across).to(positions.dtype)
    cuts = [0, *torch.searchsorted(positions, inner).tolist(), positions.numel()]
    in_runs = (*shape[:-1], across)
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        if begin == end:
            continue
        broken = _broken_in_band(positions[begin:end], i * band, in_runs, pattern, width if runs is None else 1)
        if broken is not None:
            return broken
    return None


def _broken_in_band(
    positions: Tensor, first_unit_row: int, shape: Sequence[int], pattern: str, width: int
) -> int | None:
    columns = matrix_shape(shape)[1]
    across = -(-columns // width)
    first_unit = first_unit_row * across
    row = positions // columns
    counts = torch.bincount(
        _unit_row_of(row, shape, pattern) * across + (positions - row * columns) // width - first_unit
    )
    units = counts.nonzero().view(-1)
    unit_row, unit_column = (units + first_unit) // across, units % across
    _, heights = unit_rows(unit_row, shape, pattern)
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
        units: [k] int32 or int64, sorted and unique, numbered as in the module's docstring. With int32, all positions
            must be below 2**31.
    """
    height, width = PATTERNS[pattern]
    if pattern == "element":
        return units
    columns = matrix_shape(shape)[1]
    _, units_across = unit_grid(shape, pattern)
    unit_row, first_column = units // units_across, units % units_across * width
    column = first_column[:, None] + torch.arange(width, dtype=units.dtype, device=units.device)
    if height == 1:
        return (unit_row[:, None] * columns + column)[column < columns]
    unit_row, counts = torch.unique_consecutive(unit_row, return_counts=True)
    spans = zip(*(t.tolist() for t in unit_rows(unit_row, shape, pattern)), strict=True)
    parts = []
    for (first, n_rows), in_row in zip(spans, column.split(counts.tolist()), strict=True):
        row = torch.arange(first, first + n_rows, dtype=units.dtype, device=units.device)
        parts.append((row[:, None] * columns + in_row[in_row < columns]).view(-1))
    return torch.cat(parts) if parts else units
