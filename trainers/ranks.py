"""The processes of a run: `Ranks`, by which they share the rows of a batch, and `joined`, which starts and ends them.

A step has the same rows on any number of ranks: each rank takes a contiguous part of them, and divides its part of the
loss by counts of all rows. Every rank holds all data and, after sampling, the whole rollout; only forward and backward
passes, sampling and rewards are shared.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from logging import WARNING, disable
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.files import one_line
from sparse_opt.optim.ranks.lost_ranks import REPORT_SECONDS, missing_ranks, report

ResultT = TypeVar("ResultT")

Parallel = Literal["auto", "none", "replicate", "fsdp"]


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the `size` processes of a run; one process by default.

    All methods but `passes` are collectives with several ranks: every rank calls them, in the same order.
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False  # models are sharded (FSDP2): all ranks must make the same number of passes

    @classmethod
    def of(cls, parallel: Parallel, timeout: float | None = None) -> Ranks:
        """The ranks of the initialized process group, checked against the option.

        Args:
            timeout: seconds after which a collective of the process group fails; None leaves its timeout as it is.

        Raises:
            ConfigError: the option is replicate or fsdp in a process that no launcher started, or none with several;
                or the process group of several processes is not initialized.
        """
        size = world_size()
        if parallel not in ("auto", "none") and "WORLD_SIZE" not in os.environ and not dist.is_initialized():
            raise ConfigError(
                f"option 'parallel' is {parallel}: this is a single process; start N of them with: torchrun "
                "--nproc_per_node=N -m sparse_opt train ..."
            )
        if size == 1:
            return cls()
        if parallel == "none":
            raise ConfigError(f"option 'parallel' is none, with {size} processes: expected auto, replicate or fsdp")
        if not dist.is_initialized():
            raise ConfigError(
                f"there are {size} processes (WORLD_SIZE), and torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() first"
            )
        if timeout is not None:
            # Not public, but torch has no other function for a group that exists, as when options are read.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
        return cls(dist.get_rank(), size, sharded=parallel == "fsdp")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes all files and messages."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for one process."""
        return dist.group.WORLD if self.size > 1 else None

    def share(self, start: int, stop: int) -> range:
        """This rank's part of the rows start .. stop - 1: contiguous, in rank order, of nearly equal sizes."""
        n = stop - start
        return range(start + n * self.rank // self.size, start + n * (self.rank + 1) // self.size)

    def passes(self, start: int, stop: int, size: int) -> list[slice]:
        """`share(start, stop)` in slices of `size` rows, one for each forward pass; the last may be smaller.

        With sharded models every rank has as many slices as the one with the most rows: its rows are spread over them,
        and slices may be empty.
        """
        share = self.share(start, stop)
        if self.sharded:
            most = -(-(stop - start) // self.size)  # rows of a rank
            n_passes = -(-most // size)
            ends = (share.start + len(share) * (i + 1) // n_passes for i in range(n_passes))
            return [slice(first, end) for first, end in itertools.pairwise([share.start, *ends])]
        return [slice(first, min(first + size, share.stop)) for first in share[::size]]

    def sum(self, values: Tensor) -> Tensor:
        """Add the tensors of all ranks, in place. Ranks that fill in their own rows of zeros get all rows."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of a few small parameters over the ranks, as DDP does."""
        if self.size > 1:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def gather(self, item: ResultT) -> list[ResultT]:
        """The items of all ranks, in rank order; picklable objects on the CPU."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def concatenated(self, items: list[ResultT]) -> list[ResultT]:
        """The items of the lists of all ranks, in rank order."""
        return [item for part in self.gather(items) for item in part]

    def on_main(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function on rank 0, and return its result on all ranks, or raise its SparseOptError or OSError."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except (SparseOptError, OSError) as error:
                dist.broadcast_object_list([None, error])
                raise
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        result: ResultT = outcome[0]
        return result

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


ONE_RANK = Ranks()

# Keys of the process group's store: what a rank whose run fails reports, and the number of those that have ended so.
_FAILED, _N_FAILURES = "failed", "sparse_opt/failures"


def world_size() -> int:
    """Number of processes: of the process group, or before it is initialized, of the launcher's WORLD_SIZE."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its machine, from the launcher's LOCAL_RANK; it uses the GPU of this number."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def joined() -> Iterator[None]:
    """A context in which the processes of torchrun or `accelerate launch` have a process group: NCCL and gloo.

    Warnings are shown by rank 0 alone. If ranks fail, the first one raises its error, and the others exit silently:
    an error on one rank makes the collectives of the others fail. If a collective fails first, because a rank is dead
    or late, the error names the ranks that report no failure of theirs within a few seconds. A SIGTERM, by which
    torchrun stops the others, ends the process as an error does, so that a run that has not begun removes its files.
    """
    if local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank():
        warnings.simplefilter("ignore")
        disable(WARNING)
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # each rank's failure; only one rank's is printed
        report(dist.group.WORLD, _FAILED)
        clause = ""
        # All ranks whose collective failed wait for the others' reports: if one exits, torchrun ends the rest.
        if isinstance(error, RuntimeError) and _is_of_collective(error) and not store.add(_N_FAILURES, 0):
            clause = missing_ranks(dist.group.WORLD, _FAILED, REPORT_SECONDS)
        if store.add(_N_FAILURES, 1) > 1:
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None  # as the command line ends
        if clause:
            raise SparseOptError(f"a collective of the processes failed, {clause}: {one_line(error)}") from error
        raise
    dist.destroy_process_group()


@contextmanager
def sigterm_deferred() -> Iterator[None]:
    """A context in which a SIGTERM waits for the end of the block, so that what it removes is removed as a whole."""
    if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread alone
        yield
        return
    received: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
        if received:
            signal.raise_signal(signal.SIGTERM)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _is_of_collective(error: RuntimeError) -> bool:
    # gloo's errors have no class of their own; its messages begin with the source file, except those of collectives
    # that follow one that has timed out.
    return isinstance(error, dist.DistError) or any(text in str(error) for text in ("gloo", "caused pair closure"))
