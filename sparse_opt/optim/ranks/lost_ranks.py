"""Names the ranks that do not take part in a collective, whose absence is otherwise only a timeout on the other ranks.

If reduction n is overdue, every rank that has launched it sets a key in the group's store. Ranks without a key after
some seconds are dead, or have not reached it. Nothing is written while reductions succeed.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque

import torch
import torch.distributed as dist

# How long the other ranks have to report, in seconds, and as a part of the group's timeout if that is shorter.
REPORT_SECONDS = 5.0
REPORT_PART = 0.25


def report(group: dist.ProcessGroup, key: str) -> None:
    """Report `key` in the group's store for this rank.

    Args:
        key: names what the ranks wait for, or have found; the same on all ranks.
    """
    group.get_group_store().set(f"sparse_opt/{key}/{dist.get_rank()}", "")


def missing_ranks(group: dist.ProcessGroup, key: str, seconds: float) -> str:
    """Report `key`; return which ranks do not report it within `seconds`, as a clause."""
    store = group.get_group_store()
    own = dist.get_rank()
    missing = {rank for rank in dist.get_process_group_ranks(group) if rank != own}
    deadline = time.monotonic() + seconds
    try:
        report(group, key)
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not store.check([f"sparse_opt/{key}/{rank}"])}
            time.sleep(0.05)
    except RuntimeError as error:
        return f"the store of the process group does not respond either ({error})"
    if not missing:
        return "all ranks report it"
    return f"rank {', '.join(map(str, sorted(missing)))} did not respond within {seconds:g} s"


class LostRankReporter:
    """Prints the missing ranks of a reduction on a GPU, shortly before NCCL ends the process at the group's timeout.

    A wait for NCCL is in the GPU's stream: the host does not notice that a reduction hangs until it synchronizes, and
    then it cannot raise. A thread checks the reductions in flight once a second, and ends with this object.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._works: deque[tuple[float, int, dist.Work]] = deque()  # (when it was launched, number, work)
        timeout: float = group._get_backend(device).options._timeout.total_seconds()  # no public function returns it
        self._seconds = min(REPORT_SECONDS, timeout * REPORT_PART)
        self._patience = timeout - 2 * self._seconds
        self._ended = threading.Event()
        weakref.finalize(self, self._ended.set)
        arguments = (weakref.ref(self), self._ended, group, min(1.0, timeout / 20))
        threading.Thread(target=_watch, args=arguments, daemon=True, name="sparse_opt-lost-ranks").start()

    def add(self, number: int, work: dist.Work) -> None:
        """Watch the last work of reduction `number`."""
        self._works.append((time.monotonic(), number, work))

    def overdue(self) -> int | None:
        """Return the number of a reduction that has not finished for too long, or None."""
        while self._works and self._works[0][2].is_completed():
            self._works.popleft()
        if self._works and time.monotonic() - self._works[0][0] > self._patience:
            return self._works[0][1]
        return None

    def close(self) -> None:
        """End the thread."""
        self._ended.set()


def _watch(
    reporter: weakref.ref[LostRankReporter], ended: threading.Event, group: dist.ProcessGroup, interval: float
) -> None:
    while not ended.wait(interval):
        this = reporter()
        if this is None:
            return
        number, seconds = this.overdue(), this._seconds
        del this  # the thread must not keep it alive
        if number is not None:
            clause = missing_ranks(group, f"waiting/{number}", seconds)
            text = f"rank {dist.get_rank()}: reduction {number} of the compact gradients has not finished: {clause}"
            print(f"sparse_opt: {text}", file=sys.stderr, flush=True)
            return
