"""What a message brings to a receiver: it is verified and written by the device, before the host knows the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DamagedMessage
from .addresses import Addresses
from .backend import Backend, Changes, Index
from .digest import signed
from .host_copy import HostCopy
from .layout import Group, Layout
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
    changed: int = 0  # number of changed values; of announced ones, the most there can be


class Expected(NamedTuple):
    """What the digests are compared with: integers, or int64 tensors without dimensions on the device."""

    payload: int | Tensor  # digest of the values that are sent
    result: int | Tensor  # of all values after the update
    counts: Sequence[int | Tensor]  # of the changed values of each group


class Arriving:
    """The tensors of a message, with their digests on the device. The digests are computed on the current stream.

    Args:
        tensors: of the message, or of an announcement: by name, on the device of the mask.
        changes: of each group of the layout, with these tensors.
    """

    def __init__(self, mask: ReceiverMask, tensors: Mapping[str, Tensor], changes: Sequence[Change]) -> None:
        self.mask, self.tensors, self.changes = mask, tensors, changes
        self._valid: Tensor | None = None  # [1] bool, on the device
        self._keeps_old = False
        # For each group with changes the digest of its values, or what `ReferenceChanges.sums` returns.
        self._sums = []
        for group, change in zip(mask.layout.groups, changes, strict=True):
            if change.values is not None:
                self._sums.append(mask.backend.digest_sum(change.values, group.first))
            elif change.changes is not None:
                self._sums.append(change.changes.sums(read_old=mask.is_whole))
        self._found: HostCopy | None = None

    def copy_sums(self) -> HostCopy:
        """Begin to copy the sums to the host; once only. After `write`, with `valid` at the end."""
        if self._found is None:
            self._found = HostCopy(self._sums if self._valid is None else [*self._sums, self._valid.long()])
        return self._found

    def write(self, expected: Expected, before: Sequence[int], *, keep_old: bool = False) -> None:
        """Write the values, if the digests are those expected. The host does not wait.

        Args:
            before: digest of each group before the update, if the receiver is whole.
            keep_old: keep the values that are replaced in the place of the new ones, for `undo`.
        """
        self._valid, self._keeps_old = self._is(expected, before), keep_old
        self.copy_sums()  # before the writes, so that the host need not wait for these
        for index, change in zip(self.mask.indices, self.changes, strict=True):
            if change.values is not None:
                index.put(change.values, self._valid, keep_old=keep_old)
            elif change.changes is not None:
                change.changes.write(self._valid, keep_old=keep_old)

    def undo(self) -> None:
        """Bring back the values that `write` has replaced, if it has."""
        if self._keeps_old:
            self._keeps_old = False
            with torch.inference_mode():
                for index, change in zip(self.mask.indices, self.changes, strict=True):
                    if change.values is not None:
                        index.put(change.values, self._valid)
                    elif change.changes is not None:
                        change.changes.write(self._valid)

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are the tensors, with as many changed values or fewer, or none of a dtype."""
        mine = self.tensors
        same = all(
            n in mine and t.data_ptr() == mine[n].data_ptr() and len(t) <= len(mine[n]) for n, t in tensors.items()
        )
        return same and all(name in tensors for name in mine if name.endswith(".values"))

    def _is(self, expected: Expected, before: Sequence[int]) -> Tensor:
        """Return [1] bool on the device: whether digests and numbers of changes are those expected."""
        sums = iter(self._sums)
        sent: list[Tensor] = []
        difference = 0  # of the result and what was sent, as far as the host knows it
        replaced: list[Tensor] = []
        checks: list[Tensor] = []
        for i, (change, count) in enumerate(zip(self.changes, expected.counts, strict=True)):
            if change.values is not None:
                sent.append(next(sums))
                continue
            difference += before[i] if self.mask.is_whole else 0
            if change.changes is not None:
                payload, old, marked = next(sums)
                sent.append(payload)
                replaced.append(old)
                checks.append(marked == count)
                if isinstance(count, Tensor):  # there may be more changes than were announced
                    checks.append(marked <= change.changed)
        if not sent:
            return torch.ones(1, dtype=torch.bool, device=self.mask.device)
        payload = sum(sent[1:], start=sent[0])
        checks.append(payload == expected.payload)
        if self.mask.is_whole or all(change.values is not None for change in self.changes):
            result = sum((-old for old in replaced), start=payload) + signed(difference)
            checks.append(result == expected.result)
        return torch.stack(checks).all().view(1) if len(checks) > 1 else checks[0].view(1)


def change_of(tensors: Mapping[str, Tensor], kind: str, group: Group, index: Index, device: torch.device) -> Change:
    """Return what a message of a kind carries for a group. Raises DamagedMessage."""
    values, bitmap, changed = (tensors.get(f"{group.dtype}.{name}") for name in ("values", "bitmap", "changed"))
    if values is not None:
        _check(f"{group.dtype}.values", values, group.torch_dtype, group.nnz)
        if bitmap is not None or changed is not None:
            raise DamagedMessage(f"the message has both {group.dtype}.values and changed values")
        return Change(values.to(device, non_blocking=True))
    if kind == "state":
        raise DamagedMessage(f"the state message has no {group.dtype}.values")
    if bitmap is None and changed is None:
        return Change()
    if bitmap is None or changed is None:
        raise DamagedMessage(f"the message has only one of {group.dtype}.bitmap and {group.dtype}.changed")
    _check(f"{group.dtype}.bitmap", bitmap, torch.uint8, bitmap_bytes(group.nnz))
    _check(f"{group.dtype}.changed", changed, group.torch_dtype, changed.numel())
    found = index.changes(bitmap.to(device, non_blocking=True), changed.to(device, non_blocking=True))
    return Change(None, found, changed.numel())


def refuse_others(tensors: Mapping[str, Tensor], kind: str, layout: Layout) -> None:
    """Raise DamagedMessage if a message has tensors that the mask does not have."""
    kinds = ("values",) if kind == "state" else ("values", "bitmap", "changed")
    known = {f"{group.dtype}.{kind}" for group in layout.groups for kind in kinds}
    if others := sorted(set(tensors) - known):
        raise DamagedMessage(f"the {kind} message has the tensor {others[0]!r}, which the mask does not have")


def _check(name: str, tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != (numel,) or not tensor.is_contiguous():
        raise DamagedMessage(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {[numel]}")
