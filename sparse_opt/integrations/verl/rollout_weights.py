"""RolloutWeights: the active weights that the rollout has, and the messages that bring it to the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0

from ...errors import WeightSyncError
from ...masks import MaskSet
from ...weight_sync import Message, WeightSender
from ...weight_sync.backend import choose
from ...weight_sync.layout import Layout
from .broadcast import WeightBroadcast
from .deltas import SENT
from .engine import ExportedWeights, SparseFSDPEngine
from .flushes import Whole, state_after, whole_bucket


class Sent(NamedTuple):
    """An update that the first rank has sent.

    Attributes:
        state: of a rollout that has applied it, as of `ChangeReader`.
        nbytes: that were broadcast.
        changed, nnz: numbers of changed elements and of active ones.
    """

    state: str
    nbytes: int
    changed: int
    nnz: int


class _ActiveValues:
    """The active values in the rollout's dtype, on the first rank; see `weight_sync.active_values.ActiveValues`."""

    def __init__(self, mask: MaskSet, device: torch.device) -> None:
        self.mask, self.device, self.backend = mask, device, choose(device, None)
        self.layout = Layout.of(mask, dict.fromkeys(mask.names, torch.empty(0, dtype=SENT, device="cpu")))
        active = [entry for entry in self.layout.tensors if entry.nnz]
        self._positions = {entry.name: mask[entry.name].to(device) for entry in active}
        self._values = torch.empty(self.layout.nnz, dtype=SENT, device=device)
        parts = self._values.split([entry.nnz for entry in active])
        # [nnz] of each tensor, views of the values in the layout's order.
        self._parts = {entry.name: part for entry, part in zip(active, parts, strict=True)}

    def read(self, name: str, weight: Tensor) -> None:
        """Take the active values from a whole weight, if it has any."""
        if name in self._parts:
            self._parts[name].copy_(weight.reshape(-1)[self._positions[name].to(torch.int64)])

    def write(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Replace the values at some active positions."""
        self._parts[name][torch.searchsorted(self._positions[name], positions)] = values

    def take(self) -> dict[str, Tensor]:
        return {group.dtype: self._values.clone() for group in self.layout.groups}


class RolloutWeights:
    """Sends the weights of an engine, and remembers on the first rank the active values that it has sent.

    Args:
        bucket_size: bytes of whole weights after which they are broadcast.
    """

    def __init__(self, engine: SparseFSDPEngine, bucket_size: int) -> None:
        self._engine, self._bucket_size = engine, bucket_size
        self._names = engine.rollout_names()
        self._own = {names[0]: name for name, names in self._names.items()}  # the reverse
        self._values: _ActiveValues | None = None
        self._sender: WeightSender | None = None

    def send_whole(self, weights: ExportedWeights, group: WeightBroadcast | None) -> Sent | None:
        """Send all weights and the mask; a collective.

        Args:
            group: on the first rank; None on the others, which help to gather the weights.
        """
        mask = self._engine.optimizer.mask
        nbytes = 0
        pending: list[Whole] = []
        failure: WeightSyncError | None = None
        for name, tensor in weights:
            if group is None or failure is not None:  # the others wait for this rank to help gathering
                continue
            values = tensor.detach()
            if self._values is None:
                self._values = _ActiveValues(mask, values.device)
            values = values.to(SENT) if values.is_floating_point() else values
            self._values.read(self._own.get(name, ""), values)
            if pending and (
                pending[0].values.dtype != values.dtype or sum(w.values.nbytes for w in pending) >= self._bucket_size
            ):
                try:
                    nbytes += _send_bucket(group, pending, is_last=False)
                except WeightSyncError as error:
                    failure = error
                    continue
                pending = []
            pending.append(Whole(name, tuple(values.shape), values))
        self._engine.prime_delta_snapshots()
        if failure is not None:
            raise failure
        if group is None or self._values is None:
            return None
        self._sender = WeightSender.of_values(self._values)
        message = self._sender.mask_message()
        nbytes += _send_message(group, "mask", message, names=self._names)
        nbytes += _send_bucket(group, pending, is_last=True)  # nothing follows for a consumer that ends with it
        return Sent(state_after(message), nbytes, mask.nnz, mask.nnz)

    def send_changes(self, group: WeightBroadcast | None) -> Sent | None:
        """Send the active values, or those that have changed; a collective as `send_whole`, which must come first."""
        changed = 0
        for name, positions, values in self._collected():
            assert self._values is not None
            self._values.write(name, positions, values)
            changed += values.numel()
        if group is None or self._sender is None:
            return None
        message = self._sender.update().wait()
        nbytes = _send_message(group, "update", message)
        return Sent(state_after(message), nbytes, changed, self._sender.mask.nnz)

    def _collected(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the changes of all ranks on the first one: (name, ascending positions, values); none on the others."""
        entries, _ = self._engine.get_per_tensor_param_delta_shard()
        # Tied weights have an entry for each of their names.
        own = [(self._own[slots[0][0]], *rest) for slots, *rest in entries if slots[0][0] in self._own]
        groups = {id(entry[-1]): entry[-1] for entry in own}
        first = torch.distributed.get_rank() == 0
        for key, ranks in groups.items():
            of_group = [entry for entry in own if id(entry[-1]) == key]
            names = [name for name, *_ in of_group]
            counts = torch.cat([entry[2] for entry in of_group])
            positions, values = (torch.cat([entry[i] for entry in of_group]) for i in (3, 4))
            if ranks is None:  # a weight that is not sharded, which the first rank sends
                parts = zip(positions.split(counts.tolist()), values.split(counts.tolist()), strict=True)
            else:
                parts = gather_slot_entries_to_rank0(
                    positions, values, counts.to(values.device), group=ranks, max_round_bytes=self._bucket_size
                )
            if first:
                yield from ((name, *part) for name, part in zip(names, parts, strict=True))


def _send_message(
    group: WeightBroadcast, what: str, message: Message, names: dict[str, list[str]] | None = None
) -> int:
    return group.send({"what": what, "message": message.header(), "names": names}, message.tensors)


def _send_bucket(group: WeightBroadcast, tensors: list[Whole], *, is_last: bool) -> int:
    params, values = whole_bucket(tensors)
    return group.send({"what": "weights", "params": params, "is_last": is_last}, {"values": values})
