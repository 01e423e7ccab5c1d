"""verl's checkpoint engine `sparse_opt`: weight updates of a sparse run as the messages of `sparse_opt.weight_sync`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=sparse_opt
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sparse_opt.integrations.verl.checkpoint_engine

The trainer's first rank broadcasts all weights once, with the positions of the mask. After that it sends active values
only, or a bitmap over the active elements and the changed values, whichever is smaller. A rollout worker, which has the
positions, makes verl's own DeltaFlush of each update. verl's adapters of vLLM and SGLang hand it to the inference
engine on the same GPU, where verl's receivers for its backend `delta_sharded` apply it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray  # type: ignore[import-not-found]  # comes with verl
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id, get_device_name

from ...errors import ConfigError
from ...weight_sync import Message
from .broadcast import WeightBroadcast, open_store
from .engine import ExportedWeights
from .flushes import Change, ChangeReader, Flush, Part, change_flushes, split_change, whole_flush
from .rollout_weights import RolloutWeights


class Member(NamedTuple):
    """What a worker reports before an update."""

    state: str | None = None  # the weights that it has sent, or has received
    address: str = ""  # of the store, from the trainer's first rank
    group: tuple[str, int, int] | None = None  # key, rank and size of the broadcast group that it is in


@CheckpointEngineRegistry.register("sparse_opt")
class SparseCheckpointEngine(CheckpointEngine):
    """Sends the changes of a `sparse_fsdp2` actor to rollout workers, and receives them there.

    All weights are sent again if a rollout worker has not received the last update: it is new, or an update failed.

    Args:
        bucket_size: bytes after which whole weights are broadcast, and changes handed to the inference engine.
        is_master: whether this is the trainer's first rank.
        timeout: of a broadcast, in seconds.
    """

    wire_format = "delta_flush"  # what `receive_weights` yields

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 600.0) -> None:
        self._bucket_size, self._is_master, self._timeout = bucket_size, is_master, timeout
        name = get_device_name()
        self._device = torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
        self._store: dist.Store | None = None
        self._address = ""
        if is_master:
            host = ray.util.get_node_ip_address().strip("[]")
            store = open_store(f"{host}:0", timeout, is_master=True)
            self._store, self._address = store, f"{host}:{store.port}"
        self._group: WeightBroadcast | None = None
        self._place: tuple[str, int, int] | None = None
        self._whole = True
        self._state: str | None = None
        self._weights: RolloutWeights | None = None  # of the sender
        self._reader = ChangeReader(self._device)
        self._parts: dict[str, list[list[Part]]] = {}  # see `rollout_tensors`

    def prepare(self) -> Member:
        if self._group is not None and self._group.has_failed:
            self._group.close()
            self._group = self._place = None
        return Member(self._state, self._address, self._place)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Member]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The trainer's first rank is rank 0 of the group, and the rollout workers the others."""
        master, members = metadata[0], [metadata[0], *metadata[actor_wg_world_size:]]
        size = 1 + rollout_world_size
        held = None if master.group is None else master.group[0]
        is_current = all(member.group == (held, rank, size) for rank, member in enumerate(members))
        key = held if is_current else uuid.uuid4().hex
        whole = master.state is None or any(member.state != master.state for member in members)

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            shared = {"size": size, "address": master.address, "key": key, "whole": whole}
            return {"rank": ranks, **{name: [value] * len(ranks) for name, value in shared.items()}}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments([*range(1, size)])

    def init_process_group(self, rank: int, size: int, address: str, key: str, whole: bool) -> None:
        """Join the group, unless this worker is in it; ranks of the trainer but the first take no part.

        Args:
            whole: whether all weights are to be sent.
        """
        self._whole = whole
        if rank < 0 or self._place == (key, rank, size):
            return
        if self._group is not None:
            self._group.close()
        store = self._store or open_store(address, self._timeout)
        self._group = WeightBroadcast(store, key, rank, size, self._device, self._timeout)
        self._place = (key, rank, size)

    def finalize(self) -> None:
        """Keeps the group for the next update."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send the weights, or what has changed of them; a collective of the trainer's ranks.

        Args:
            weights: from the engine's `get_per_tensor_param`; it is iterated only if all weights are sent.

        Returns:
            On the first rank verl's metrics: payload_mbytes, changed_elems, and changed_ratio of the active elements.
            If all active values are sent, because that is smaller, all count as changed.

        Raises:
            ConfigError: the actor is not a `sparse_fsdp2` engine.
            WeightSyncError: a broadcast has failed, or not ended within the timeout.
        """
        if not isinstance(weights, ExportedWeights):
            raise ConfigError(
                "checkpoint_engine.backend=sparse_opt needs an actor with a mask: set "
                "actor_rollout_ref.actor.strategy=sparse_fsdp2"
            )
        group = self._group if self._is_master else None
        if self._weights is None:
            self._weights = RolloutWeights(weights.engine, self._bucket_size)
        self._state = None  # until this update is sent
        sent = self._weights.send_whole(weights, group) if self._whole else self._weights.send_changes(group)
        if sent is None:
            return {}
        self._state = sent.state
        return {
            "checkpoint_engine/payload_mbytes": sent.nbytes / 2**20,
            "checkpoint_engine/changed_elems": float(sent.values),
            "checkpoint_engine/changed_ratio": sent.values / max(sent.nnz, 1),
        }

    def receive_weights(self, global_steps: int | None = None) -> Iterator[Flush]:
        """Receive an update, and yield it as verl's flushes; nothing if no weight has changed.

        The update is complete when the iterator is exhausted. If it is not, the next update has all weights.

        Raises:
            WeightSyncError: the update is damaged, out of order or for another mask, or a broadcast has failed.
        """
        assert self._group is not None, "init_process_group was not called"
        self._state = None
        is_last = False
        while not is_last:
            header, tensors = self._group.receive()
            if header["what"] == "mask":
                self._reader.start(Message.from_header(header["message"], tensors))
                self._parts = header["parts"]
            elif header["what"] == "weights":
                is_last = header["is_last"]
                yield whole_flush(header["params"], tensors["values"], is_last=is_last)
            else:
                is_last = True
                changes = self._reader.changes(Message.from_header(header["message"], tensors))
                yield from change_flushes(self._named(changes), self._bucket_size)
        self._state = self._reader.state

    def _named(self, changes: list[Change]) -> Iterator[Change]:
        """Yield changes under the names of the rollout's weights; tied weights have several, fused experts parts."""
        for change in changes:
            for parts in self._parts[change.name]:
                yield from split_change(change, parts)
