"""WeightSender: makes the messages that bring the active weights of a trainer to receivers."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..masks import MaskSet
from .active_values import ActiveValues, Source, WeightsOf
from .backend import Backend
from .destinations import Parts
from .digest import digest_sum, to_hex
from .host_copy import HostCopy
from .message import TOTALS, Entry, Message
from .positions import units_of
from .reference import bitmap_bytes, only_parts

Encoding = Literal["auto", "values", "bitmap"]

_LAST_COUNTS = 4  # updates whose changes are counted


class Announcement(NamedTuple):
    """Tensors of an update for which receivers prepare before its message."""

    tensors: list[Entry]  # bitmaps, or all values and the totals
    capacity: dict[str, int]  # by dtype: how many changed values to expect; if there are more, they are looked up again

    @property
    def has_values(self) -> bool:
        return any(name == TOTALS for name, _, _ in self.tensors)


def _is_smaller(encoding: Encoding, count: int, size: int, nnz: int) -> bool:
    """Whether an encoding sends `count` changed values of nnz with a bitmap, if they have `size` bytes."""
    return encoding == "bitmap" or (encoding == "auto" and count * size + bitmap_bytes(nnz) < nnz * size)


class WeightSender:
    """Makes messages for `WeightReceiver`s: the mask, the active values, and updates of them.

    Its version is 0 when it is built, with the weights of that moment; every `update` raises it by one. Besides the
    mask it keeps the active values that it sent last, nnz elements.

    Args:
        source: an optimizer, with its mask and parameters, or a module or its parameters by name, with `mask`. Of an
            optimizer with `compact_weights` the sender reads those, and not the model.
        mask: the active elements; None for an optimizer, whose mask is used.
        encoding: "values" sends all active values in every update, "bitmap" a bitmap and the changed values, "auto"
            whichever is smaller, for each dtype.
        backend: "reference" (plain torch), "triton", or None for the fastest on the device of the weights.

    Raises:
        ValueError: an argument does not fit the others, or a weight cannot be sent; names it.
        MaskError: the mask does not fit the weights.
    """

    def __init__(
        self,
        source: Source,
        mask: MaskSet | None = None,
        *,
        encoding: Encoding = "auto",
        backend: str | None = None,
    ) -> None:
        self._start(WeightsOf(source, mask, backend), encoding)

    @classmethod
    def of_values(cls, values: ActiveValues, *, encoding: Encoding = "auto") -> WeightSender:
        """Build a sender whose active values are read by `values`, from weights that are elsewhere or in parts."""
        sender = cls.__new__(cls)
        sender._start(values, encoding)
        return sender

    def _start(self, values: ActiveValues, encoding: Encoding) -> None:
        if encoding not in get_args(Encoding):
            raise ValueError(f"encoding is {encoding!r}, expected one of {', '.join(get_args(Encoding))}")
        self._values, self._encoding = values, encoding
        self._mask, self._layout, self._device, self._backend = (
            values.mask,
            values.layout,
            values.device,
            values.backend,
        )
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._counts: dict[str, deque[int]] = {}  # of each dtype: how many values the last updates have changed
        sent, gathered = self._take()
        self._sent = _Sent(0, sent, _Totals(self._digests_of(sent, gathered), sent))

    @property
    def version(self) -> int:
        """The version of the weights that the last update has sent."""
        return self._sent.version

    @property
    def mask(self) -> MaskSet:
        return self._mask

    @property
    def device(self) -> torch.device:
        """Device of the active values, and of the tensors of updates and states."""
        return self._device

    def announcement(self) -> Announcement | None:
        """Return the tensors of the next update whose sizes are known: all values, or the bitmaps.

        With the encoding "values" they are all tensors of the message, and `PendingMessage.totals`. Otherwise they are
        the bitmaps of the dtypes that had one in the last update; the next message may have others. None if there was
        no bitmap.
        """
        groups = self._layout.groups
        if self._encoding == "values":
            values = [(f"{group.dtype}.values", group.dtype, [group.nnz]) for group in groups]
            return Announcement([*values, (TOTALS, "int64", [len(groups)])], {})
        bitmaps, capacity = list[Entry](), dict[str, int]()
        for group in groups:
            counts = self._counts.get(group.dtype)
            if counts and counts[-1] and _is_smaller(self._encoding, counts[-1], group.torch_dtype.itemsize, group.nnz):
                bitmaps.append((f"{group.dtype}.bitmap", "uint8", [bitmap_bytes(group.nnz)]))
                capacity[group.dtype] = max(counts) + max(counts) // 4
        return Announcement(bitmaps, capacity) if bitmaps else None

    def mask_message(self) -> Message:
        """Return the message that every receiver needs first: the positions, and the digest of the current version."""
        sent = self._sent
        tensors = {
            f"positions.{i}": units_of(self._mask, entry) for i, entry in enumerate(self._layout.tensors) if entry.nnz
        }
        total, count = 0, 0
        for units in tensors.values():
            total += int(digest_sum(units, count))
            count += units.numel()
        return Message(
            kind="mask",
            version=sent.version,
            mask_digest=self._mask.digest,
            result_digest=sent.totals.digest,
            payload_digest=to_hex(total),
            tensors=tensors,
            layout=self._layout.to_json(),
        )

    def state_message(self) -> Message:
        """Return all active values of the current version, for receivers that join late or have lost an update."""
        sent = self._sent
        digest = sent.totals.digest  # the host has waited for the values then
        if self._device.type == "cuda":
            for values in sent.values.values():
                values.record_stream(torch.cuda.current_stream(self._device))
        tensors = {f"{dtype}.values": values for dtype, values in sent.values.items()}
        return Message("state", sent.version, self._mask.digest, digest, digest, tensors)

    @torch.no_grad()
    def update(self) -> PendingMessage:
        """Gather the active weights as they are now, and return the message that brings receivers to them.

        The gather runs on the current stream, and the host does not wait: call `wait` on the result before you use it.
        What else the message needs is computed on a side stream: the comparison with the values sent last and the
        digests directly after the gather, or, with the encoding "values", the digests in `wait`.

        Raises:
            WeightSyncError: the optimizer's mask was replaced, or the model holds its base weights.
        """
        base, (new, gathered) = self._sent, self._take()
        changes: dict[str, tuple[Tensor, Tensor]] = {}
        if self._encoding == "values":
            totals = _Totals(self._digests_of(new, gathered), new)
        else:
            with _aside(self._stream, gathered, [*new.values(), *base.values.values()]):
                found = []
                for dtype, values in new.items():
                    # On a GPU before the number of changes is known: few are usual, and the host then waits once.
                    capacity = 0 if self._stream is None else -(-values.numel() // 8)
                    old = base.values[dtype]
                    bitmap, of_dtype, changed = self._backend.compare(old, values, self._first(dtype), capacity)
                    changes[dtype] = bitmap, changed
                    found.append(of_dtype)
                totals = _Totals(HostCopy(found), new, per_dtype=3)
        self._sent = sent = _Sent(base.version + 1, new, totals)
        return PendingMessage(
            sent,
            base.totals,
            changes,
            mask_digest=self._mask.digest,
            encoding=self._encoding,
            backend=self._backend,
            stream=self._stream,
            gathered=gathered,
            counts=self._counts,
        )

    @torch.no_grad()
    def digest_of(self, parts: Parts) -> str:
        """Return the digest of the current version with 0 in place of the elements outside of some parts.

        `WeightReceiver.verify` compares it with the weights of a receiver that has only these parts. Takes as much
        memory as the active values, and waits for the device.

        Args:
            parts: of `WeightReceiver.parts`.

        Raises:
            ValueError: the mask has no weight of a name, or a part is not four numbers; names it.
        """
        sent, entries = self._sent, {entry.name: entry for entry in self._layout.tensors if entry.nnz}
        for name, ranges in parts.items():
            if name not in entries:
                raise ValueError(f"the parts have {name!r}, which has no active elements")
            for part in ranges:
                if len(part) != 4 or not all(type(n) is int for n in part):
                    raise ValueError(f"a part of {name!r} is {part}, expected the numbers r0, r1, c0, c1")
        units = {name: units_of(self._mask, entries[name]) for name in parts}
        total = 0
        for group in self._layout.groups:
            of_group = [self._layout.tensors[i] for i in group.members]
            values = sent.values[group.dtype]
            if any(entry.name in parts for entry in of_group):
                values = only_parts(values, group, of_group, self._layout.pattern, units, parts)
            total += int(self._backend.digest_sum(values, group.first))
        return to_hex(total)

    def _first(self, dtype: str) -> int:
        return next(group.first for group in self._layout.groups if group.dtype == dtype)

    def _take(self) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Gather the active values on the current stream; with an event that follows them on a GPU."""
        values = self._values.take()
        return values, None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def _digests_of(self, values: Mapping[str, Tensor], gathered: torch.cuda.Event | None) -> Callable[[], HostCopy]:
        """Return a function that begins to compute the digests of all active values, and does not keep this sender."""
        numbered = [(group, self._first(dtype)) for dtype, group in values.items()]
        stream, digest_sum = self._stream, self._backend.digest_sum

        def begin() -> HostCopy:
            with torch.no_grad(), _aside(stream, gathered, [group for group, _ in numbered]):
                return HostCopy([digest_sum(group, first) for group, first in numbered], start=False)

        return begin


