"""HostCopy: integers of a device on their way to the host, which may do other work before it waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class HostCopy:
    """The elements of int64 tensors of one device, copied in the order of its current stream.

    Attributes:
        source: [n], all elements, one tensor after the other, on the device.
        computed: an event after `source` is computed; None on a CPU.

    Args:
        tensors: of any shapes.
        start: begin the copy at once; otherwise the first use of `start` or `numbers` does, on the same stream.
    """

    def __init__(self, tensors: Sequence[Tensor], *, start: bool = True) -> None:
        flat = [t.view(-1) for t in tensors] or [torch.empty(0, dtype=torch.int64, device="cpu")]
        self.source = flat[0] if len(flat) == 1 else torch.cat(flat)
        self.computed: torch.cuda.Event | None = None
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None  # pinned, and an event behind the copy
        if self.source.is_cuda:
            self._stream = torch.cuda.current_stream(self.source.device)
            self.computed = self._stream.record_event()
            if start:
                self.start()

    def start(self) -> None:
        """Begin the copy, unless that was done."""
        if self._copy is None and self.source.is_cuda:
            with torch.cuda.stream(self._stream):
                pinned = torch.empty(self.source.shape, dtype=torch.int64, device="cpu", pin_memory=True)
                pinned.copy_(self.source, non_blocking=True)
                self._copy = pinned, self._stream.record_event()

    @cached_property
    def numbers(self) -> list[int]:
        """All elements, one tensor after the other; waits for the copy, and for nothing that was launched after it."""
        self.start()
        if self._copy is None:
            found: list[int] = self.source.tolist()
        else:
            self._copy[1].synchronize()
            found = self._copy[0].tolist()
        return found
