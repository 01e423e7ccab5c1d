"""The engine of vLLM's weight transfer that applies the messages of a `WeightSender` to a worker's model.

vLLM creates one engine in each worker. A mask message builds its receiver: the tensors of the mask are found in the
model (destinations.py), and packed layers get plain weights (packed_layers.py). The messages after it write to them. A
message is checked before anything is written. If it is refused, `update_weights` raises, which also ends vLLM's update
session; the weights and the version stay, and generation can go on. All work is done in `update_weights`, because an
exception in `finish_weight_update` would leave vLLM's session open.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...errors import DamagedMessage, ForeignMessage, OutOfOrderMessage
from ...weight_sync import Destination, Message, WeightReceiver
from ...weight_sync.layout import DTYPES, Layout
from .destinations import trace_destinations
from .packed_layers import PackedLayers


@dataclass
class SparseInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on before the first message."""


@dataclass
class SparseUpdateInfo(WeightTransferUpdateInfo):
    """One message.

    Attributes:
        message: `Message.to_bytes()`, as bytes or in base64 (for JSON).
    """

    message: str | bytes


class SparseWeightTransferEngine(WeightTransferEngine[SparseInitInfo, SparseUpdateInfo]):
    """Backend `sparse_opt` of `WeightTransferConfig`."""

    init_info_cls = SparseInitInfo
    update_info_cls = SparseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._packed: PackedLayers | None = None
        self._target: _Target | None = None

    def init_transfer_engine(self, init_info: SparseInitInfo) -> None:
        """Do nothing: the first message brings the mask."""

    def start_weight_update(self) -> None:
        """Do nothing: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finished its work when it returns."""

    def receive_weights(self, update_info: SparseUpdateInfo) -> None:
        """Check and apply one message.

        Raises:
            WeightSyncError: the message is damaged, out of order or foreign, or a weight of the mask cannot be updated
                in this model. The weights and the version have not changed.
        """
        message = Message.from_bytes(_decoded(update_info.message))
        if message.kind == "mask":
            target = self._new_target(message)
            target.receiver.receive(message)
            self._target = target
            return
        if self._target is None:
            raise OutOfOrderMessage(
                f"{message.kind} of version {message.version} reached a worker without a mask, expected a mask message"
            )
        self._target.receive(message)

    def _new_target(self, message: Message) -> _Target:
        if self._packed is None:
            self._packed = PackedLayers(self.model)
        layout = Layout.from_json(message.layout or "")
        weights = {t.name: (t.shape, DTYPES[t.dtype]) for t in layout.tensors if t.nnz}
        with self._packed.as_loaded():
            slices = trace_destinations(self.model, weights)
            for name, pieces in slices.items():
                if not pieces and self.parallel_config.pipeline_parallel_size == 1:
                    raise ForeignMessage(f"{type(self.model).__name__} has no weight {name!r}, which the mask names")
                self._packed.require_known_layout(name, pieces)
        slices = self._packed.keep(slices, self.vllm_config)
        destinations: dict[str, list[Destination]] = {t.name: [] for t in layout.tensors}
        holders = {}
        for name, pieces in slices.items():
            destinations[name] = [Destination(p.target, rows=p.rows, columns=p.columns) for p in pieces]
            holders[name] = self._packed.holding(pieces)
        return _Target(WeightReceiver(None, destinations=destinations), layout, self._packed, holders)

    def shutdown(self) -> None:
        """Release the mask. The weights stay as they are; plain weights of packed layers are kept for the next mask."""
        self._target = None


class _Target:
    """The receiver of one mask, and the layers that are packed again after an update.

    Args:
        holders: name of a weight -> the layers that compute with a packed copy of it.
    """

    def __init__(
        self, receiver: WeightReceiver, layout: Layout, packed: PackedLayers, holders: dict[str, list[nn.Module]]
    ) -> None:
        self.receiver = receiver
        self.layout = layout
        self.packed = packed
        self.holders = holders

    def receive(self, message: Message) -> None:
        self.receiver.receive(message)
        if any(self.holders.values()):
            names = _changed_names(message, self.layout)
            self.packed.repack(dict.fromkeys(layer for name in names for layer in self.holders[name]))


def _changed_names(message: Message, layout: Layout) -> Iterator[str]:
    """Yield the weights of which a message changes elements; all weights of a dtype sent as a whole."""
    for group in layout.groups:
        names = [layout.tensors[i].name for i in group.members]
        if f"{group.dtype}.values" in message.tensors:
            yield from names
        elif f"{group.dtype}.bitmap" in message.tensors:
            bits = np.unpackbits(message.tensors[f"{group.dtype}.bitmap"].cpu().numpy(), bitorder="little")
            counts = np.add.reduceat(bits[: group.nnz], group.starts[:-1], dtype=np.int64)
            yield from (name for name, count in zip(names, counts, strict=True) if count)


def _decoded(message: str | bytes) -> bytes:
    if isinstance(message, bytes):
        return message
    try:
        return base64.b64decode(message, validate=True)
    except binascii.Error as error:
        raise DamagedMessage(f"a message of {len(message)} characters is not base64: {error}") from error
