"""Weights and changes in the form in which verl's rollout adapters hand them to vLLM and SGLang: its DeltaFlush."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

from ...tensors import dtype_name
from .changed_elements import Change

Flush = tuple[list[tuple[str, Tensor]], bool]  # named tensors, and whether it is the last one of an update
# The engines make a dense tensor of each entry, with 8 bytes of index for an element; verl's own limit.
MAX_ENTRY = 2**26


class Whole(NamedTuple):
    """All values of a tensor."""

    name: str
    shape: tuple[int, ...]
    values: Tensor


def whole_bucket(tensors: Sequence[Whole]) -> tuple[list[dict[str, object]], Tensor]:
    """Return the entries of whole tensors of one dtype in a flush, and their values, one after the other."""
    params, begin = [], 0
    for tensor in tensors:
        end = begin + tensor.values.numel()
        params.append(vars(DeltaParam(tensor.name, dtype_name(tensor.values), list(tensor.shape), 0, 0, 4, begin, end)))
        begin = end
    return params, torch.cat([tensor.values.reshape(-1) for tensor in tensors])


def whole_flush(params: list[dict[str, object]], values: Tensor, *, is_last: bool) -> Flush:
    """Return the flush of `whole_bucket`."""
    spec = {"encoding": "dense", "verify": False, "is_last": is_last, "params": params}
    return [("__delta_spec__", _spec(spec, None, values)), ("__values__", values)], is_last


def change_flushes(changes: Iterable[Change], bucket_size: int) -> Iterator[Flush]:
    """Yield flushes of changes of one dtype; all but the last one have at least `bucket_size` bytes."""
    buckets: list[list[Change]] = [[]]
    nbytes = 0
    for change in changes:
        for begin in range(0, change.values.numel(), MAX_ENTRY):
            part = slice(begin, begin + MAX_ENTRY)
            if nbytes >= bucket_size:
                buckets.append([])
                nbytes = 0
            piece = change._replace(positions=change.positions[part], values=change.values[part])
            buckets[-1].append(piece)
            nbytes += piece.positions.nbytes + piece.values.nbytes
    for i, bucket in enumerate(buckets):
        if bucket:
            yield _change_flush(bucket, is_last=i == len(buckets) - 1)


def _change_flush(changes: Sequence[Change], *, is_last: bool) -> Flush:
    params, begin = [], 0
    for change in changes:
        end = begin + change.values.numel()
        place = {"pos_start": 4 * begin, "pos_end": 4 * end, "pos_width": 4, "val_start": begin, "val_end": end}
        params.append(vars(DeltaParam(change.name, dtype_name(change.values), list(change.shape), **place)))
        begin = end
    positions = torch.cat([change.positions for change in changes]).view(torch.uint8)
    values = torch.cat([change.values for change in changes])
    spec = _spec({"encoding": "indices", "params": params}, positions, values)
    return [("__delta_spec__", spec), ("__positions__", positions), ("__values__", values)], is_last


def _spec(spec: dict[str, object], positions: Tensor | None, values: Tensor) -> Tensor:
    none = torch.empty(0, dtype=torch.uint8, device=values.device)
    text = json.dumps({**spec, "checksum": checksum(none if positions is None else positions, values)})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(values.device)
