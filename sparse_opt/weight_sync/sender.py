"""WeightSender: makes the messages that bring the active weights of a trainer to receivers."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from .. import quantised_layers
from ..errors import WeightSyncError
from ..masks import MaskSet
from ..optim import SparseOptimizer
from ..tensors import HostCopy, holds_base_weights, is_wrapper, named_parameters_of
from .destinations import place, whole_weight
from .digest import numbers_of, to_hex
from .encoding import Encoding, GroupValues, Layout, Message, mask_tensors, sends_all, units_of
from .index import Backend, Index, choose

Source = SparseOptimizer | nn.Module | Mapping[str, Tensor]
T = TypeVar("T")


class WeightSender:
    """Makes messages for `WeightReceiver`s: the mask, the active values, and updates of them.

    Its version is 0 when it is built, with the weights of that moment; every `update` raises it by one. Besides the
    mask it keeps the active values that it sent last, nnz elements.

    Args:
        source: an optimizer, with its mask and parameters, or a module or its parameters by name, with `mask`. Of an
            optimizer with `compact_weights` the sender reads those, and not the model. Or the values themselves, whose
            mask, backend and dtype are used.
        mask: the active elements; None for an optimizer, whose mask is used.
        encoding: "values" sends all active values in every update, "bitmap" a bitmap and the changed values, "auto"
            whichever is smaller, for each dtype.
        backend: "reference" (plain torch), "triton", or None for the fastest on the device of the weights.
        dtype: of the values that are sent and compared, as bfloat16 for an engine that has weights of fp32 in it; None
            for that of each weight.

    Attributes:
        mask: the active elements.
        device: of the active values, and of the tensors of updates and states.

    Raises:
        ValueError: an argument does not fit the others, or a weight cannot be sent; names it.
        MaskError: the mask does not fit the weights.
    """

    def __init__(
        self,
        source: Source | ActiveValues,
        mask: MaskSet | None = None,
        *,
        encoding: Encoding = "auto",
        backend: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if encoding not in get_args(Encoding):
            raise ValueError(f"encoding is {encoding!r}, expected one of {', '.join(get_args(Encoding))}")
        values = source if isinstance(source, ActiveValues) else WeightsOf(source, mask, backend, dtype)
        self._values, self._encoding = values, encoding
        self.mask, self.device, self._layout = values.mask, values.device, values.layout
        self._backend = values.backend
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        sent, gathered = self._take()
        with torch.no_grad():
            for group in self._layout.groups:  # Triton compiles its kernels now, and not in the first update
                first = sent[group.dtype][:1]
                bitmap, _, _ = self._backend.compare(first, first, group.first, 1)
                self._backend.select(first, bitmap, 1)
        self._sent = _Sent(0, sent, _Totals(self._digests_of(sent, gathered), sent))

    @property
    def sender(self) -> WeightSender:
        """This sender. A `DistributedWeightSender` has one on rank 0 only."""
        return self

    def on_rank_0(self, function: Callable[[], T]) -> T | None:
        """Call a function and return its result, as `DistributedWeightSender` does on rank 0 only."""
        return function()

    @property
    def version(self) -> int:
        """The version of the weights that the last update has sent."""
        return self._sent.version

    def mask_message(self) -> Message:
        """Return the message that every receiver needs first: the positions, and the digest of the current version."""
        sent = self._sent
        tensors, payload = mask_tensors(self.mask, self._layout)
        return Message(
            kind="mask",
            version=sent.version,
            mask_digest=self.mask.digest,
            result_digest=sent.totals.digest,
            payload_digest=payload,
            tensors=tensors,
            layout=self._layout.to_json(),
        )

    def state_message(self) -> Message:
        """Return all active values of the current version, for receivers that join late or have lost an update."""
        sent = self._sent
        digest = sent.totals.digest  # the host has waited for the values then
        if self.device.type == "cuda":
            for values in sent.values.values():
                values.record_stream(torch.cuda.current_stream(self.device))
        tensors = {
            name: tensor for dtype, of in sent.values.items() for name, tensor in GroupValues(of).tensors(dtype).items()
        }
        return Message("state", sent.version, self.mask.digest, digest, digest, tensors)

    @torch.no_grad()
    def update(self) -> PendingMessage:
        """Gather the active weights as they are now, and return the message that brings receivers to them.

        The gather runs on the current stream, and the host does not wait: call `wait` on the result before you use it.
        What else the message needs is computed on a side stream after the gather: the digests and, unless the encoding
        is "values", the comparison with the values sent last.

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
                for group in self._layout.groups:
                    values, old = new[group.dtype], base.values[group.dtype]
                    # On a GPU before the number of changes is known: few are usual, and the host then waits once.
                    capacity = 0 if self._stream is None else -(-values.numel() // 8)
                    bitmap, of_dtype, changed = self._backend.compare(old, values, group.first, capacity)
                    changes[group.dtype] = bitmap, changed
                    found.append(of_dtype)
                totals = _Totals(HostCopy(found), new)
        self._sent = sent = _Sent(base.version + 1, new, totals)
        base_totals = base.totals  # the message does not keep the values of its base
        return PendingMessage(sent.version, self._stream, lambda: self._message(sent, base_totals, changes))

    @torch.no_grad()
    def _message(self, sent: _Sent, base: _Totals, changes: Mapping[str, tuple[Tensor, Tensor]]) -> Message:
        """Return the message of an update; waits for the digests.

        Args:
            changes: by dtype, the bitmap and the first changed values, of `compare`.
        """
        tensors: dict[str, Tensor] = {}
        payload = 0
        for (dtype, values), (whole, changed, count) in zip(sent.values.items(), sent.totals.rows, strict=True):
            if sends_all(self._encoding, values, count):
                part = GroupValues(values)
                payload += whole
            elif count:
                bitmap, first = changes[dtype]
                found = first[:count] if count <= first.numel() else self._backend.select(values, bitmap, count)
                part = GroupValues(None, bitmap, found)
                payload += changed
            else:
                continue
            tensors |= part.tensors(dtype)
        return Message(
            kind="update",
            version=sent.version,
            mask_digest=self.mask.digest,
            result_digest=sent.totals.digest,
            payload_digest=to_hex(payload),
            tensors=tensors,
            base_version=sent.version - 1,
            base_digest=base.digest,
        )

    def _take(self) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Gather the active values on the current stream; with an event that follows them on a GPU."""
        values = self._values.take()
        return values, None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    def _digests_of(self, values: Mapping[str, Tensor], gathered: torch.cuda.Event | None) -> HostCopy:
        """Begin to compute the digests of all active values."""
        with torch.no_grad(), _aside(self._stream, gathered, list(values.values())):
            groups = self._layout.groups
            return HostCopy([self._backend.digest_sum(values[group.dtype], group.first) for group in groups])


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
        totals: for each dtype the digest, or what `index.compare` returns.
        values: all active values by dtype.
    """

    def __init__(self, totals: HostCopy, values: Mapping[str, Tensor]) -> None:
        self._totals, self._sizes = totals, [v.numel() for v in values.values()]

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """(digest, digest of the changed elements, their number) of each dtype; waits for the device."""
        numbers = numbers_of(self._totals)
        if len(numbers) == len(self._sizes):
            return [(digest, digest, numel) for digest, numel in zip(numbers, self._sizes, strict=True)]
        return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]

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

    def __init__(self, version: int, stream: torch.cuda.Stream | None, make: Callable[[], Message]) -> None:
        self.version = version
        self._stream = stream  # on which the message is made
        self._make: Callable[[], Message] | None = make  # until it was called
        self._message: Message | None = None
        self._ready: torch.cuda.Event | None = None  # the tensors of the message are complete
        self._lock = threading.Lock()

    def wait(self) -> Message:
        """Wait for the device, and return the message; the same one every time. May be called from any thread.

        The host waits until the digests are known. The message's tensors can then be used on the stream that is current
        in the calling thread, which waits for their last copies.
        """
        with self._lock:
            if self._message is None:
                assert self._make is not None
                with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    self._message, self._make = self._make(), None
                    self._ready = None if self._stream is None else self._stream.record_event()
            if self._stream is not None and self._ready is not None:
                current = torch.cuda.current_stream(self._stream.device)
                current.wait_event(self._ready)
                for tensor in self._message.tensors.values():
                    tensor.record_stream(current)
            return self._message

    def to_bytes(self) -> bytes:
        """`wait`, and return `Message.to_bytes`."""
        return self.wait().to_bytes()


