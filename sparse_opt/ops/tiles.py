"""Tile tables: the positions of a weight's active tiles, and the compact slots of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TILE_SIZES = (64, 128)


def tile_table(positions: Tensor, shape: Sequence[int], tile_size: int, *, first_slot: int = 0) -> Tensor:
    """Build the table of the active tiles of one matrix, or stack of matrices, for `tile_weight_grad_`.

    For several matrices, concatenate their tables, each built with the first slot of its matrix.

    Args:
        positions: [nnz] int32 or int64, ascending positions of the elements of whole tiles aligned to `tile_size`, as
            in a `MaskSet` of pattern tile64 or tile128. Tiles at the right and lower edge are cut off there.
        shape: (rows, columns) of the matrix, after (experts,) if it is a stack, whose matrices have tiles of their own.
        tile_size: 64 or 128.
        first_slot: the compact slot of the first position.

    Returns:
        [k, 4] int64, on the device of `positions`: for each tile its first row, its first column, the slot of its first
        element, and the stride in slots from one of its rows to the next.

    Raises:
        ValueError: the shape has less than two dimensions, the tile size is not 64 or 128, or the positions are not
            those of whole tiles.
    """
    if tile_size not in TILE_SIZES:
        raise ValueError(f"tile_table: tile_size is {tile_size}, expected 64 or 128")
    if len(shape) < 2:
        raise ValueError(f"tile_table: shape is {list(shape)}, expected (rows, columns)")
    rows, columns = shape[-2:]
    position = positions.long()
    row, column = position // columns, position % columns
    first = ((row % rows % tile_size == 0) & (column % tile_size == 0)).nonzero().view(-1)
    tile_row, tile_column = row[first], column[first]
    # The slots from one row to the next are the active elements of the tile's first row.
    stride = torch.searchsorted(position, (tile_row + 1) * columns) - torch.searchsorted(position, tile_row * columns)
    sizes = (rows - tile_row % rows).clamp(max=tile_size) * (columns - tile_column).clamp(max=tile_size)
    down, across = -(-rows // tile_size), -(-columns // tile_size)

    def number(row: Tensor, column: Tensor) -> Tensor:
        return (row // rows * down + row % rows // tile_size) * across + column // tile_size

    tile, held = torch.unique(number(row, column), return_counts=True)
    begun = number(tile_row, tile_column)
    if not torch.equal(tile, begun) or not torch.equal(held, sizes):
        raise ValueError(
            f"tile_table: {position.numel()} positions are in {tile.numel()} tiles of {tile_size}, but contain the "
            f"first element of {first.numel()}, which have {int(sizes.sum())} elements; expected whole aligned tiles"
        )
    return torch.stack([tile_row, tile_column, first + first_slot, stride], dim=1)
