"""Tiles: the active tiles of the parameters whose weight gradients are computed tile by tile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...ops import tile_table
from ..segments import Segments


@dataclass(eq=False)
class Tiles:
    """The active tiles of some of the parameters of `Segments`."""

    table: Tensor  # [tiles, 4] from `ops.tile_table`, one parameter after the other
    starts: list[int]  # of each parameter; equal to its end for a parameter that is not tiled
    ends: list[int]
    tile_size: int
    _first_rows: dict[int, list[int]] = field(default_factory=dict)
    _own_tables: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Segments, which: Collection[int], tile_size: int) -> Tiles:
        """Return the tiles of the parameters in `which`, matrices or stacks of them with masks of whole tiles."""
        parts: list[Tensor] = []
        starts, ends, n = [], [], 0
        for i, param in enumerate(segments.params):
            starts.append(n)
            if i in which:
                first_slot = segments.starts[i]
                parts.append(tile_table(segments.positions(i), tuple(param.shape), tile_size, first_slot=first_slot))
                n += len(parts[-1])
            ends.append(n)
        return cls(torch.cat(parts), starts, ends, tile_size)

    def has(self, i: int) -> bool:
        """Whether parameter i is tiled."""
        return self.starts[i] < self.ends[i]

    def of_first_slot(self, i: int, first_slot: int) -> Tensor:
        """Return the tiles of parameter i, as a table whose slots count from its first one, `first_slot`."""
        if i not in self._own_tables:
            own = self.table[self.starts[i] : self.ends[i]].clone()
            own[:, 2] -= first_slot
            self._own_tables[i] = own
        return self._own_tables[i]

    def of_rows(self, i: int, begin: int, end: int) -> Tensor:
        """Return the tiles of rows [begin, end) of parameter i, as a table for the matrix of these rows.

        Raises:
            ValueError: `begin` is not a multiple of the tile size.
        """
        if begin % self.tile_size:
            raise ValueError(f"rows from {begin} on: expected a multiple of the tile size, {self.tile_size}")
        table = self.table[self.starts[i] : self.ends[i]]
        if i not in self._first_rows:  # the host needs them to slice the table; synchronizes only this once
            self._first_rows[i] = table[:, 0].tolist()
        first_rows = self._first_rows[i]
        part = table[bisect_left(first_rows, begin) : bisect_left(first_rows, end)].clone()
        part[:, 0] -= begin
        return part
