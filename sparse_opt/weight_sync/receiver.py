"""WeightReceiver: applies the messages of a sender to the weights of an inference engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DamagedMessage, ForeignMessage, WeightSyncError
from ..tensors import HostCopy, named_parameters_of
from .destinations import Destination, first_moved, place, refuse_shared, whole_weight
from .digest import from_hex, numbers_of, to_hex
from .encoding import (
    Group,
    GroupValues,
    Layout,
    Message,
    check_count,
    check_follows,
    check_payload,
    checked_mask,
    values_of,
)
from .index import Backend, Changes, Index, choose
from .sender import PendingMessage

Destinations = Mapping[str, Sequence[Destination]]


class _Mask(NamedTuple):
    """The mask that a receiver follows, and where its active elements are."""

    digest: str
    layout: Layout
    device: torch.device
    backend: Backend
    indices: tuple[Index, ...]  # one for each group of the layout
    is_whole: bool  # every active element is here
    addresses: Mapping[str, int]  # of the weights that are not given as destinations


class _Received(NamedTuple):
    """What a message carries for a group of the layout, on the device, and where it belongs."""

    group: Group
    elements: Index
    part: GroupValues
    changes: Changes | None  # of the part's bitmap


class WeightReceiver:
    """Keeps the weights of an inference engine equal to a trainer's, bit for bit, by the messages of a `WeightSender`.

    A message is verified before any weight is written. If it is refused, weights and version stay as they were, and the
    next correct message works. Not thread-safe; the weights must not be used while `receive` runs.

    Args:
        weights: a module or its parameters by name, whole tensors with the sender's names, shapes and dtypes. Several
            names of one tensor are fine.
        destinations: for names that are not whole tensors of `weights`: where their parts are. They take precedence
            over `weights`; an empty list means that this receiver has no part of the weight. Or a function that returns
            them for the layout of a mask message.
        backend: "reference" (plain torch), "triton", or None for the fastest on the device of the weights.

    Attributes:
        version: the sender's version of the weights. None: a state message is needed.
        digest: of all active weights at this version, as the sender stated it; None without a version.
    """

    def __init__(
        self,
        weights: nn.Module | Mapping[str, Tensor] | None,
        *,
        destinations: Destinations | Callable[[Layout], Destinations] | None = None,
        backend: str | None = None,
    ) -> None:
        self._weights: nn.Module | Mapping[str, Tensor] = {} if weights is None else weights
        self._destinations = destinations or {}
        self._backend = backend
        self._mask: _Mask | None = None
        self.version: int | None = None
        self.digest: str | None = None
        self._sums: list[int] = []  # the digest of each group, if the receiver is whole

    @property
    def mask_digest(self) -> str | None:
        """`MaskSet.digest` of the mask; None before the first mask message."""
        return None if self._mask is None else self._mask.digest

    @property
    def is_whole(self) -> bool:
        """Whether the receiver has every active weight, so that digests of the results can be verified.

        A receiver of a part, as under tensor parallelism, verifies what it receives and the order of the updates.
        """
        return self._mask is not None and self._mask.is_whole

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of memory held between updates, by purpose."""
        total: dict[str, int] = {}
        for index in () if self._mask is None else self._mask.indices:
            for purpose, size in index.nbytes().items():
                total[purpose] = total.get(purpose, 0) + size
        return total

    @torch.inference_mode()  # weights that an engine has loaded in inference mode can only be written in it
    def receive(self, message: Message | PendingMessage | bytes | bytearray | memoryview) -> int | None:
        """Verify a message and apply it; waits for the device once for a state or an update.

        The writes follow the verification on the current stream, and may not have ended when this returns.

        Args:
            message: its tensors may be on any device; those of values are copied to the device of the weights.

        Returns:
            The version of the weights now. None after a mask message if the weights are not those that the sender had
            at the message's version; send a state message then.

        Raises:
            DamagedMessage: bytes, digests or sizes do not agree.
            OutOfOrderMessage: an update does not follow the version of this receiver.
            ForeignMessage: the message is for another mask, or this receiver lacks a weight of the mask.
        """
        message = message.wait() if isinstance(message, Message | PendingMessage) else Message.from_bytes(message)
        if message.kind == "mask":
            self._receive_mask(message)
        else:
            self._receive_values(message)
        return self.version

    @torch.inference_mode()
    def verify(self) -> None:
        """Read all active weights, and compare their digest with that of this version. Waits for the device.

        An update compares only the weights that a bitmap marks, so that it does not notice others that were changed.

        Raises:
            WeightSyncError: the weights differ, or were replaced; there is no version yet; or the receiver has only
                parts of the weights.
        """
        mask = self._mask
        if mask is None or self.version is None:
            raise WeightSyncError("the weights cannot be verified: the receiver has no version")
        if not mask.is_whole:
            raise WeightSyncError(
                "the weights cannot be verified: the receiver has only parts of them, and messages have the digest of "
                "all active weights"
            )
        self._require_in_place(mask)
        found = to_hex(sum(_sums_of_weights(mask)))
        if found != self.digest:
            raise WeightSyncError(
                f"the active weights have digest {found}, expected {self.digest} at version {self.version}: they were "
                "changed by others"
            )

    def _receive_mask(self, message: Message) -> None:
        layout, units = checked_mask(message)
        held = self._mask
        known = held is not None and held.digest == message.mask_digest and self.digest == message.result_digest
        mask = self._build(message.mask_digest, layout, units)
        sums: list[int] = []
        if mask.is_whole:
            sums = _sums_of_weights(mask)
            known = to_hex(sum(sums)) == message.result_digest
        self._mask, self._sums = mask, sums
        self.version, self.digest = (message.version, message.result_digest) if known else (None, None)

    def _build(self, digest: str, layout: Layout, units: Mapping[str, Tensor]) -> _Mask:
        given = self._destinations(layout) if callable(self._destinations) else self._destinations
        destinations = {name: list(parts) for name, parts in given.items()}
        in_weights: list[str] = []
        weights = named_parameters_of(self._weights)
        for entry in layout.tensors:
            weight = weights.get(entry.name)
            if entry.nnz and entry.name not in destinations and weight is not None:
                if tuple(weight.shape) != entry.shape:
                    raise ForeignMessage(
                        f"{entry.name!r} is {list(weight.shape)} here, {list(entry.shape)} in the message"
                    )
                destinations[entry.name] = [whole_weight(entry.name, weight)]
                in_weights.append(entry.name)
        placed = place(layout, destinations)
        refuse_shared(placed)
        tensors = [part.tensor for tensor in placed.values() for part in tensor.destinations]
        # The mask is empty.
        tensors = tensors or [part.tensor for parts in destinations.values() for part in parts] or [*weights.values()]
        device = tensors[0].device if tensors else torch.device("cpu")
        backend = choose(device, self._backend)
        indices = backend.build_indices(layout, units, placed, device)
        is_whole = all(tensor.is_whole for tensor in placed.values())
        for index in indices:  # now, and not in the first update, for which requests wait
            index.warm_up(read_old=is_whole)
        addresses = {name: weights[name].data_ptr() for name in in_weights}
        return _Mask(digest, layout, device, backend, indices, is_whole, addresses)

    def _receive_values(self, message: Message) -> None:
        mask = self._mask
        check_follows(message, None if mask is None else mask.digest, self.version, self.digest)
        assert mask is not None
        received, results = [], []
        parts = [part.to(mask.device) for part in values_of(message, mask.layout)]
        for group, index, part in zip(mask.layout.groups, mask.indices, parts, strict=True):
            changes = None
            if part.values is not None:
                results.append(mask.backend.digest_sum(part.values, group.first))
            elif part.bitmap is not None and part.changed is not None:
                changes = index.changes(part.bitmap, part.changed.numel())
                results.append(changes.sums(part.changed, read_old=mask.is_whole))
            received.append(_Received(group, index, part, changes))
        found = HostCopy(results)
        self._require_in_place(mask)  # while the device computes the digests
        # All values are compared on the device, which then need not wait for the host between digest and writes.
        valid = _all_valid(message, received, results)
        if valid is not None:
            _write(received, valid)
        sums = self._verify(mask, message, received, numbers_of(found))
        if valid is None:
            _write(received)
        self.version, self.digest, self._sums = message.version, message.result_digest, sums

    def _require_in_place(self, mask: _Mask) -> None:
        if (name := first_moved(self._weights, mask.addresses)) is not None:
            raise WeightSyncError(f"{name!r} was replaced since the mask message: a mask message is needed")

    def _verify(self, mask: _Mask, message: Message, received: list[_Received], results: list[int]) -> list[int]:
        """Return the new digest of each group, as far as it is known. Raises DamagedMessage.

        Args:
            results: for each group in order, the digest of its values, or what `ReferenceChanges.sums` returns.
        """
        found = iter(results)
        sent, sums = 0, list(self._sums)
        for i, (group, _, part, _) in enumerate(received):
            if part.values is not None:
                total = next(found)
                sent += total
                if mask.is_whole:
                    sums[i] = total
            elif part.changed is not None:
                payload, old, marked = next(found), next(found), next(found)
                check_count(group, marked, part.changed)
                sent += payload
                if mask.is_whole:
                    sums[i] += payload - old
        check_payload(message, sent)
        complete = all(r.part.values is not None for r in received)
        result = sum(sums) if mask.is_whole else sent
        if (mask.is_whole or complete) and to_hex(result) != message.result_digest:
            raise DamagedMessage(
                f"the weights of version {message.version} would have digest {to_hex(result)}, expected "
                f"{message.result_digest}"
            )
        return sums


def _sums_of_weights(mask: _Mask) -> list[int]:
    """Return the digest of each group of the weights as they are now. Waits for the device."""
    pairs = zip(mask.layout.groups, mask.indices, strict=True)
    return numbers_of(HostCopy([mask.backend.digest_sum(index.take(), group.first) for group, index in pairs]))


def _all_valid(message: Message, received: Sequence[_Received], results: Sequence[Tensor]) -> Tensor | None:
    """Return [1] bool on the device: whether all values have the digest of the message and of the weights after it.

    None: the message does not bring all values, or is to be refused whatever their digest.
    """
    expected = message.payload_digest
    if not results or expected != message.result_digest or any(r.part.values is None for r in received):
        return None
    number = from_hex(expected)
    if number is None:
        return None
    total = results[0] if len(results) == 1 else torch.stack(list(results)).sum()
    return total.view(1) == number


def _write(received: Sequence[_Received], valid: Tensor | None = None) -> None:
    """Write what a message carries; its values only if `valid` is not a False [1] on the device."""
    for _, elements, part, changes in received:
        if part.values is not None:
            elements.put(part.values, valid)
        elif changes is not None and part.changed is not None:
            changes.write(part.changed)
