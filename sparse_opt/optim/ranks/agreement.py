"""Compares the steps that the ranks have made, by a few numbers that are averaged with their gradients.

The memory that an all-reduce averages ends with a row of elements for each rank. A rank writes numbers into its own row
and zeros into the others, so that the result has the numbers of all ranks, divided by how many ranks there are. The
numbers are sent as integers below 64: divided, they are still different in bf16, whose roundings are 2**-9 of a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_BITS, _DIGITS = 6, 4  # each number has 24 bits


class Progress(NamedTuple):
    """What all ranks have in common when they reduce their gradients: numbers below 2**24."""

    n_steps: int  # steps made so far
    history: int  # checksum of the options and of the clipping of all steps made so far


def n_elements(group: dist.ProcessGroup | None) -> int:
    """Return how many elements an `Agreement` of the group needs."""
    return 0 if group is None else group.size() * _DIGITS * len(Progress._fields)


class _HostCopy:
    """What one reduction sends and finds, on the host."""

    def __init__(self, elements: Tensor) -> None:
        pinned = elements.device.type == "cuda"
        self.sent, self._found = (
            torch.zeros(elements.shape, dtype=elements.dtype, device="cpu", pin_memory=pinned) for _ in range(2)
        )
        self._copied = torch.cuda.Event() if pinned else None
        self.is_new = False  # received, and not read

    def receive(self, elements: Tensor) -> None:
        self._found.copy_(elements, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(elements.device))
        self.is_new = True

    def read(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        self.is_new = False
        return self._found


class Agreement:
    """Sends this rank's progress with a reduction, and raises if the progress of another rank is different.

    On a GPU the host compares a reduction when it launches the second one after it, and until then does not wait.

    Args:
        elements: [n_elements(group)], memory that the reduction averages.
        progress: returns the progress of this rank.
    """

    def __init__(self, elements: Tensor, group: dist.ProcessGroup, progress: Callable[[], Progress]) -> None:
        self._elements, self._progress = elements, progress
        self._ranks, self._own = dist.get_process_group_ranks(group), group.rank()
        # The copies on the host of the last reductions, oldest first.
        self._copies = deque(_HostCopy(elements) for _ in range(2 if elements.device.type == "cuda" else 1))
        self._sending = False  # until the result is received
        self._difference = ""  # found in the last result that was compared

    def compare_oldest(self) -> None:
        """Compare the ranks in the oldest result, waiting for it, if it was not compared. Call it before `send`."""
        self._compare(self._copies[0])

    def compare_received(self) -> None:
        """Compare the ranks in the last result if the host has it; raise again what was found before."""
        if self._elements.device.type != "cuda":
            self._compare(self._copies[-1])
        elif self._difference:
            raise RuntimeError(self._difference)

    def send(self) -> None:
        """Write the progress on the current stream, before the reduction."""
        self._difference = ""
        self._copies.rotate(-1)
        sent = self._copies[-1].sent
        digits = [number >> (_BITS * i) & (2**_BITS - 1) for number in self._progress() for i in range(_DIGITS)]
        sent.view(len(self._ranks), -1)[self._own] = torch.tensor(digits, dtype=sent.dtype, device="cpu")
        self._elements.copy_(sent, non_blocking=True)
        self._sending = True

    def receive(self) -> None:
        """Copy the result, if there is one, to the host, on the current stream, which has waited for the reduction."""
        if self._sending:
            self._copies[-1].receive(self._elements)
            self._sending = False

    def _compare(self, copy: _HostCopy) -> None:
        """Raise a RuntimeError that names the first rank that differs from this one, and how."""
        if copy.is_new:
            self._difference = self._find_difference(copy.read())
        if self._difference:
            raise RuntimeError(self._difference)

    def _find_difference(self, found: Tensor) -> str:
        rows = found.view(len(self._ranks), -1)
        if torch.equal(rows, rows[self._own].expand_as(rows)):
            return ""
        digits = (rows.double() * len(self._ranks)).round().long().view(len(self._ranks), -1, _DIGITS)
        ranks = [Progress(*(sum(d << (_BITS * i) for i, d in enumerate(n)) for n in row)) for row in digits.tolist()]
        own = ranks[self._own]
        i, other = next((i, progress) for i, progress in enumerate(ranks) if progress != own)
        if other.n_steps != own.n_steps:
            what = f"has made {other.n_steps} steps, and this one {own.n_steps}"
        else:
            what = "has made its steps with another learning rate, other options or other clipping than this one"
        return f"rank {self._ranks[self._own]}: the ranks differ: rank {self._ranks[i]} {what}"
