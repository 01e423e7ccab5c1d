"""Device tables of tensor addresses and of blocks, which are uploaded once and cached.

One launch covers a whole list of tensors. Its programs read their tensor and slots from a block table, which depends on
starts and ends only, and the tensor's address from a pointer table. Both are small and the same in every step, so they
are cached by content. An upload uses pinned memory and does not wait for the device.

In a CUDA graph: a captured upload is a copy node, which every replay repeats from pinned memory that is kept alive. Its
table is not put into the cache, because it has no content before the first replay. A table that a capture finds in the
cache is kept alive from then on, because the graph uses its address.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# int64 words pinned ahead for captured uploads: allocating pinned memory may not be allowed inside a capture.
_CAPTURE_WORDS = 1 << 16


class _Entry:
    """A filled table, the value that is returned to callers, and the stream that filled the table."""

    def __init__(self, table: Tensor, value: Any) -> None:
        self.table = table
        self.value = value
        self.stream: torch.cuda.Stream | None = None
        self.filled: torch.cuda.Event | None = None
        if table.is_cuda:
            self.stream = torch.cuda.current_stream(table.device)
            self.filled = self.stream.record_event()

    def use(self) -> None:
        """Make the table safe to read on the current stream."""
        if self.stream is None or self.filled is None:
            return
        current = torch.cuda.current_stream(self.table.device)
        if current != self.stream:
            current.wait_event(self.filled)
            self.table.record_stream(current)


class TableCache:
    """The last `capacity` int64 tables by content, with the least recently used evicted first. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self,
        key: Hashable,
        device: torch.device,
        build: Callable[[], Tensor],
        split: Callable[[Tensor], Any] = lambda table: table,
    ) -> Any:
        """`split(table)`, where `table` is the result of `build()`, a tensor on the host, copied to `device`."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        if entry is not None:
            if capturing:
                _replayed.keep(entry.table)
            else:
                entry.use()
            return entry.value
        host = build()
        if capturing:
            return split(_replayed.upload(host, device))
        table = _upload(host, device)
        entry = _Entry(table, split(table))
        with self._lock:
            self._entries[key] = entry
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)
        return entry.value


class _Replayed:
    """The memory that captured graphs read on every replay. It is never freed: a graph's end is not known."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._pinned: Tensor | None = None
        self._used = 0
        self._lock = threading.Lock()

    def keep(self, tensor: Tensor) -> None:
        self._kept[id(tensor)] = tensor

    def reserve(self) -> None:
        """Pin the memory of later captures outside of a capture, where that is allowed."""
        with self._lock:
            if self._pinned is None:
                self._pinned = torch.empty(_CAPTURE_WORDS, dtype=torch.int64, device="cpu", pin_memory=True)

    def upload(self, host: Tensor, device: torch.device) -> Tensor:
        words = host.numel()
        with self._lock:
            if self._pinned is not None and self._used + words <= self._pinned.numel():
                staged = self._pinned[self._used : self._used + words]
                self._used += words
            else:
                staged = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=True)
        staged.copy_(host)
        table = torch.empty(words, dtype=torch.int64, device=device)
        table.copy_(staged, non_blocking=True)
        self.keep(staged)
        self.keep(table)
        return table


_replayed = _Replayed()


