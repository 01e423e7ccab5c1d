"""Segments: the indices of the active elements of some parameters, one per element (two bytes or more) or per run.

Tiles: the active tiles of the parameters among them whose weight gradients are computed tile by tile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..masks.patterns import PATTERNS, aligned_runs, matrix_shape
from ..masks.positions import index_dtype
from ..ops import tile_table
from ..ops.narrow import bases_of, can_narrow, narrow_indices, widened
from .ranks.sharding import Shard

# The longest first. Longer runs would save little: with 64 the indices take a 16th of a byte per active element.
RUN_LENGTHS = (64, 32, 16)


@dataclass(eq=False)
class Segments:
    """The active elements of `params`, in the form that the ops take.

    Segment i, the slots [starts[i], ends[i]) of every [nnz] buffer, belongs to params[i]. Slots are in the order of the
    flattened parameter, for every `run_length`.
    """

    params: list[Tensor]
    # [nnz / run_length] int32 or int64, the first position of each run in the flattened parameter; or uint16 offsets
    indices: Tensor
    index_bases: Tensor | None  # None unless `indices` are offsets: see `ops.narrow_indices`
    starts: list[int]
    ends: list[int]
    run_length: int

    def __post_init__(self) -> None:
        self.numels = [p.numel() for p in self.params]  # when the mask was bound, as is the dtype of all
        self.dtype = self.params[0].dtype

    def shared(self) -> dict[str, Any]:
        """Return the fields as keyword arguments, for another object over the same segments."""
        return {field.name: getattr(self, field.name) for field in fields(Segments)}

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def find_changed(self) -> tuple[int, str] | None:
        """Return (i, what has changed) of the first parameter that has another size or dtype now, or None."""
        for i, (param, numel) in enumerate(zip(self.params, self.numels, strict=True)):
            if param.numel() != numel:
                return i, f"has {param.numel()} elements, but had {numel} when its mask was bound"
            if param.dtype != self.dtype:
                return i, (
                    f"is {param.dtype}, but was {self.dtype} when its mask was bound: cast the model before the "
                    "optimizer is built, or call rebind(model) before the first step"
                )
        return None

    @property
    def nnz(self) -> int:
        return self.indices.numel() * self.run_length

    def segment(self, i: int) -> slice:
        return slice(self.starts[i], self.ends[i])

    def layout(self, which: Sequence[int] | None = None) -> dict[str, Any]:
        """Return `run_length` and `index_bases` for a call on all parameters, or on those in `which`, ascending."""
        bases = self.index_bases
        if bases is not None and which is not None and len(which) < len(self.params):
            bases = bases_of(bases, which, [self.starts[i] for i in which], self.nnz)
        return {"run_length": self.run_length, "index_bases": bases}

    @property
    def index_bytes(self) -> int:
        return self.indices.nbytes + (0 if self.index_bases is None else self.index_bases.nbytes)

    def positions(self, i: int, at_most: int | None = None) -> Tensor:
        """Return the positions of the active elements: [nnz of params[i]] int32 or int64.

        Args:
            at_most: return this many, the first ones; a multiple of the run length. None: all.
        """
        start, end = self.starts[i], self.ends[i]
        if at_most is not None:
            end = min(end, start + at_most)
        if self.index_bases is not None:
            return widened(self.indices, self.index_bases, i, start, end)
        runs = self.indices[start // self.run_length : end // self.run_length]
        return expanded(runs, self.run_length)


class ActiveWeight(Parameter):
    """The active elements of a weight with a quantised base, [nnz], as a parameter of their own.

    Attributes:
        elements: their positions in the weight.
        whole: a tensor of the weight's shape and dtype, on the meta device.
    """

    elements: Segments
    whole: Tensor

    def __new__(cls, values: Tensor, elements: Segments, whole: Tensor) -> ActiveWeight:
        made = super().__new__(cls, values)
        made.elements, made.whole = elements, whole
        return made


@dataclass(eq=False)
class LocalSegments(Segments):
    """Segments of the local tensors of shards: `params[i]` is `shards[i].local`."""

    shards: list[Shard]

    def shared(self) -> dict[str, Any]:
        """See `Segments`."""
        return {**super().shared(), "shards": self.shards}

    def same_elements(self, other: LocalSegments) -> bool:
        """Whether both are of the same elements of the same shards, with their indices in the same form."""
        pairs = ((self.indices, other.indices), (self.index_bases, other.index_bases))
        return (self.shards, self.starts, self.ends, self.run_length) == (
            other.shards,
            other.starts,
            other.ends,
            other.run_length,
        ) and all(a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)

    def positions_in_param(self, i: int) -> Tensor:
        """Return the position of every active element of `params[i]` in the flattened parameter of its shard."""
        param = self.shards[i].param
        if isinstance(param, ActiveWeight):
            return param.elements.positions(0)
        first = self.shards[i].first
        return self.positions(i) + first if first else self.positions(i)


def compact(segments: Segments, dtype: torch.dtype | None = None) -> Tensor:
    """Return the parameters' values at the active elements: [nnz] in `dtype`, by default the parameters' own."""
    parts = [p.detach().view(-1)[segments.positions(i).long()] for i, p in enumerate(segments.params)]
    return torch.cat(parts).to(dtype or segments.params[0].dtype)


def fits_uint16(param: Tensor, positions: Tensor, run_length: int) -> bool:
    """Whether the indices of sorted `positions` in the flattened parameter fit two bytes each."""
    return run_length == 1 and index_dtype(param.numel()) == torch.int32 and can_narrow(positions)


def packed(
    positions: Sequence[Tensor], run_length: int, narrow: bool
) -> tuple[Tensor, Tensor | None, list[int], list[int]]:
    """Return (indices, index_bases, starts, ends) of segments with these sorted positions, one tensor each."""
    ends = list(accumulate(part.numel() for part in positions))
    starts = [end - part.numel() for end, part in zip(ends, positions, strict=True)]
    indices = torch.cat([part[::run_length] for part in positions])
    indices, index_bases = narrow_indices(indices, starts, ends) if narrow else (indices, None)
    return indices, index_bases, starts, ends


def run_length_of(shape: Sequence[int], pattern: str) -> int:
    """Return the number of consecutive elements of the flattened tensor in a run of `pattern`.

    Every run begins at a multiple of its length. The result is 1 if the tensor's rows do not hold whole runs.
    """
    width = min(PATTERNS[pattern][1], RUN_LENGTHS[0])
    return width if matrix_shape(shape)[1] % width == 0 else 1


def longest_run(positions: Tensor, at_most: int) -> int:
    """Return the longest run length up to `at_most` such that sorted unique `positions` are whole aligned runs."""
    fitting = (length for length in RUN_LENGTHS if length <= at_most and aligned_runs(positions, length) is not None)
    return next(fitting, 1)


def expanded(indices: Tensor, run_length: int) -> Tensor:
    """Return every position of the runs that begin at `indices` [n]: [n * run_length]."""
    if run_length == 1:
        return indices
    within_run = torch.arange(run_length, dtype=indices.dtype, device=indices.device)
    return (indices[:, None] + within_run).view(-1)


@dataclass(eq=False)
class Tiles:
    """The active tiles of some of the parameters of `Segments`."""

    table: Tensor  # [tiles, 4] from `ops.tile_table`, one parameter after the other
    starts: list[int]  # of each parameter; equal to its end for a parameter that is not tiled
    ends: list[int]
    tile_size: int
    _first_rows: dict[int, list[int]] = field(default_factory=dict)

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
