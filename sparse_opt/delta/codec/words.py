"""Parameters of the codec and of its dtypes: the words of docs/formats.md, and the division of tensors into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

TILE = 2**19  # words
LANE_ROWS = 16384  # words of a lane of a tile
SPAN_ROWS = 64  # rows of a tile whose changes are coded together

RAW_BIT = 1 << 31  # of a size
RECORD_UNIT = 2  # bytes

CLASSES = 256
ROW_SCALE_BITS = 16
VALUE_SCALE_BITS = 14
MAX_VALUE_TABLES = 64

_CLASS_SHIFTS = {
    torch.bfloat16: 7,
    torch.float16: 7,
    torch.float32: 23,
    torch.float64: 55,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}


@dataclass(frozen=True)
class WordKind:
    """How the words of a dtype are interpreted: size in bytes, floating-point order or not, and position of the class.

    class_shift is 8 * size if the dtype has only one class.
    """

    size: int
    is_float: bool
    class_shift: int

    @property
    def bits(self) -> int:
        return 8 * self.size

    @property
    def symbols(self) -> int:
        """Number of symbols of a change: two signs for each bucket of magnitudes."""
        return 2 * (4 + 2 * (self.bits - 3))


def word_kind(dtype: torch.dtype) -> WordKind:
    """Return the kind of a dtype of 1, 2, 4 or 8 bytes."""
    size = dtype.itemsize
    is_float = dtype in _CLASS_SHIFTS
    return WordKind(size, is_float, _CLASS_SHIFTS[dtype] if is_float else 8 * size)


def first_tiles(numels: Sequence[int]) -> list[int]:
    """Return the number of each tensor's first tile, and the total number of tiles: [tensors + 1]."""
    return [0, *accumulate(-(-numel // TILE) for numel in numels)]
