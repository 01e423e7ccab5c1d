"""The positions of a mask message: positions of elements, or numbers of the pattern's units."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import DamagedMessage
from ..masks import MaskSet
from ..masks.patterns import PATTERNS, unit_grid
from .digest import digest_sum, to_hex
from .layout import Layout, LayoutTensor
from .message import Message


def units_of(mask: MaskSet, entry: LayoutTensor) -> Tensor:
    """Return what a mask message lists for a tensor: the ascending numbers of its units, for element masks positions.

    Units are numbered row by row over `masks.patterns.unit_grid`. The tensor is [units] in `entry.positions_dtype`.
    """
    positions = mask[entry.name]
    if mask.pattern == "element":
        return positions
    height, width = PATTERNS[mask.pattern]
    columns = entry.matrix[1]
    row, column = positions // columns, positions % columns
    first = (row % height == 0) & (column % width == 0)  # the upper left element of a unit
    across = unit_grid(entry.shape, mask.pattern)[1]
    return (row[first] // height * across + column[first] // width).to(entry.positions_dtype)


def checked_mask(message: Message) -> tuple[Layout, dict[str, Tensor]]:
    """Return the layout of a mask message, and the units of each tensor with active elements, by the tensor's name.

    Raises:
        DamagedMessage: positions or their digest are wrong.
    """
    layout = Layout.from_json(message.layout or "")
    units = _checked_units(layout, message.tensors)
    total, count = 0, 0
    for given in units.values():
        total += int(digest_sum(given, count))
        count += given.numel()
    if to_hex(total) != message.payload_digest:
        raise DamagedMessage(f"the positions have digest {to_hex(total)}, expected {message.payload_digest}")
    return layout, units


def _checked_units(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the units of each tensor with active elements, by the tensor's name.

    Raises:
        DamagedMessage: positions are missing, not ascending, out of range, or not as many as the layout states.
    """
    units = {}
    for i, entry in enumerate(layout.tensors):
        key = f"positions.{i}"
        if (key in tensors) != bool(entry.nnz):
            raise DamagedMessage(f"the mask message has {'no ' if entry.nnz else ''}{key} of {entry.name!r}")
        if not entry.nnz:
            continue
        given = tensors[key]
        if given.dim() != 1 or given.dtype != entry.positions_dtype:
            raise DamagedMessage(
                f"{key} of {entry.name!r} is {given.dtype} {list(given.shape)}, expected {entry.positions_dtype} [n]"
            )
        if given.numel() == 0 or not bool((given[1:] > given[:-1]).all()):
            raise DamagedMessage(f"{key} of {entry.name!r} is not ascending")
        bound = math.prod(unit_grid(entry.shape, layout.pattern))
        if int(given[0]) < 0 or int(given[-1]) >= bound:
            raise DamagedMessage(f"{key} of {entry.name!r} has numbers outside of 0:{bound}")
        if (nnz := active_elements(given, entry, layout.pattern)) != entry.nnz:
            raise DamagedMessage(f"{key} of {entry.name!r} are {nnz} elements, expected {entry.nnz}")
        units[entry.name] = given
    if extra := sorted(set(tensors) - {f"positions.{i}" for i in range(len(layout.tensors))}):
        raise DamagedMessage(f"the mask message has the tensor {extra[0]!r}, expected positions only")
    return units


def active_elements(units: Tensor, entry: LayoutTensor, pattern: str) -> int:
    """Count the elements of some units; those at the right and bottom edge may be cut off."""
    if pattern == "element":
        return units.numel()
    height, width = PATTERNS[pattern]
    rows, columns = entry.matrix
    across = unit_grid(entry.shape, pattern)[1]
    numbers = units.to(torch.int64)
    heights = (rows - numbers // across * height).clamp(max=height)
    widths = (columns - numbers % across * width).clamp(max=width)
    return int((heights * widths).sum())
