"""RolloutWeights: the messages that bring a rollout to the trainer's weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from ...errors import WeightSyncError
from ...weight_sync import DistributedWeightSender, Message
from .broadcast import WeightBroadcast
from .engine import ExportedWeights, SparseFSDPEngine
from .flushes import Part, Whole, state_after, whole_bucket

SENT = torch.bfloat16  # verl sends whole weights in this dtype


class Sent(NamedTuple):
    """An update that the first rank has sent.

    Attributes:
        state: of a rollout that has applied it, as of `ChangeReader`.
        nbytes: that were broadcast.
        values, nnz: numbers of the active elements that were sent, and of all.
    """

    state: str
    nbytes: int
    values: int
    nnz: int


class RolloutWeights:
    """Sends the weights of an engine; its methods are collectives of the trainer's ranks.

    Args:
        bucket_size: bytes of whole weights after which they are broadcast.
    """

    def __init__(self, engine: SparseFSDPEngine, bucket_size: int) -> None:
        self._engine, self._bucket_size = engine, bucket_size
        self._sender: DistributedWeightSender | None = None

    def send_whole(self, weights: ExportedWeights, group: WeightBroadcast | None) -> Sent | None:
        """Send all weights and the mask.

        Args:
            group: on the first rank; None on the others, which help to gather the weights.
        """
        nbytes = 0
        pending: list[Whole] = []
        failure: WeightSyncError | None = None
        for name, tensor in weights:
            if group is None or failure is not None:  # the others wait for this rank to help gathering
                continue
            values = tensor.detach()
            values = values.to(SENT) if values.is_floating_point() else values
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
        self._sender = DistributedWeightSender(self._engine.optimizer, dtype=SENT)
        if failure is not None:
            raise failure
        if group is None or self._sender.sender is None:
            return None
        message, mask = self._sender.sender.mask_message(), self._sender.sender.mask
        nbytes += _send_message(group, "mask", message, rollout_tensors(self._engine.module))
        nbytes += _send_bucket(group, pending, is_last=True)  # nothing follows for a consumer that ends with it
        return Sent(state_after(message), nbytes, mask.nnz, mask.nnz)

    def send_changes(self, group: WeightBroadcast | None) -> Sent | None:
        """Send the active values, or those that have changed; `send_whole` must come first."""
        assert self._sender is not None
        update = self._sender.update()
        if group is None or self._sender.sender is None or update is None:
            return None
        message = update.wait()
        nbytes = _send_message(group, "update", message)
        return Sent(state_after(message), nbytes, message.n_values, self._sender.sender.mask.nnz)


def rollout_tensors(model: nn.Module) -> dict[str, list[list[Part]]]:
    """Return how verl sends each parameter, by its name in the mask: once, and tied weights under each of their names.

    Each time it is one tensor, or the experts of a fused parameter one by one, which together are the flattened
    parameter.
    """
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(param, []).append(name)
    kind = model.config.model_type  # type: ignore[union-attr]  # of every model of transformers

    def parts(name: str, param: nn.Parameter) -> list[Part]:
        sent = convert_weight_keys({name: torch.empty(param.shape, dtype=SENT, device="meta")}, model)
        return [(part, tuple(tensor.shape)) for part, tensor in unfuse_moe_params(sent.items(), kind)]

    return {names[0]: [parts(name, param) for name in names] for param, names in by_parameter.items()}


def _send_message(
    group: WeightBroadcast, what: str, message: Message, parts: dict[str, list[list[Part]]] | None = None
) -> int:
    return group.send({"what": what, "message": message.header(), "parts": parts}, message.tensors)


def _send_bucket(group: WeightBroadcast, tensors: list[Whole], *, is_last: bool) -> int:
    params, values = whole_bucket(tensors)
    return group.send({"what": "weights", "params": params, "is_last": is_last}, {"values": values})
