"""Compares the steps that the ranks have made, by a few numbers that are averaged with their gradients.

The memory that an all-reduce averages ends with a row of elements for each rank. A rank writes numbers into its own row
and zeros into the others, so that the result has the numbers of all ranks, divided by how many ranks there are. The
numbers are sent as integers below 64: divided, they are still different in bf16, whose roundings are 2**-9 of a number.
"""

from __future__ import annotations

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


class Agreement:
    """Sends this rank's progress with a reduction, and raises if the progress of another rank is different.

    Args:
        elements: [n_elements(group)], memory that the reduction averages.
        progress: returns the progress of this rank.
    """

    def __init__(self, elements: Tensor, group: dist.ProcessGroup, progress: Callable[[], Progress]) -> None:
        self._elements, self._progress = elements, progress
        self._ranks, self._own = dist.get_process_group_ranks(group), group.rank()
        on_gpu = elements.device.type == "cuda"
        self._sent = torch.zeros(elements.shape, dtype=elements.dtype, device="cpu", pin_memory=on_gpu)
        self._found = torch.empty_like(self._sent, pin_memory=on_gpu) if on_gpu else elements
        self._copied = torch.cuda.Event() if on_gpu else None
        self._sending = False  # until the result is received
        self._is_new = False  # the result was not compared
        self._difference = ""  # found in the last result

    def send(self) -> None:
        """Write the progress on the current stream, before the reduction. Call `compare` before."""
        self._difference = ""
        digits = [number >> (_BITS * i) & (2**_BITS - 1) for number in self._progress() for i in range(_DIGITS)]
        self._sent.view(len(self._ranks), -1)[self._own] = torch.tensor(digits, dtype=self._sent.dtype, device="cpu")
        self._elements.copy_(self._sent, non_blocking=True)
        self._sending = True

    def receive(self) -> None:
        """Copy the result, if there is one, to the host, on the current stream, which has waited for the reduction."""
        if not self._sending:
            return
        if self._copied is not None:
            self._found.copy_(self._elements, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._elements.device))
        self._sending, self._is_new = False, True

    def compare(self, *, wait: bool) -> None:
        """Compare the ranks in the last result; without `wait` only if the host has it, but also a second time.

        Raises:
            RuntimeError: the ranks differ; names the first that differs from this one, and how.
        """
        if self._is_new and (self._copied is None or wait):
            if self._copied is not None:
                self._copied.synchronize()
            self._is_new = False
            self._difference = self._find_difference()
        elif wait:
            return
        if self._difference:
            raise RuntimeError(self._difference)

    def _find_difference(self) -> str:
        rows = self._found.view(len(self._ranks), -1)
        if torch.equal(rows, rows[self._own].expand_as(rows)):
            return ""
        digits = (rows.double() * len(self._ranks)).round().long().view(len(self._ranks), -1, _DIGITS)
        found = [Progress(*(sum(d << (_BITS * i) for i, d in enumerate(n)) for n in row)) for row in digits.tolist()]
        own = found[self._own]
        i, other = next((i, progress) for i, progress in enumerate(found) if progress != own)
        if other.n_steps != own.n_steps:
            what = f"has made {other.n_steps} steps, and this one {own.n_steps}"
        else:
            what = "has made its steps with another learning rate, other options or other clipping than this one"
        return f"rank {self._ranks[self._own]}: the ranks differ: rank {self._ranks[i]} {what}"