def _upload(host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return host.to(device)
    _replayed.reserve()
    return host.pin_memory().to(device, non_blocking=True)


# A step reads two lists, gradients and parameters. The allocator places gradients at few different addresses.
POINTER_TABLES = TableCache(64)
# A row is 16 bytes per 512 or 1024 slots: 10 and 5 MB for 3.2e8 active elements.
BLOCK_TABLES = TableCache(32)


def check_list(name: str, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Raise ValueError unless the tensors can be read at their addresses: one device, one dtype, contiguous."""
    dtype = tensors[0].dtype
    for i, t in enumerate(tensors):
        if t.device != device:
            raise ValueError(f"{name}[{i}] is on {t.device}, expected {device}")
        if t.dtype != dtype:
            raise ValueError(f"{name}[{i}] is {t.dtype}, but {name}[0] is {dtype}; one call takes one dtype")
        if not t.is_contiguous():
            raise ValueError(
                f"{name}[{i}] of shape {list(t.shape)} has strides {list(t.stride())}, expected contiguous"
            )


def pointer_table(name: str, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """[n] int64: the addresses of n >= 1 tensors, which are checked if one of them has moved.

    The tensors' device must be current, because the upload uses the current stream.
    """
    pointers = tuple([t.data_ptr() for t in tensors])

    def build() -> Tensor:
        check_list(name, tensors, device)
        return torch.tensor(pointers, dtype=torch.int64, device="cpu")

    table: Tensor = POINTER_TABLES.get((device, tensors[0].dtype, pointers), device, build)
    return table


class Operands(NamedTuple):
    """A row of `operand_table`: addresses and sizes of grad_output [..., rows] and x [..., columns]."""

    grad_output: int
    x: int
    tokens: int
    rows: int
    columns: int


def operand_rows(grad_outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Operands, ...]:
    rows = []
    for g, x in zip(grad_outputs, inputs, strict=True):
        width = g.shape[-1]
        rows.append(Operands(g.data_ptr(), x.data_ptr(), g.numel() // width if width else 0, width, x.shape[-1]))
    return tuple(rows)


def operand_table(
    grad_outputs: Sequence[Tensor], inputs: Sequence[Tensor], rows: tuple[Operands, ...], device: torch.device
) -> Tensor:
    """[n, 5] int64 of the `operand_rows` of n >= 1 pairs, which are checked if one of them has moved.

    The tensors' device must be current, because the upload uses the current stream.
    """

    def build() -> Tensor:
        check_list("grad_outputs", grad_outputs, device)
        check_list("inputs", inputs, device)
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1)

    table: Tensor = POINTER_TABLES.get((device, grad_outputs[0].dtype, inputs[0].dtype, rows), device, build)
    return table


class Blocks(NamedTuple):
    """A block is at most `block` slots of one tensor, cut at compact slots that are multiples of `block`."""

    rows: Tensor  # [programs, 2] int64: first slot; tensor << 32 | slots
    firsts: Tensor  # [n + 1] int64: the first block of each tensor, and programs
    programs: int


def _build_blocks(starts: Sequence[int], ends: Sequence[int], block: int) -> Tensor:
    """Rows and firsts of `Blocks`, one after the other."""
    start, end = (torch.tensor(slots, dtype=torch.int64, device="cpu") for slots in (starts, ends))
    first_cut = start // block
    blocks = torch.where(end > start, (end + block - 1) // block - first_cut, 0)
    firsts = torch.zeros(len(starts) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(blocks, 0, out=firsts[1:])
    count = int(firsts[-1])
    tensor = torch.repeat_interleave(torch.arange(len(starts), device="cpu"), blocks)
    cut = (torch.arange(count, device="cpu") - firsts[tensor] + first_cut[tensor]) * block
    first = torch.maximum(cut, start[tensor])
    last = torch.minimum(cut + block, end[tensor])
    rows = torch.stack([first, (tensor << 32) | (last - first)], dim=1)
    return torch.cat([rows.view(-1), firsts])


def block_table(starts: Sequence[int], ends: Sequence[int], block: int, device: torch.device) -> Blocks:
    """The blocks of n segments. Empty segments have none. `device` must be current."""
    key = (tuple(starts), tuple(ends), block, device)
    n = len(starts)
    table: Blocks = BLOCK_TABLES.get(
        key,
        device,
        lambda: _build_blocks(key[0], key[1], block),
        lambda t: Blocks(t[: -n - 1].view(-1, 2), t[-n - 1 :], (t.numel() - n - 1) // 2),
    )
    return table
