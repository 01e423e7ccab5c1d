"""Weights and changes in the form in which verl's rollout adapters hand them to vLLM and SGLang: its DeltaFlush.

verl's rollout worker has no access to the weights: it hands changes to the inference engine, in another process. A
`ChangeReader` turns the messages of a `WeightSender` into changes, of which the flushes are made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

from ...errors import ForeignMessage, OutOfOrderMessage
from ...masks.patterns import expand_units
from ...tensors import dtype_name
from ...weight_sync import Message
from ...weight_sync.encoding import Layout, changed_tensors, check_follows, checked_mask

Flush = tuple[list[tuple[str, Tensor]], bool]  # named tensors, and whether it is the last one of an update
# The engines make a dense tensor of each entry, with 8 bytes of index for an element; verl's own limit.
MAX_ENTRY = 2**26
Part = tuple[str, tuple[int, ...]]  # name and shape of a tensor that verl sends


class Whole(NamedTuple):
    """All values of a tensor."""

    name: str
    shape: tuple[int, ...]
    values: Tensor


class Change(NamedTuple):
    """The changed elements of a tensor: ascending positions [n] int32 in the flattened tensor, and their values [n]."""

    name: str
    shape: tuple[int, ...]
    positions: Tensor
    values: Tensor


def split_change(change: Change, parts: Sequence[Part]) -> Iterator[Change]:
    """Yield the changes of the tensors that follow each other in a flattened parameter; none for unchanged ones."""
    bounds = list(accumulate((math.prod(shape) for _, shape in parts), initial=0))
    starts = torch.tensor(bounds, dtype=change.positions.dtype, device=change.positions.device)
    cuts = torch.searchsorted(change.positions, starts).tolist()
    for (name, shape), first, begin, end in zip(parts, bounds, cuts, cuts[1:], strict=False):
        if begin < end:
            yield Change(name, tuple(shape), change.positions[begin:end] - first, change.values[begin:end])


def state_after(message: Message) -> str:
    """Return a name of the weights that a message leads to; equal only if an update of one applies to the other."""
    return f"{message.version}:{message.mask_digest}:{message.result_digest}"


class ChangeReader:
    """Verifies messages, and lists the elements that they change. Keeps the positions, and no weights.

    As a `WeightReceiver` of a part of the weights, this verifies what a message carries and the order of the messages,
    and not the weights that result.

    Args:
        device: of the positions and values.

    Attributes:
        state: `state_after` of the last message; None before the first mask message.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: Message | None = None  # without its tensors
        self._layout = Layout("element", ())
        self._positions: dict[str, Tensor] = {}

    @property
    def state(self) -> str | None:
        return None if self._last is None else state_after(self._last)

    def start(self, message: Message) -> None:
        """Take the positions of a mask message. The engine must be given all weights of its version.

        Raises:
            DamagedMessage: positions or digests are wrong.
            ForeignMessage: a tensor has 2^31 elements or more.
        """
        if message.kind != "mask":
            raise OutOfOrderMessage(f"a message of kind {message.kind} came before the mask")
        self._last = None
        layout, units = checked_mask(message)
        shapes = {entry.name: entry for entry in layout.tensors}
        self._positions = {}
        for name, given in units.items():
            if shapes[name].positions_dtype != torch.int32:
                raise ForeignMessage(f"{name!r} is {list(shapes[name].shape)}, expected fewer than 2^31 elements")
            positions = expand_units(given.to(self._device, torch.int64), shapes[name].shape, layout.pattern)
            self._positions[name] = positions.to(torch.int32)
        self._layout, self._last = layout, replace(message, tensors={})

    def changes(self, message: Message) -> list[Change]:
        """Verify an update, and return what it changes. A tensor without changes is not listed.

        Raises:
            OutOfOrderMessage: the update does not follow the last message.
            ForeignMessage: it is for another mask.
            DamagedMessage: values and digests do not agree.
        """
        last = self._last
        held = (None, None, None) if last is None else (last.mask_digest, last.version, last.result_digest)
        check_follows(message, *held)
        found = [
            Change(entry.name, entry.shape, self._positions[entry.name][numbers], values)
            for entry, numbers, values in changed_tensors(message, self._layout, self._device)
        ]
        self._last = replace(message, tensors={})
        return found


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
