"""DistributedWeightSender: a sender of the weights of a model that several ranks train, replicated or under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import WeightSyncError
from ..masks import MaskSet
from ..optim.ranks import sharding
from ..optim.ranks.group import REPORT_SECONDS, missing_ranks
from .encoding import Encoding, Group, Layout
from .index import choose
from .sender import (
    ActiveValues,
    PendingMessage,
    Source,
    WeightSender,
    WeightsOf,
    mask_of,
    named_weights,
    require_current,
)

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

T = TypeVar("T")


class DistributedWeightSender:
    """A `WeightSender` of a model that all ranks of the default process group train; rank 0 has its messages.

    With replicated weights, rank 0 sends its own. Under `fully_shard`, every rank gathers the active elements of its
    rows, and rank 0 collects them: nnz elements, never whole weights. The messages are those of a `WeightSender` on one
    device. All ranks must construct it, and call `update`, alike; both are collectives. An error of rank 0 alone is
    raised on all ranks with replicated weights. The version is only raised by an update that succeeds.

        sender = DistributedWeightSender(optimizer)
        channel = ProcessGroupSender(sender, "10.0.0.1:29600")     # on all ranks, as are its methods
        ...
        optimizer.step()
        channel.update()

    Args:
        source, mask, encoding, backend, dtype: see `WeightSender`; the parameters may be DTensors of `fully_shard`.

    Attributes:
        version: of the weights at the last update, the same on all ranks.
        sender: on rank 0 the sender, whose `mask_message` and `state_message` are not collectives; None on the others.

    Raises:
        ValueError, MaskError: as `WeightSender`; or a parameter is a DTensor with other placements.
        WeightSyncError: on the other ranks, if the construction failed on rank 0 only.
    """

    def __init__(
        self,
        source: Source,
        mask: MaskSet | None = None,
        *,
        encoding: Encoding = "auto",
        backend: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if encoding not in get_args(Encoding):  # on all ranks: the others would wait for rank 0 in the collective
            raise ValueError(f"encoding is {encoding!r}, expected one of {', '.join(get_args(Encoding))}")
        if isinstance(source, nn.Module):
            sharding.reshard(source)
        self._values: _ShardedValues | None = None
        self.version = 0
        self.sender: WeightSender | None = None
        if any(sharding.is_dtensor(weight) for weight in named_weights(source).values()):
            self._values = _ShardedValues(source, mask, backend, dtype)
            if dist.get_rank() == 0:
                self.sender = WeightSender(self._values, encoding=encoding)
            else:
                self._values.take()
        else:
            self.sender = self.on_rank_0(
                lambda: WeightSender(source, mask, encoding=encoding, backend=backend, dtype=dtype)
            )

    def update(self) -> PendingMessage | None:
        """Return the message of the next version on rank 0, None on the others. See `WeightSender.update`.

        Raises:
            WeightSyncError: as `WeightSender.update`, on all ranks. Or a rank is lost, which is named.
        """
        sender, message = self.sender, None
        if self._values is None:
            message = self.on_rank_0(lambda: None if sender is None else sender.update())
        elif sender is not None:
            message = sender.update()
        else:
            self._values.take()
        self.version += 1
        return message

    def on_rank_0(self, function: Callable[[], T]) -> T | None:
        """Call a function on rank 0 and return its result there; raise its error on all ranks, which must call this.

        Raises:
            WeightSyncError: on the other ranks, if the function raised an error, which rank 0 raises itself. Or a rank
                is lost, which is named.
        """
        from ..distributed.rank_0 import on_rank_0  # not at the top: it imports DTensor, which takes a second

        own: list[Exception] = []

        def noted() -> T:
            try:
                return function()
            except Exception as error:
                own.append(error)
                raise

        try:
            return on_rank_0(noted, WeightSyncError)
        except RuntimeError as error:
            if error in own:
                raise
            raise _lost_rank(error, dist.group.WORLD, f"version {self.version}") from error


class _ShardedValues(ActiveValues):
    """The active values of DTensors of `fully_shard`, collected on rank 0.

    A rank has consecutive rows of each weight, and therefore a range of its active elements in their order.
    """

    def __init__(self, source: Source, mask: MaskSet | None, backend: str | None, dtype: torch.dtype | None) -> None:
        self._source = source
        self._collections = 0
        self.mask = mask_of(source, mask)
        named = named_weights(source)
        self.layout = Layout.of(self.mask, named, dtype)
        self._weights = {entry.name: named[entry.name] for entry in self.layout.tensors if entry.nnz}
        mesh, self.device = _mesh_and_device(named)
        self.backend = choose(self.device, backend)
        # Under HSDP, ranks of the other groups have the same rows and take no part.
        self._takes_part = not any(mesh.get_local_rank(i) for i in range(mesh.ndim - 1))
        self._group = mesh.get_group(mesh.ndim - 1)
        shards, own = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        ends = {name: _ends(name, weight, shards, own) for name, weight in self._weights.items()}
        active = {
            name: torch.searchsorted(self.mask[name], of.to(self.mask[name])).tolist() for name, of in ends.items()
        }
        # For each dtype, by shard and tensor: the number of active elements.
        self._counts = {
            group.dtype: [[active[n][r + 1] - active[n][r] for n in self.layout.names(group)] for r in range(shards)]
            for group in self.layout.groups
        }
        indices = {
            name: self.mask[name][of[own] : of[own + 1]] - int(ends[name][own])
            for name, of in active.items()
            if of[own] < of[own + 1]
        }
        # Elements, since a shard may begin inside of a tile.
        local_mask = MaskSet(indices, {name: _local(self._weights[name]).shape for name in indices})
        self._local = {name: _local(self._weights[name]) for name in indices}
        self._own = WeightsOf(self._local, local_mask, backend, dtype) if indices else None

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """See `ActiveValues.take`; a collective of the ranks. Returns nothing on ranks other than 0.

        Raises:
            WeightSyncError: the optimizer's mask was replaced, or the model holds its base weights.
        """
        require_current(self._source, self.mask, self._weights.values())
        if not self._takes_part:
            return {}
        for name in self._local:  # a converted or moved model has other memory
            self._local[name] = _local(self._weights[name])
        own = {} if self._own is None else self._own.take()
        whole = {group.dtype: self._collected(own.get(group.dtype), group) for group in self.layout.groups}
        return {dtype: values for dtype, values in whole.items() if values is not None}

    def _collected(self, own: Tensor | None, group: Group) -> Tensor | None:
        """Return the values [nnz] of all shards on rank 0, in the layout's order; None on the others.

        Meanwhile rank 0 also holds as many values as the largest shard has, for each shard.
        """
        counts = self._counts[group.dtype]
        most = max(map(sum, counts))
        size = group.torch_dtype.itemsize
        sent = torch.zeros(most * size, dtype=torch.uint8, device=self.device)  # bytes: no backend sends all dtypes
        if own is not None:
            sent[: own.nbytes].copy_(own.view(torch.uint8))
        root = dist.get_rank(self._group) == 0
        received = [torch.empty_like(sent) for _ in counts] if root else None
        self._collections += 1
        try:
            dist.gather(sent, received, dst=dist.get_global_rank(self._group, 0), group=self._group)
        except RuntimeError as error:
            raise _lost_rank(error, self._group, f"collection {self._collections}") from error
        if received is None:
            return None
        shards = zip(received, counts, strict=True)
        parts = [iter(data.view(group.torch_dtype)[: sum(of)].split(of)) for data, of in shards]
        return torch.cat([next(part) for _ in counts[0] for part in parts])


def _lost_rank(error: RuntimeError, group: dist.ProcessGroup | None, round_name: str) -> WeightSyncError:
    """Return the error of a collective of the trainer's ranks that has failed; waits for reports of the others.

    Args:
        group: whose collective it was.
        round_name: the same on all ranks.
    """
    assert group is not None  # it has just run a collective
    clause = missing_ranks(group, f"weight_sync/{round_name}", REPORT_SECONDS)
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return WeightSyncError(
        f"rank {dist.get_rank()} cannot send the weights, because a collective of the trainer's ranks has failed: "
        f"{clause} ({reason})"
    )


def _ends(name: str, weight: Tensor, shards: int, own: int) -> Tensor:
    """Return [shards + 1], the elements of a weight before each shard, and all; one that is not sharded is in shard 0.

    Raises:
        ValueError: a DTensor is sharded in another way than `fully_shard` does.
    """
    numel = weight.numel()
    chunk = numel
    if sharding.is_dtensor(weight):
        dtensor: Any = weight
        *outer, last = dtensor.placements
        if not all(p.is_replicate() for p in outer) or not last.is_shard(0):
            raise ValueError(
                f"{name!r} is a DTensor with placements {dtensor.placements}, expected Shard(0) as of fully_shard"
            )
        chunk = -(-weight.shape[0] // shards) * (numel // weight.shape[0])  # fully_shard cuts rows as torch.chunk does
    ends = (torch.arange(shards + 1, device="cpu") * chunk).clamp(max=numel)
    if sharding.is_dtensor(weight) and _local(weight).numel() != (expected := int(ends[own + 1] - ends[own])):
        raise ValueError(f"{name!r} has {_local(weight).numel()} elements in shard {own}, expected {expected}")
    return ends


def _mesh_and_device(named: Mapping[str, Tensor]) -> tuple[DeviceMesh, torch.device]:
    """Return the mesh of the sharded weights and the device of their shards.

    Raises:
        ValueError: they are on several meshes, or rank 0 is not the first of the mesh.
    """
    dtensors: list[Any] = [weight for weight in named.values() if sharding.is_dtensor(weight)]
    meshes = {dtensor.device_mesh for dtensor in dtensors}
    if len(meshes) > 1:
        raise ValueError("the weights are sharded over several device meshes, expected one")
    mesh: DeviceMesh = meshes.pop()
    if int(mesh.mesh.flatten()[0]) != 0:
        raise ValueError(f"the weights are sharded over {mesh}, expected a mesh that begins with rank 0")
    return mesh, _local(dtensors[0]).device


def _local(weight: Tensor) -> Tensor:
    """Return what this process stores of a weight."""
    dtensor: Any = weight
    # The public to_local() takes some 30 us, and this is called for every weight in every update.
    local: Tensor = dtensor._local_tensor if sharding.is_dtensor(weight) else weight.detach()
    return local
