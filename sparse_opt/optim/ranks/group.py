"""The ranks of a process group: collectives whose errors name ranks, and checks that all ranks hold the same.

A rank that does not take part in a collective is otherwise only a timeout on the other ranks. If a reduction fails,
every rank that has launched it sets a key in the group's store; ranks without a key after some seconds are dead, or
have not reached it. Nothing is written while reductions succeed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

REPORT_SECONDS = 5.0  # that the other ranks have to report


def group_of(
    process_group: dist.ProcessGroup | Literal[False] | None, grads: str, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """Return the group whose gradients an optimizer averages, or None for this process's own.

    Args:
        mesh: of the parameters that `fully_shard` has sharded; None without any. Under HSDP gradients are averaged over
            both of its dimensions.

    Raises:
        ValueError: several processes run, the parameters are not sharded, and the argument is None; or the group cannot
            be used.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if mesh is not None:
        if grads != "compact":
            raise ValueError(f"grads is {grads!r}, but the parameters are sharded by fully_shard; expected 'compact'")
        if process_group is False:
            raise ValueError("process_group is False, but the parameters are sharded over several ranks")
        if process_group is None and mesh.size() == dist.get_world_size():
            process_group = dist.group.WORLD
        elif process_group is None and mesh.ndim == 1:
            process_group = mesh.get_group()
        elif process_group is None:
            raise ValueError(
                f"the parameters are sharded over {mesh}, a part of all ranks: pass a process_group of its ranks"
            )
    if process_group is None and several:
        if grads == "compact":
            choices = (
                "pass process_group=torch.distributed.group.WORLD to average the compact gradients over them, or "
                "process_group=False to train on this process's own"
            )
        else:
            choices = (
                "with grads='dense' the optimizer does not average gradients. Pass process_group=False if "
                "DistributedDataParallel does, or to train on this process's own"
            )
        raise ValueError(f"torch.distributed runs {dist.get_world_size()} processes: {choices}")
    if process_group is None or process_group is False:
        return None
    if grads != "compact":
        raise ValueError(
            "process_group averages compact gradients, but grads is 'dense': use grads='compact', or "
            "process_group=False and let DistributedDataParallel average param.grad"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group is {process_group!r}, expected a ProcessGroup that this process is in, False or None"
        )
    if mesh is not None:
        found, expected = sorted(dist.get_process_group_ranks(process_group)), sorted(mesh.mesh.flatten().tolist())
        if found != expected:
            raise ValueError(f"process_group has ranks {found}, but the parameters are sharded over ranks {expected}")
    return process_group


def all_reduce_mean(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to replace `values` by their mean over the ranks. The current stream may only read them after `wait`."""
    op = dist.ReduceOp.AVG
    if "nccl" not in dist.get_backend_config(group).lower() or values.device.type != "cuda":
        values.div_(group.size())  # before the sum, which could overflow
        op = dist.ReduceOp.SUM
    work: dist.Work = dist.all_reduce(values, op, group=group, async_op=True)
    return work


def wait(work: dist.Work, group: dist.ProcessGroup, number: int) -> None:
    """Wait for a collective of reduction `number`, with NCCL on the current stream.

    Raises:
        RuntimeError: the collective failed or timed out; names the ranks that do not respond.
    """
    try:
        work.wait()
    except RuntimeError as error:
        clause = missing_ranks(group, f"waiting/{number}", REPORT_SECONDS)
        raise RuntimeError(
            f"rank {dist.get_rank()}: reduction {number} of the compact gradients failed, {clause}: {error}"
        ) from error


@contextmanager
def raise_on_all(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Context in which an error of one rank is raised on all ranks, as a ValueError on the others, so that none waits
    for it or continues without it.

    All ranks of the group must enter and leave it. Without a group it does nothing.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # of any type, such as running out of memory: it is raised below
        own = error
    if group is not None:
        messages: list[Any] = [None] * group.size()
        with torch.cuda.device(device if device.type == "cuda" else -1):
            dist.all_gather_object(messages, None if own is None else str(own), group=group)
        failed = [rank for rank, message in enumerate(messages) if message is not None]
        if failed and own is None:
            rank = dist.get_global_rank(group, failed[0])
            raise ValueError(f"rank {rank}: {messages[failed[0]]}")
    if own is not None:
        raise own


def require_same(
    entries: Sequence[tuple[str, Any]],
    group: dist.ProcessGroup,
    device: torch.device,
    parts: Sequence[int] | None = None,
) -> None:
    """Raise a RuntimeError that names the first entry which is not the same on all ranks, and the ranks.

    Args:
        entries: (name, value), compared with ==.
        device: of this rank; NCCL sends objects from the current GPU.
        parts: for each entry, a number; it is compared between ranks that have the same number only.
    """
    own = [(part, *entry) for part, entry in zip(parts or [0] * len(entries), entries, strict=True)]
    gathered: list[Any] = [None] * group.size()
    with torch.cuda.device(device if device.type == "cuda" else -1):
        dist.all_gather_object(gathered, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    nothing = (0, "nothing else", "")
    for i in range(max(map(len, gathered))):
        first: dict[int, tuple[int, Any]] = {}  # part -> (rank, entry)
        for rank, theirs in zip(ranks, gathered, strict=True):
            part, *entry = theirs[i] if i < len(theirs) else nothing
            expected_rank, expected = first.setdefault(part, (rank, entry))
            if entry != expected:
                same_name = entry[0] == expected[0]
                raise RuntimeError(
                    f"the ranks differ: {expected[0]} is {expected[1]} on rank {expected_rank}, but "
                    f"{entry[1] if same_name else ' '.join(map(str, entry))} on rank {rank}"
                )


def missing_ranks(group: dist.ProcessGroup, key: str, seconds: float) -> str:
    """Report `key` in the group's store; return which ranks do not report it within `seconds`, as a clause.

    Args:
        key: names what the ranks wait for, or have found; the same on all ranks.
    """
    store = group.get_group_store()
    own = dist.get_rank()
    missing = {rank for rank in dist.get_process_group_ranks(group) if rank != own}
    deadline = time.monotonic() + seconds
    try:
        store.set(f"sparse_opt/{key}/{own}", "")
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not store.check([f"sparse_opt/{key}/{rank}"])}
            time.sleep(0.05)
    except RuntimeError as error:
        return f"the store of the process group does not respond either ({error})"
    if not missing:
        return "all ranks report it"
    return f"rank {', '.join(map(str, sorted(missing)))} did not respond within {seconds:g} s"
