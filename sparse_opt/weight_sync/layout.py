"""The order in which messages list active weights: tensors by name, grouped by dtype."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import DamagedMessage, ForeignMessage
from ..masks import MaskSet
from ..masks.patterns import PATTERNS, matrix_shape
from ..tensors import compact_json, dtype_name

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LayoutTensor:
    """A tensor of the mask: its name, shape, the name of its dtype, and its number of active elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nnz: int

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the tensor as a matrix."""
        return matrix_shape(self.shape)

    @property
    def positions_dtype(self) -> torch.dtype:
        """int32, or int64 for tensors of 2**31 or more elements."""
        return torch.int32 if math.prod(self.shape) < 2**31 else torch.int64


@dataclass(frozen=True)
class Group:
    """The tensors of one dtype.

    Attributes:
        first: number of the group's first active element in the layout.
        members: indices of the tensors in the layout, in order.
        starts: [members + 1] active elements of the group before each of them, and all.
    """

    dtype: str
    first: int
    members: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def nnz(self) -> int:
        return self.starts[-1]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The tensors of a mask in sorted order of their names, those without active elements included."""

    pattern: str
    tensors: tuple[LayoutTensor, ...]

    @classmethod
    def of(cls, mask: MaskSet, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Layout:
        """Build the layout of a mask over weights of the same names.

        Args:
            dtype: of all values that are sent; None for those of the weights.

        Raises:
            ForeignMessage: a dtype is not bfloat16, float16 or float32; names the tensor.
        """
        tensors = []
        for name in sorted(mask.indices):
            found = dtype_name(weights[name]) if dtype is None else str(dtype).removeprefix("torch.")
            if mask[name].numel() and found not in DTYPES:
                raise ForeignMessage(f"{name!r} is {found}, expected one of {', '.join(DTYPES)}")
            tensors.append(LayoutTensor(name, mask.shapes[name], found, mask[name].numel()))
        return cls(mask.pattern, tuple(tensors))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The dtypes of tensors with active elements, in sorted order of their names."""
        groups: list[Group] = []
        first = 0
        active = [i for i, t in enumerate(self.tensors) if t.nnz]
        for dtype in sorted({self.tensors[i].dtype for i in active}):
            members = tuple(i for i in active if self.tensors[i].dtype == dtype)
            starts = [0]
            for i in members:
                starts.append(starts[-1] + self.tensors[i].nnz)
            groups.append(Group(dtype, first, members, tuple(starts)))
            first += starts[-1]
        return tuple(groups)

    @property
    def nnz(self) -> int:
        return sum(t.nnz for t in self.tensors)

    def names(self, group: Group) -> list[str]:
        """Return the names of a group's tensors, in order."""
        return [self.tensors[i].name for i in group.members]

    def split(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the active values of each tensor by name, as views of those of each dtype."""
        parts: dict[str, Tensor] = {}
        for group in self.groups:
            sizes = [self.tensors[i].nnz for i in group.members]
            parts.update(zip(self.names(group), values[group.dtype].split(sizes), strict=True))
        return parts

    def joined(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the active values [nnz] of each dtype, in new memory, from those of each tensor by name."""
        return {
            group.dtype: torch.cat([values[name].to(group.torch_dtype) for name in self.names(group)])
            for group in self.groups
        }

    def to_json(self) -> str:
        """Return compact JSON with sorted keys."""
        tensors = [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "nnz": t.nnz} for t in self.tensors]
        return compact_json({"pattern": self.pattern, "tensors": tensors})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read the layout of a mask message.

        Raises:
            DamagedMessage: it is malformed.
        """
        try:
            content = json.loads(text)
            pattern, tensors = content["pattern"], tuple(_tensor(entry) for entry in content["tensors"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedMessage(f"the layout of a mask message is malformed: {error!r}") from error
        if pattern not in PATTERNS:
            raise DamagedMessage(f"the layout has the pattern {pattern!r}, expected one of {', '.join(PATTERNS)}")
        names = [t.name for t in tensors]
        if names != sorted(set(names)):
            raise DamagedMessage("the tensors of the layout are not in sorted order of their names")
        for t in tensors:
            if not 0 <= t.nnz <= math.prod(t.shape) or (t.nnz and t.dtype not in DTYPES):
                raise DamagedMessage(f"the layout lists {t.name!r} as {t.dtype} {list(t.shape)} with nnz {t.nnz}")
        return cls(pattern, tensors)


def _tensor(entry: Any) -> LayoutTensor:
    shape: Sequence[int] = entry["shape"]
    name, dtype, nnz = entry["name"], entry["dtype"], entry["nnz"]
    if not (isinstance(name, str) and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in [nnz, *shape])):
        raise ValueError(f"{entry} is not name, shape, dtype and nnz of a tensor")
    return LayoutTensor(name, tuple(shape), dtype, nnz)