class ActiveValues(ABC):
    """The active values of some weights, as they are now."""

    mask: MaskSet
    layout: Layout
    device: torch.device
    backend: Backend

    @abstractmethod
    def take(self) -> dict[str, Tensor]:
        """Return the values [nnz] of each dtype of the layout, in new memory on `device`, on the current stream."""


class WeightsOf(ActiveValues):
    """The active values of whole weights on one device.

    Args:
        source, mask, backend, dtype: see `WeightSender`.

    Raises:
        ValueError, MaskError: as `WeightSender`.
    """

    def __init__(
        self, source: Source, mask: MaskSet | None, backend: str | None, dtype: torch.dtype | None = None
    ) -> None:
        self._source = source
        named = named_weights(source)
        self.mask = mask_of(source, mask)
        self._stored = Layout.of(self.mask, named)
        self.layout = self._stored if dtype is None else Layout.of(self.mask, named, dtype)
        devices = {weight.device for weight in self._weights().values()}
        devices = devices or {named[name].device for name in self.mask.names[:1]}  # the mask is empty
        if len(devices) > 1:
            raise ValueError(f"the weights are on {' and '.join(sorted(map(str, devices)))}, expected one device")
        self.device = devices.pop() if devices else torch.device("cpu")
        self.backend = choose(self.device, backend)
        self._addresses: dict[str, int] = {}
        self._indices: tuple[Index, ...] = ()

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """See `ActiveValues.take`.

        Raises:
            WeightSyncError: the optimizer's mask was replaced, or the model holds its base weights.
            ValueError: a weight is not a plain tensor.
        """
        require_current(self._source, self.mask)
        held = self._source.active_weights() if isinstance(self._source, SparseOptimizer) else None
        if held is not None:
            parts: dict[str, Tensor] = {}
            for names, values in held:
                parts.update(zip(names, values.split([self.mask[name].numel() for name in names]), strict=True))
            return self.layout.joined(parts)
        found = self._taken()
        # The host checks whether weights have moved while the GPU reads; the indices keep the memory they read alive.
        weights = self._weights()
        addresses = {name: weight.data_ptr() for name, weight in weights.items()}
        if addresses != self._addresses:
            placed = place(self._stored, {name: [whole_weight(name, weight)] for name, weight in weights.items()})
            units = {entry.name: units_of(self.mask, entry) for entry in self._stored.tensors if entry.nnz}
            self._indices = self.backend.build_indices(self._stored, units, placed, self.device)
            self._addresses = addresses
            found = self._taken()
        return found if self.layout is self._stored else self.layout.joined(self._stored.split(found))

    def _taken(self) -> dict[str, Tensor]:
        return {group.dtype: index.take() for group, index in zip(self._stored.groups, self._indices, strict=False)}

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights with active elements as they are now."""
        named = named_weights(self._source)
        weights = {entry.name: named[entry.name] for entry in self._stored.tensors if entry.nnz}
        require_current(self._source, self.mask, weights.values())
        for name, weight in weights.items():
            if is_wrapper(weight):
                kind = type(weight).__name__
                raise ValueError(f"{name!r} is a {kind}, expected a plain tensor; see DistributedWeightSender")
        return weights


def named_weights(source: Source) -> dict[str, Tensor]:
    """Return the parameters of a source by name.

    Raises:
        NotImplementedError: a weight is quantised.
    """
    if isinstance(source, SparseOptimizer):
        _require_plain(source.quantised_parameters)
        groups = source.param_groups
        return {n: p for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}
    if isinstance(source, nn.Module):
        _require_plain(quantised_layers.find(source))
    return named_parameters_of(source)


def _require_plain(quantised: Iterable[str]) -> None:
    if (name := next(iter(quantised), None)) is not None:
        raise NotImplementedError(
            f"{name!r} is quantised, and an engine has no place for full-precision weights over it: serve what "
            "sparse_opt.optim.save_merged writes"
        )


def mask_of(source: Source, mask: MaskSet | None) -> MaskSet:
    """Return the mask of a source, with its names.

    Raises:
        ValueError: both an optimizer and a mask are given, or neither.
        MaskError: the mask does not fit the weights.
    """
    if isinstance(source, SparseOptimizer):
        if mask is not None:
            raise ValueError("mask is not valid with an optimizer, whose own mask is used")
        return source.mask
    if mask is None:
        raise ValueError("mask is None, expected a MaskSet unless the source is an optimizer")
    return mask.resolve(named_weights(source))


def require_current(source: Source, mask: MaskSet, weights: Iterable[Tensor] = ()) -> None:
    """Raise WeightSyncError if an optimizer has another mask by now, or its model or the weights hold base weights."""
    if isinstance(source, SparseOptimizer) and source.mask is not mask:
        raise WeightSyncError("the optimizer's mask was replaced: build a new WeightSender")
    if holds_base_weights(weights) or (isinstance(source, SparseOptimizer) and source.holds_base_weights):
        raise WeightSyncError("the model holds its base weights: leave base_weights() first")
    if isinstance(source, SparseOptimizer):
        source.check_binding()
