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

    Args:
        tensors: of any shapes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        flat = [t.view(-1) for t in tensors] or [torch.empty(0, dtype=torch.int64, device="cpu")]
        self.source = self._values = flat[0] if len(flat) == 1 else torch.cat(flat)
        self._arrived: torch.cuda.Event | None = None
        if self._values.is_cuda:
            with torch.cuda.device(self._values.device):
                pinned = torch.empty(self._values.shape, dtype=torch.int64, device="cpu", pin_memory=True)
                pinned.copy_(self._values, non_blocking=True)
                self._values = pinned
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    @property
    def arrived(self) -> torch.cuda.Event | None:
        """Follows the copy, and with it what was launched before; None on a CPU."""
        return self._arrived

    @cached_property
    def numbers(self) -> list[int]:
        """All elements, one tensor after the other; waits for the copy, and for nothing that was launched after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[int] = self._values.tolist()
        return found
