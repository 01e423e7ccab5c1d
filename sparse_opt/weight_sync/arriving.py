"""What a message brings to a receiver, and what the device does with it before the message is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DamagedMessage
from .addresses import Addresses
from .backend import Backend, Changes, Index
from .host_copy import HostCopy
from .layout import Group, Layout
from .message import Message
from .reference import bitmap_bytes


class ReceiverMask(NamedTuple):
    """The mask that a receiver follows, and where its active elements are."""

    digest: str
    layout: Layout
    device: torch.device
    backend: Backend
    indices: tuple[Index, ...]  # one for each group of the layout
    parts: dict[str, list[tuple[int, int, int, int]]]  # of the weights that are not whole
    addresses: Addresses  # of the weights that are not given as destinations

    @property
    def is_whole(self) -> bool:
        return not self.parts


class Change(NamedTuple):
    """What a message carries for the tensors of one dtype: all values, or the changed ones; None is nothing."""

    values: Tensor | None = None
    changes: Changes | None = None
    changed: Tensor | None = None  # the values of `changes`


class Marked(NamedTuple):
    """The bitmaps of an update that arrived before its message, by dtype, and where their elements are."""

    mask: ReceiverMask
    bitmaps: dict[str, Tensor]
    changes: dict[str, Changes]


class Written:
    """All values of an update that arrived before its message: written on the device, if their digests are right.

    The values that are replaced come to the place of the new ones, until the message confirms the update or `undo`
    brings them back. All on the current stream; the host waits for nothing.

    Args:
        values: [nnz] of each group of the mask.

    Attributes:
        results: the digest of each group, and then the totals, on their way to the host; None before `write`.
    """

    def __init__(self, mask: ReceiverMask, values: Sequence[Tensor]) -> None:
        self.mask, self.values = mask, values
        pairs = zip(mask.layout.groups, values, strict=True)
        sums = [mask.backend.digest_sum(of_group, group.first).view(1) for group, of_group in pairs]
        self._sums = sums[0] if len(sums) == 1 else torch.cat(sums)
        self._valid: Tensor | None = None  # [1] bool, on the device
        self.results: HostCopy | None = None

    @torch.inference_mode()
    def write(self, totals: Tensor) -> None:
        """Write the values if their digests are the totals, [groups] int64. Once only."""
        equal = self._sums == totals
        self._valid = equal if equal.numel() == 1 else equal.all().view(1)
        self.results = HostCopy([self._sums, totals])  # before the writes, for which the host need not wait
        for index, of_group in zip(self.mask.indices, self.values, strict=True):
            index.put(of_group, self._valid, keep_old=True)

    def is_of(self, message: Message) -> bool:
        """Whether the message has these values."""
        groups = zip(self.mask.layout.groups, self.values, strict=True)
        mine = {f"{group.dtype}.values": values for group, values in groups}
        return message.tensors.keys() == mine.keys() and all(t is mine[name] for name, t in message.tensors.items())

    @torch.inference_mode()
    def undo(self) -> None:
        """Bring the weights back to what they were."""
        valid, self._valid = self._valid, None
        if valid is not None:
            for index, of_group in zip(self.mask.indices, self.values, strict=True):
                index.put(of_group, valid)


Begun = Marked | Written


def change_of(message: Message, group: Group, index: Index, device: torch.device) -> Change:
    """Return what a message carries for a group. Raises DamagedMessage."""
    values, bitmap, changed = (message.tensors.get(f"{group.dtype}.{kind}") for kind in ("values", "bitmap", "changed"))
    if values is not None:
        check(f"{group.dtype}.values", values, group.torch_dtype, group.nnz)
        if bitmap is not None or changed is not None:
            raise DamagedMessage(f"the message has both {group.dtype}.values and changed values")
        return Change(values.to(device, non_blocking=True))
    if message.kind == "state":
        raise DamagedMessage(f"the state message has no {group.dtype}.values")
    if bitmap is None and changed is None:
        return Change()
    if bitmap is None or changed is None:
        raise DamagedMessage(f"the message has only one of {group.dtype}.bitmap and {group.dtype}.changed")
    check(f"{group.dtype}.changed", changed, group.torch_dtype, changed.numel())
    changed = changed.to(device, non_blocking=True)
    begun = message.begun
    if isinstance(begun, Marked) and begun.bitmaps.get(group.dtype) is bitmap:
        return Change(None, begun.changes[group.dtype], changed)
    return Change(None, changes_of(bitmap, changed.numel(), group, index, device), changed)


def changes_of(bitmap: Tensor, room: int, group: Group, index: Index, device: torch.device) -> Changes:
    """Return the elements that a bitmap marks; `room` is how many are expected. Raises DamagedMessage."""
    check(f"{group.dtype}.bitmap", bitmap, torch.uint8, bitmap_bytes(group.nnz))
    return index.changes(bitmap.to(device, non_blocking=True), room)


def check(name: str, tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    """Raise DamagedMessage if a tensor is not contiguous, or has another dtype or number of elements."""
    if tensor.dtype != dtype or tuple(tensor.shape) != (numel,) or not tensor.is_contiguous():
        raise DamagedMessage(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {[numel]}")
