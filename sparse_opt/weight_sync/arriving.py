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
from .message import TOTALS, Message
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
    # Whether the values of a group can be exchanged with those of the weights, and back: no two destinations share
    # memory, and the indices exchange.
    exchanges: bool

    @property
    def is_whole(self) -> bool:
        return not self.parts

    @property
    def works_ahead(self) -> bool:
        """Whether the device can be given work on tensors that have not arrived, without the host waiting for it."""
        return self.device.type == "cpu" or self.backend.name != "reference"


class Change(NamedTuple):
    """What a message carries for the tensors of one dtype: all values, or the changed ones; None is nothing."""

    values: Tensor | None = None
    changes: Changes | None = None
    changed: Tensor | None = None  # the values of `changes`


class Marked(NamedTuple):
    """The bitmaps of an update that has no message yet, by dtype, and where their elements are."""

    mask: ReceiverMask
    bitmaps: dict[str, Tensor]
    changes: dict[str, Changes]


class Written:
    """All values of an update that has no message yet. `write` writes them, and `undo` restores the old values.

    Until then the old values are kept in the place of the new ones. All is done in the order of the current stream, and
    the host waits for nothing.

    Args:
        values: [nnz] of each group of the mask.

    Attributes:
        results: the digest of each group, and then the totals, on their way to the host; None before `write`.
    """

    def __init__(self, mask: ReceiverMask, values: Sequence[Tensor]) -> None:
        self.mask, self.values = mask, values
        self._sums = self._digests()
        self._totals: Tensor | None = None
        self._valid: Tensor | None = None  # [1] bool, on the device
        self.results: HostCopy | None = None

    @torch.inference_mode()
    def write(self, totals: Tensor) -> None:
        """Write the values if their digests are the totals, [groups] int64. Once only.

        Raises:
            DamagedMessage: the totals have another dtype or shape.
        """
        check(TOTALS, totals, torch.int64, len(self.values))
        valid = _all_equal(self._sums, totals)
        self.results = HostCopy([self._sums, totals])  # before the writes, for which the host need not wait
        self._totals, self._valid = totals, valid
        for index, of_group in zip(self.mask.indices, self.values, strict=True):
            index.put(of_group, valid, keep_old=True)

    def is_of(self, message: Message) -> bool:
        """Whether the message has these values."""
        groups = zip(self.mask.layout.groups, self.values, strict=True)
        mine = {f"{group.dtype}.values": values for group, values in groups}
        return message.tensors.keys() == mine.keys() and all(t is mine[name] for name, t in message.tensors.items())

    def confirm(self) -> None:
        """Let `undo` do nothing from now on."""
        self._valid = None

    @torch.inference_mode()
    def undo(self) -> None:
        """Exchange old and new values again in the groups in which `write` has done so, unless `confirm` was called.

        May be called again, also after `write` or `undo` was interrupted between two groups: a group was not exchanged
        if `values` have the digest of the new ones. On a GPU a group is exchanged by one launch.
        """
        valid, totals = self._valid, self._totals
        if valid is None or totals is None:
            return
        sums = self._digests()
        for i, (index, of_group) in enumerate(zip(self.mask.indices, self.values, strict=True)):
            index.put(of_group, valid & (sums[i] != totals[i]), keep_old=True)

    def _digests(self) -> Tensor:
        """Return the digest of the values of each group, [groups] int64."""
        pairs = zip(self.mask.layout.groups, self.values, strict=True)
        sums = [self.mask.backend.digest_sum(of_group, group.first).view(1) for group, of_group in pairs]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


def _all_equal(a: Tensor, b: Tensor) -> Tensor:
    """Return [1] bool on the device: whether two tensors [n] are equal."""
    equal = a == b
    return equal if equal.numel() == 1 else equal.all().view(1)


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


def changes_of(bitmap: Tensor, capacity: int, group: Group, index: Index, device: torch.device) -> Changes:
    """Return the elements that a bitmap marks; `capacity` is how many are expected. Raises DamagedMessage."""
    check(f"{group.dtype}.bitmap", bitmap, torch.uint8, bitmap_bytes(group.nnz))
    return index.changes(bitmap.to(device, non_blocking=True), capacity)


def warm_up(mask: ReceiverMask, values: Sequence[Tensor]) -> None:
    """Let a GPU do once what it does with tensors that have not arrived, and write nothing.

    Kernels are compiled and loaded, and memory of the host is allocated, while nothing waits for a broadcast. Otherwise
    that might wait for the broadcast, and the sender for this receiver.

    Args:
        values: [nnz] of each group, which are lost.
    """
    if values and mask.exchanges:
        written = Written(mask, values)
        written.write(written._sums + 1)
    for group, index in zip(mask.layout.groups, mask.indices, strict=True):
        bitmap = torch.zeros(bitmap_bytes(group.nnz), dtype=torch.uint8, device=mask.device)
        changed = torch.empty(1, dtype=group.torch_dtype, device=mask.device)
        changes = index.changes(bitmap, 1)
        changes.sums(changed, read_old=mask.is_whole)
        changes.write(changed)  # the bitmap marks nothing


def check(name: str, tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    """Raise DamagedMessage if a tensor is not contiguous, or has another dtype or number of elements."""
    if tensor.dtype != dtype or tuple(tensor.shape) != (numel,) or not tensor.is_contiguous():
        raise DamagedMessage(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {[numel]}")
