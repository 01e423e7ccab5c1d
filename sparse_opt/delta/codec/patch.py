"""Patch: the encoded changes, and their form in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...errors import DeltaLogError
from .tables import Tables
from .words import RAW_BIT, RECORD_UNIT, first_tiles, word_kind

_PARTS = ["counts", "records", "sizes", "tables"]


class PatchError(DeltaLogError):
    """A patch is damaged, or does not fit the given tensors."""


@dataclass(frozen=True)
class Patch:
    """The encoded changes of tensors of one dtype, on the tensors' device except for `counts`.

    Attributes:
        counts: int64 [tensors] on the CPU, the number of changed elements of each.
        sizes: length of each record, uint32 [tiles] in units of 2 bytes, with the highest bit set for raw records.
        records: uint8.
        tables: the frequencies that the records are coded with.
    """

    dtype: torch.dtype
    numels: tuple[int, ...]
    counts: Tensor
    sizes: Tensor
    records: Tensor
    tables: Tables

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors to store in a file, under the names of docs/formats.md without the group prefix."""
        tables = torch.from_numpy(np.frombuffer(self.tables.to_bytes(), np.uint8).copy())
        return {"counts": self.counts, "records": self.records, "sizes": self.sizes, "tables": tables}

    @property
    def nbytes(self) -> int:
        """Total bytes of the parts."""
        return sum(part.nbytes for part in self.parts().values())

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], dtype: torch.dtype, numels: Sequence[int]) -> Patch:
        """Build a patch from a file's tensors, on the CPU. Checks everything that does not require decoding.

        Raises:
            PatchError: the parts are not those of a patch for tensors of these sizes.
        """
        if "records" not in parts:
            raise PatchError(f"it holds {sorted(parts)}, expected {_PARTS}")
        records = _part(parts, "records", torch.uint8)
        frame = {name: part for name, part in parts.items() if name != "records"}
        return replace(cls._of_frame(frame, len(records), dtype, numels), records=records)

    @classmethod
    def of_tensor_in(
        cls,
        frame: Mapping[str, Tensor],
        length: int,
        read_records: Callable[[int, int], Tensor],
        dtype: torch.dtype,
        numels: Sequence[int],
        i: int,
    ) -> Patch:
        """Build the patch of tensor `i` alone from a file's patch, reading only that tensor's records.

        Args:
            frame: the file's tensors without the records, as in `from_parts`.
            length: bytes of all records.
            read_records: called with (begin, end) in bytes, returns those records.

        Raises:
            PatchError: as `from_parts`.
        """
        whole = cls._of_frame(frame, length, dtype, numels)
        first, last = first_tiles(numels)[i : i + 2]
        begin, end = whole.offsets()[[first, last]].tolist()
        return replace(
            whole,
            numels=whole.numels[i : i + 1],
            counts=whole.counts[i : i + 1],
            sizes=whole.sizes[first:last],
            records=_part({"records": read_records(begin, end)}, "records", torch.uint8, end - begin),
            tables=replace(whole.tables, row_of=whole.tables.row_of[i : i + 1]),
        )

    @classmethod
    def _of_frame(cls, frame: Mapping[str, Tensor], length: int, dtype: torch.dtype, numels: Sequence[int]) -> Patch:
        """Build a patch without its records, which have `length` bytes in all."""
        if (found := sorted([*frame, "records"])) != _PARTS:
            raise PatchError(f"it holds {found}, expected {_PARTS}")
        tiles = first_tiles(numels)[-1]
        counts = _part(frame, "counts", torch.int64, len(numels))
        if any(not 0 <= count <= numel for count, numel in zip(counts.tolist(), numels, strict=True)):
            raise PatchError("a count is larger than its tensor or below 0")
        sizes = _part(frame, "sizes", torch.uint32, tiles)
        stored = _part(frame, "tables", torch.uint8).numpy().tobytes()
        try:
            tables = Tables.from_bytes(stored, len(numels), word_kind(dtype))
        except ValueError as error:
            raise PatchError(str(error)) from error
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        patch = cls(dtype, tuple(numels), counts, sizes, none, tables)
        if int(patch.offsets()[-1]) != length:
            raise PatchError(f"its records have {length} bytes, expected {int(patch.offsets()[-1])} from its sizes")
        return patch

    def offsets(self) -> Tensor:
        """Return the byte offset of each record, and the end: [tiles + 1] int64 on the records' device."""
        lengths = self.sizes.to(torch.int64) & ~RAW_BIT
        offsets = lengths.new_zeros(len(lengths) + 1)
        torch.cumsum(lengths * RECORD_UNIT, 0, out=offsets[1:])
        return offsets


def _part(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, length: int | None = None) -> Tensor:
    part = parts[name]
    if part.dtype != dtype or part.dim() != 1 or (length is not None and len(part) != length):
        found = f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
        expected = f"{str(dtype).removeprefix('torch.')} {'of one dimension' if length is None else [length]}"
        raise PatchError(f"its {name} is {found}, expected {expected}")
    return part