@contextlib.contextmanager
def _aside(
    stream: torch.cuda.Stream | None, gathered: torch.cuda.Event | None, values: Sequence[Tensor]
) -> Iterator[None]:
    """Run the body on a side stream, after the values are gathered. On a CPU, run it directly."""
    if stream is None or gathered is None:
        yield
        return
    stream.wait_event(gathered)
    for tensor in values:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


class _Totals:
    """Digests and counts of one version, on their way to the host.

    Args:
        totals: for each dtype the digest, or with `per_dtype` 3 what `reference.compare` returns; or a function that
            begins to compute the digests, and is called when they are needed.
        values: all active values by dtype.
    """

    def __init__(
        self, totals: HostCopy | Callable[[], HostCopy], values: Mapping[str, Tensor], *, per_dtype: Literal[1, 3] = 1
    ) -> None:
        self._totals, self._per_dtype = totals, per_dtype
        self._sizes = [v.numel() for v in values.values()]
        self._lock = threading.Lock()

    def begin(self) -> HostCopy:
        """Begin to compute the digests, unless that was done."""
        with self._lock:
            if not isinstance(self._totals, HostCopy):
                self._totals = self._totals()
            return self._totals

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """(digest, digest of the changed elements, their number) of each dtype; waits for the device."""
        numbers = iter(self.begin().numbers)
        found = []
        for numel in self._sizes:
            digest = next(numbers)
            found.append((digest, digest, numel) if self._per_dtype == 1 else (digest, next(numbers), next(numbers)))
        return found

    @cached_property
    def digest(self) -> str:
        return to_hex(sum(digest for digest, _, _ in self.rows))


