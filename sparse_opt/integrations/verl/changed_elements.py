"""ChangeReader: turns the messages of a `WeightSender` into positions and values, for an engine that writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import DamagedMessage, ForeignMessage, OutOfOrderMessage
from ...masks.patterns import expand_units
from ...weight_sync import Message
from ...weight_sync.digest import mix, to_hex, zero_extended
from ...weight_sync.layout import Group, Layout
from ...weight_sync.positions import checked_mask


class Change(NamedTuple):
    """The changed elements of a tensor: positions [n] int32 in the flattened tensor, and their values [n]."""

    name: str
    shape: tuple[int, ...]
    positions: Tensor
    values: Tensor


def state_after(message: Message) -> str:
    """Return a name of the weights that a message leads to; equal only if an update of one applies to the other."""
    return f"{message.version}:{message.mask_digest}:{message.result_digest}"


class ChangeReader:
    """Verifies messages, and lists the elements that they change. Keeps the positions, and no weights.

    verl's rollout worker has no access to the weights: it hands changes to the inference engine, in another process.
    As a `WeightReceiver` of a part of the weights, this verifies what a message carries and the order of the messages,
    and not the weights that result.

    Args:
        device: of the positions and values.

    Attributes:
        state: `state_after` of the last message; None before the first mask message.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.state: str | None = None
        self._version: int | None = None
        self._digest: str | None = None
        self._mask_digest: str | None = None
        self._layout = Layout("element", ())
        self._positions: dict[str, Tensor] = {}

    def start(self, message: Message) -> None:
        """Take the positions of a mask message. The engine must be given all weights of its version.

        Raises:
            DamagedMessage: positions or digests are wrong.
            ForeignMessage: a tensor has 2^31 elements or more.
        """
        if message.kind != "mask":
            raise OutOfOrderMessage(f"a message of kind {message.kind} came before the mask")
        self.state = self._version = None
        layout, units = checked_mask(message)
        shapes = {entry.name: entry for entry in layout.tensors}
        self._positions = {}
        for name, given in units.items():
            if shapes[name].positions_dtype != torch.int32:
                raise ForeignMessage(f"{name!r} is {list(shapes[name].shape)}, expected fewer than 2^31 elements")
            positions = expand_units(given.to(self._device, torch.int64), shapes[name].shape, layout.pattern)
            self._positions[name] = positions.to(torch.int32)
        self._layout, self._mask_digest = layout, message.mask_digest
        self._follow(message)

    def changes(self, message: Message) -> list[Change]:
        """Verify an update, and return what it changes. Without changes in a tensor it is not listed.

        Raises:
            OutOfOrderMessage: the update does not follow the last message.
            ForeignMessage: it is for another mask.
            DamagedMessage: values and digests do not agree.
        """
        if message.kind != "update" or self._version is None or message.base_version != self._version:
            held = "no version" if self._version is None else f"version {self._version}"
            raise OutOfOrderMessage(
                f"a message of kind {message.kind} leads from version {message.base_version} to {message.version}, the "
                f"rollout has {held}"
            )
        if message.mask_digest != self._mask_digest:
            raise ForeignMessage(f"the update is for the mask {message.mask_digest}, not {self._mask_digest}")
        if message.base_digest != self._digest:
            raise OutOfOrderMessage(
                f"the update is for weights with digest {message.base_digest}, the rollout has {self._digest}"
            )
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        found: list[Change] = []
        for group in self._layout.groups:
            sent = self._sent(message, group)
            if sent is not None:
                numbers, values = sent
                total += mix(numbers + group.first, zero_extended(values)).sum()
                found += self._by_tensor(group, numbers, values)
        if to_hex(int(total)) != message.payload_digest:
            raise DamagedMessage(f"the values have digest {to_hex(int(total))}, expected {message.payload_digest}")
        self._follow(message)
        return found

    def _follow(self, message: Message) -> None:
        self._version, self._digest = message.version, message.result_digest
        self.state = state_after(message)

    def _sent(self, message: Message, group: Group) -> tuple[Tensor, Tensor] | None:
        """Return the ascending numbers in the group of the elements that an update carries, and their values."""
        kinds = ("values", "bitmap", "changed")
        values, bitmap, changed = (message.tensors.get(f"{group.dtype}.{kind}") for kind in kinds)
        if values is not None:
            if values.dtype != group.torch_dtype or values.shape != (group.nnz,):
                raise DamagedMessage(f"{group.dtype}.values is {values.dtype} {list(values.shape)}, not [{group.nnz}]")
            return torch.arange(group.nnz, device=self._device), values.to(self._device)
        if bitmap is None or changed is None:
            return None
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        numbers = ((bitmap.to(self._device)[:, None] >> shifts) & 1).view(-1).nonzero().view(-1)
        if changed.dtype != group.torch_dtype or numbers.shape != changed.shape or bool((numbers >= group.nnz).any()):
            raise DamagedMessage(
                f"{group.dtype}.bitmap marks {numbers.numel()} of {group.nnz} elements, {group.dtype}.changed has "
                f"{changed.dtype} {list(changed.shape)}"
            )
        return numbers, changed.to(self._device)

    def _by_tensor(self, group: Group, numbers: Tensor, values: Tensor) -> Iterator[Change]:
        ends = torch.searchsorted(numbers, torch.tensor(group.starts, dtype=torch.int64, device=self._device)).tolist()
        for i, index in enumerate(group.members):
            part = slice(ends[i], ends[i + 1])
            if part.start < part.stop:
                entry = self._layout.tensors[index]
                positions = self._positions[entry.name][numbers[part] - group.starts[i]]
                yield Change(entry.name, entry.shape, positions, values[part])
