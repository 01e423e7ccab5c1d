"""HostCopy: integers of a device on their way to the host, which may do other work before it waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class HostCopy:
    """The elements of int64 tensors of one device, copied in the order of its current stream.

    Args:
        tensors: of any shapes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        flat = [t.view(-1) for t in tensors] or [torch.empty(0, dtype=torch.int64, device="cpu")]
        self._copy = flat[0] if len(flat) == 1 else torch.cat(flat)
        self._done: torch.cuda.Event | None = None
        if self._copy.is_cuda:
            pinned = torch.empty(self._copy.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            stream = torch.cuda.current_stream(self._copy.device)
            self._copy = pinned.copy_(self._copy, non_blocking=True)
            self._done = stream.record_event()

    @cached_property
    def numbers(self) -> list[int]:
        """All elements, one tensor after the other; waits for the copy, and for nothing that was launched after it."""
        if self._done is not None:
            self._done.synchronize()
        found: list[int] = self._copy.tolist()
        return found