class _Sent(NamedTuple):
    """A version that was sent: the active values of each dtype, and their digests. Replaced as a whole, for threads."""

    version: int
    values: Mapping[str, Tensor]
    totals: _Totals


class PendingMessage:
    """An update that may still be computed on the device: `wait` returns the `Message`."""

    def __init__(
        self,
        sent: _Sent,
        base: _Totals,
        changes: Mapping[str, tuple[Tensor, Tensor]],
        *,
        mask_digest: str,
        encoding: Encoding,
        backend: Backend,
        stream: torch.cuda.Stream | None,
        gathered: torch.cuda.Event | None,
        counts: dict[str, deque[int]],
    ) -> None:
        self.version = sent.version
        self._sent, self._base, self._changes = sent, base, changes
        self._mask_digest, self._encoding, self._backend, self._stream = mask_digest, encoding, backend, stream
        self._bitmaps = {f"{dtype}.bitmap": bitmap for dtype, (bitmap, _) in changes.items()}
        # The values are complete; with another encoding than "values" their bitmaps and changed values, too.
        self._complete = gathered if encoding == "values" else sent.totals.begin().computed
        self._counts = counts  # of the sender
        self._message: Message | None = None
        self._ready: torch.cuda.Event | None = None  # the tensors of the message are complete
        self._lock = threading.Lock()

    def wait(self) -> Message:
        """Wait for the device, and return the message; the same one every time. May be called from any thread.

        The host waits until the digests are known. The message's tensors can then be used on the stream that is current
        in the calling thread, which waits for their last copies.
        """
        with self._lock:
            message = self._message or self._made()
            self._usable(message.tensors, self._ready)
            return message

    def announced(self, announcement: Announcement) -> dict[str, Tensor]:
        """Return the tensors of an announcement without the totals; the host does not wait for them.

        They can be used on the stream that is current in the calling thread, which may be any.

        Args:
            announcement: of the sender, for this update.
        """
        with self._lock:
            tensors = {f"{dtype}.values": values for dtype, values in self._sent.values.items()}
            tensors |= self._bitmaps | ({} if self._message is None else self._message.tensors)
            names = [name for name, _, _ in announcement.tensors if name != TOTALS]
            return self._usable({name: tensors[name] for name in names}, self._ready or self._complete)

    def totals(self) -> Tensor:
        """Return the digest of all values of each dtype, [dtypes] int64, which the host does not wait for.

        They can be used on the stream that is current in the calling thread. Only with the encoding "values".
        """
        copy = self._sent.totals.begin()
        return self._usable({TOTALS: copy.source}, copy.computed)[TOTALS]

    def _usable(self, tensors: dict[str, Tensor], ready: torch.cuda.Event | None) -> dict[str, Tensor]:
        """Let the current stream wait until tensors are complete, and return them."""
        if self._stream is not None and ready is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(ready)
            for tensor in tensors.values():
                tensor.record_stream(current)
        return tensors

    def to_bytes(self) -> bytes:
        """`wait`, and return `Message.to_bytes`."""
        return self.wait().to_bytes()

    def _made(self) -> Message:
        side = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with side, torch.no_grad():
            self._message = self._build()
            self._ready = None if self._stream is None else self._stream.record_event()
        self._sent, self._changes = self._sent._replace(values={}), {}  # frees the values that are not in the message
        return self._message

    def _build(self) -> Message:
        tensors: dict[str, Tensor] = {}
        payload = 0
        rows = self._sent.totals.rows
        for (dtype, values), (whole, changed, count) in zip(self._sent.values.items(), rows, strict=True):
            self._counts.setdefault(dtype, deque(maxlen=_LAST_COUNTS)).append(count)
            smaller = _is_smaller(self._encoding, count, values.element_size(), values.numel())
            if self._encoding == "values" or (count and not smaller):
                tensors[f"{dtype}.values"] = values
                payload += whole
            elif count:
                bitmap, found = self._changes[dtype]
                tensors[f"{dtype}.bitmap"] = bitmap
                is_complete = count <= found.numel()
                tensors[f"{dtype}.changed"] = (
                    found[:count] if is_complete else self._backend.select(values, bitmap, count)
                )
                payload += changed
        return Message(
            kind="update",
            version=self.version,
            mask_digest=self._mask_digest,
            result_digest=self._sent.totals.digest,
            payload_digest=to_hex(payload),
            tensors=tensors,
            base_version=self.version - 1,
            base_digest=self._base.digest,
        )
