"""Run a module in a process of torchrun that keeps to its own share of the host's cores.

It is run as a file, `on_own_cores.py MODULE WORD ...`, so that nothing has been imported yet: a thread keeps the cores
that its process had when the thread was started.
"""

from __future__ import annotations

import os
import runpy
import sys


def take_share_of_cores(rank: int, n: int) -> None:
    """Keep this process, one of n on a host, to its own share of the cores; with fewer cores than n it keeps all."""
    cores = sorted(os.sched_getaffinity(0))
    if share := len(cores) // n:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


if __name__ == "__main__":
    take_share_of_cores(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # as of a file; `python -m` has the working directory
        sys.path[0] = os.getcwd()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
