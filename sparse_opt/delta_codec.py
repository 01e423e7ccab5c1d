"""One patch: where the bits of a state changed and what they are now, as tensors for a file.

Tensors of one element size are coded together, in the order of the log's layout. For each element size of B bits:

    bitsB.counts    [tensors] int64, changed elements of each tensor
    bitsB.indices   [changed] int32 (int64 where a tensor has 2**31 elements or more), positions in the flattened
                    tensor, ascending within each tensor
    bitsB.values    [changed] uint8, int16, int32 or int64, the new bits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from . import ops
from .delta_state import StateLayout, TensorSpec
from .errors import DeltaLogError
from .tensor_state import BITS_DTYPE, as_bits

CODEC = "index_value"


@dataclass(frozen=True)
class PatchGroup:
    """Changes of some tensors of one element size and one device: flat over all of them, `counts[i]` of `names[i]`."""

    names: tuple[str, ...]
    indices: Tensor
    values: Tensor
    counts: tuple[int, ...]

    def apply_(self, state: Mapping[str, Tensor]) -> None:
        """Write the new bits into contiguous tensors of any dtype of this element size."""
        ends = list(accumulate(self.counts))
        starts = [end - count for end, count in zip(ends, self.counts, strict=True)]
        ops.delta_apply_([as_bits(state[name]) for name in self.names], self.indices, self.values, starts, ends)


def encode(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[PatchGroup]:
    """The changes from `old` to `new`, contiguous tensors of the same names, shapes, dtypes and devices.

    Runs on the tensors' devices, one call for all tensors of one element size and device.
    """
    together: dict[tuple[int, torch.device], list[str]] = {}
    for name, tensor in new.items():
        together.setdefault((tensor.element_size(), tensor.device), []).append(name)
    groups = []
    for names in together.values():
        indices, values, counts = ops.delta_encode([as_bits(old[n]) for n in names], [as_bits(new[n]) for n in names])
        groups.append(PatchGroup(tuple(names), indices, values, tuple(counts.tolist())))
    return groups


def pack(layout: StateLayout, groups: list[PatchGroup]) -> dict[str, Tensor]:
    """The tensors of a patch file, on the CPU."""
    changes: dict[str, tuple[Tensor, Tensor]] = {}
    for group in groups:
        indices, values = group.indices.cpu(), group.values.cpu()
        parts = zip(indices.split(group.counts), values.split(group.counts), strict=True)
        changes.update(zip(group.names, parts, strict=True))
    payload = {}
    for size, specs in _by_element_size(layout).items():
        parts_of = [changes[spec.name] for spec in specs]
        payload[f"bits{8 * size}.counts"] = torch.tensor([len(i) for i, _ in parts_of], dtype=torch.int64)
        payload[f"bits{8 * size}.indices"] = torch.cat([i for i, _ in parts_of])
        payload[f"bits{8 * size}.values"] = torch.cat([v for _, v in parts_of])
    return payload


def unpack(layout: StateLayout, payload: Mapping[str, Tensor], where: str) -> list[PatchGroup]:
    """The groups of a patch file, checked so far that applying them cannot write outside the layout's tensors.

    Raises:
        DeltaLogError: the payload is not one for this layout; `where` names the file and step.
    """
    by_size = _by_element_size(layout)
    wanted = {f"bits{8 * size}.{part}" for size in by_size for part in ("counts", "indices", "values")}
    if set(payload) != wanted:
        raise DeltaLogError(f"{where}: holds the tensors {sorted(payload)}, wanted {sorted(wanted)}")
    groups = []
    for size, specs in by_size.items():
        prefix = f"bits{8 * size}"
        counts, indices, values = (payload[f"{prefix}.{part}"] for part in ("counts", "indices", "values"))
        if counts.dtype != torch.int64 or counts.shape != (len(specs),):
            raise DeltaLogError(f"{where}: {prefix}.counts is {_found(counts)}, wanted int64 [{len(specs)}]")
        numels = torch.tensor([spec.numel for spec in specs], dtype=torch.int64)
        if bool(((counts < 0) | (counts > numels)).any()):
            raise DeltaLogError(f"{where}: {prefix}.counts has a number outside its tensor's size")
        changed = sum(counts.tolist())
        if indices.dtype not in (torch.int32, torch.int64) or indices.shape != (changed,):
            raise DeltaLogError(f"{where}: {prefix}.indices is {_found(indices)}, wanted int32 or int64 [{changed}]")
        if values.dtype != BITS_DTYPE[size] or values.shape != (changed,):
            raise DeltaLogError(f"{where}: {prefix}.values is {_found(values)}, wanted {BITS_DTYPE[size]} [{changed}]")
        if bool(((indices < 0) | (indices >= numels.repeat_interleave(counts))).any()):
            raise DeltaLogError(f"{where}: {prefix}.indices has a position outside its tensor")
        groups.append(PatchGroup(tuple(spec.name for spec in specs), indices, values, tuple(counts.tolist())))
    return groups


def _by_element_size(layout: StateLayout) -> dict[int, list[TensorSpec]]:
    by_size: dict[int, list[TensorSpec]] = {}
    for spec in layout.tensors:
        by_size.setdefault(spec.element_size, []).append(spec)
    return by_size


def _found(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
