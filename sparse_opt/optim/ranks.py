"""The ranks of a process group: collectives whose errors name ranks, and checks that all ranks hold the same."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

_failures = itertools.count()
# Seconds that the other ranks have to report after a failed collective. Dead ranks, and those in other code, do not.
_REPORT_SECONDS = 5.0


def group_of(
    process_group: dist.ProcessGroup | Literal[False] | None, grads: str, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """Return the group whose gradients an optimizer averages, or None for this process's own.

    Args:
        mesh: of the parameters that `fully_shard` has sharded; None without any.

    Raises:
        ValueError: several processes run and compact gradients are collected, but the argument is None; or there is a
            group that the optimizer cannot use.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if mesh is not None and grads == "compact":
        if process_group is False:
            raise ValueError("process_group is False, but the parameters are sharded over several ranks")
        return _group_of_mesh(mesh) if process_group is None else process_group
    if process_group is None and several and grads == "compact":
        raise ValueError(
            f"torch.distributed runs {dist.get_world_size()} processes: pass process_group="
            "torch.distributed.group.WORLD to average the compact gradients over them, or process_group=False to train "
            "on this process's own"
        )
    if process_group is None or process_group is False:
        return None
    if grads != "compact":
        raise ValueError(
            "process_group averages compact gradients, but grads is 'dense': use grads='compact', or let "
            "DistributedDataParallel average param.grad"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group is {process_group!r}, expected a ProcessGroup that this process is in, False or None"
        )
    return process_group


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a group of all ranks of the mesh; under HSDP gradients are averaged over both of its dimensions."""
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if mesh.ndim == 1:
        return mesh.get_group()
    raise ValueError(f"the parameters are sharded over {mesh}, a part of all ranks: pass a process_group of its ranks")


def all_reduce_mean(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to replace `values` by their mean over the ranks. The current stream may only read them after `wait`."""
    op = dist.ReduceOp.AVG
    if "nccl" not in dist.get_backend_config(group).lower() or values.device.type != "cuda":
        values.div_(group.size())  # before the sum, which could overflow
        op = dist.ReduceOp.SUM
    work: dist.Work = dist.all_reduce(values, op, group=group, async_op=True)
    return work


def wait(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Wait for a collective, with NCCL on the current stream.

    Raises:
        RuntimeError: the collective failed or timed out; names the ranks that do not respond.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank()}: a reduction of gradients failed, {_missing(group)}: {error}"
        ) from error


def _missing(group: dist.ProcessGroup) -> str:
    """Say which ranks have not reported the same failure, through the store that the ranks have met at."""
    store = dist.distributed_c10d._get_default_store()  # no public function returns it
    number, own = next(_failures), dist.get_rank()
    missing = {r for r in dist.get_process_group_ranks(group) if r != own}
    key = f"sparse_opt/failed_reduction/{number}/"
    deadline = time.monotonic() + _REPORT_SECONDS
    try:
        store.set(f"{key}{own}", "failed")
        while missing and time.monotonic() < deadline:
            missing = {r for r in missing if not store.check([f"{key}{r}"])}
            time.sleep(0.05)
    except RuntimeError as error:
        return f"and the store of the process group does not respond ({error})"
    if not missing:
        return "on all ranks"
    return f"and rank {', '.join(map(str, sorted(missing)))} did not respond within {_REPORT_SECONDS:g} s"


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
