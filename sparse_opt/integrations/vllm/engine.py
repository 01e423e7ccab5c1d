"""The engine of vLLM's weight transfer that applies the messages of a `WeightSender` to a worker's model.

vLLM creates one engine in each worker. When a mask message arrives, the tensors of the mask are found in the model
(loader_trace.py), and packed layers get plain weights (packed_layers.py). Later messages write to them. A message is
checked before anything is written. If it is refused, `update_weights` raises, which also ends vLLM's update
session; the weights and the version stay, and generation can go on. All work is done in `update_weights`, because an
exception in `finish_weight_update` would leave vLLM's session open.

Of several workers the last alone raises, for all of them. vLLM reads their answers in the order of ranks, up to the
first error; those behind it would stay in their queues, and be taken for the answers to the next call. The other
workers stay in vLLM's session until the `finish_weight_update` with which a failed update ends.
"""

from __future__ import annotations

import base64
import binascii
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...errors import DamagedMessage, WeightSyncError
from ...weight_sync import Destination, Message, PendingMessage, WeightReceiver
from ...weight_sync.encoding import Layout, changed_tensors
from ...weight_sync.transports import TRANSPORTS, FolderReceiver, open_receiver
from ...weight_sync.transports.channel import ReceiverChannel
from ..loader_trace import trace_layout
from .connections import kept_by_all
from .packed_layers import PackedLayers


@dataclass
class SparseInitInfo(WeightTransferInitInfo):
    """How messages arrive.

    Attributes:
        transport: "bytes" (in the requests), or one of `weight_sync.transports.TRANSPORTS`: "gloo", "nccl", "cuda_ipc"
            or "folder".
        address: host:port of the sender for gloo, nccl and cuda_ipc; the path of the delta log for folder.
        timeout: seconds to connect, and to wait for messages during an update.
    """

    transport: str = "bytes"
    address: str = ""
    timeout: float = 60.0


@dataclass
class SparseUpdateInfo(WeightTransferUpdateInfo):
    """One message, or a round of the transport.

    Attributes:
        message: `Message.to_bytes()`, as bytes or in base64 (for JSON); None for other transports than "bytes".
    """

    message: str | bytes | None = None


class SparseWeightTransferEngine(WeightTransferEngine[SparseInitInfo, SparseUpdateInfo]):
    """Backend `sparse_opt` of `WeightTransferConfig`."""

    init_info_cls = SparseInitInfo
    update_info_cls = SparseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._weights = VLLMReceiver(model, vllm_config)
        self._channel: ReceiverChannel | FolderReceiver | None = None
        self._timeout = 0.0

    def init_transfer_engine(self, init_info: SparseInitInfo) -> None:
        """Connect to the sender; for the transport "bytes" there is nothing to do.

        Raises:
            WeightSyncError: no sender responds at the address.
            ValueError: the transport is unknown, or is "folder" for an engine of several workers, which could read
                different numbers of steps. Several workers raise a WeightSyncError in its place.
        """
        self._on_all_workers(lambda: self._connect(init_info))

    def _connect(self, init_info: SparseInitInfo) -> None:
        self._disconnect()
        self._timeout = init_info.timeout
        transport, address = init_info.transport, init_info.address
        name = f"rank {self.parallel_config.rank} of the vLLM engine on {socket.gethostname()}"
        if transport == "bytes":
            return
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}, expected one of bytes, {', '.join(TRANSPORTS)}")
        if transport == "folder" and self.parallel_config.world_size > 1:
            raise ValueError(
                f"transport is 'folder' for an engine of {self.parallel_config.world_size} workers, which may read "
                "different numbers of steps: use another transport, or one worker"
            )
        self._channel = open_receiver(
            transport, self._weights, address, device=self.device, timeout=self._timeout, name=name
        )

    def start_weight_update(self) -> None:
        """Do nothing: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finished its work when it returns."""

    def receive_weights(self, update_info: SparseUpdateInfo) -> None:
        """Check and apply one message, or what the sender of the transport sends in its next round.

        Raises:
            WeightSyncError: a message is damaged, out of order or foreign, or a weight of the mask cannot be updated
                in this model. The weights and the version have not changed.
        """
        self._on_all_workers(lambda: self._receive(update_info))

    def _receive(self, update_info: SparseUpdateInfo) -> None:
        if update_info.message is not None:
            self._weights.receive(_decoded(update_info.message))
        elif self._channel is None:
            raise WeightSyncError("an update came without a message, and the engine is connected to no sender")
        elif self._channel.receive(self._timeout) is None:
            raise WeightSyncError("the sender has closed its channel")

    def _on_all_workers(self, work: Callable[[], None]) -> None:
        """Do this worker's part of some work.

        Raises:
            WeightSyncError: the work of one of several workers has failed; on the last worker alone, with the errors of
                all. A single worker raises its own error.
        """
        if self.parallel_config.world_size == 1:
            work()
            return
        outcome: str | None = None
        refused = False
        try:
            work()
        except Exception as error:  # of any kind: the other workers wait for the outcome of this one
            outcome, refused = f"{type(error).__name__}: {error}", isinstance(error, WeightSyncError)
        outcomes = [(outcome, refused)]
        for group in (get_tp_group(), get_pp_group()):
            parts: list[Any] = [None] * group.world_size
            dist.all_gather_object(parts, outcomes, group=group.cpu_group)
            outcomes = [of_worker for part in parts for of_worker in part]
        errors = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
        if errors and get_tp_group().is_last_rank and get_pp_group().is_last_rank:
            n, texts = len(outcomes), "; ".join(dict.fromkeys(errors.values()))
            kept = all(refused for _, refused in outcomes)
            whose = kept_by_all(n) if kept else f"failed on workers {', '.join(map(str, errors))} of {n}"
            raise WeightSyncError(f"{texts}; {whose}")

    def shutdown(self) -> None:
        """Release the connection. The weights stay as they are."""
        self._disconnect()

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if isinstance(channel, ReceiverChannel):
            channel.close()


class VLLMReceiver(WeightReceiver):
    """A receiver of the weights of a model in vLLM.

    Args:
        model: as vLLM has loaded it.
        vllm_config: vLLM's configuration of it.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        super().__init__(None, destinations=self._find)
        self._model = model
        self._vllm_config = vllm_config
        self._packed: PackedLayers | None = None
        # Of the last mask that was tried, and of the mask that is followed: the layout, and by name of the weight the
        # layers that compute with a packed copy of it.
        self._found: tuple[Layout, dict[str, list[nn.Module]]] | None = None
        self._followed: tuple[Layout, dict[str, list[nn.Module]]] | None = None
        # Layers that are to be packed again; they remain here if vLLM fails to pack one of them.
        self._stale: dict[nn.Module, None] = {}

    def receive(self, message: Message | PendingMessage | bytes | bytearray | memoryview) -> int | None:
        """Apply a message as `WeightReceiver.receive` does, and pack the layers again that it has changed."""
        message = message.wait() if isinstance(message, Message | PendingMessage) else Message.from_bytes(message)
        version = super().receive(message)
        if message.kind == "mask":
            self._followed = self._found
        elif self._packed is not None and self._followed is not None:
            layout, holders = self._followed
            changed = changed_tensors(message, layout, torch.device("cpu")) if any(holders.values()) else ()
            names = [tensor.entry.name for tensor in changed]
            self._stale.update(dict.fromkeys(layer for name in names for layer in holders[name]))
            self._packed.repack(self._stale)
            self._stale.clear()
        return version

    def _find(self, layout: Layout) -> dict[str, list[Destination]]:
        """Return where vLLM has the weights of a mask."""
        if self._packed is None:
            self._packed = PackedLayers(self._model)
        is_whole = self._vllm_config.parallel_config.pipeline_parallel_size == 1
        with self._packed.as_loaded():
            slices = trace_layout(self._model, layout, is_whole=is_whole)
            for name, pieces in slices.items():
                self._packed.require_known_layout(name, pieces)
        slices = self._packed.keep(slices, self._vllm_config)
        self._found = layout, {name: self._packed.holding(pieces) for name, pieces in slices.items()}
        return slices


def _decoded(message: str | bytes) -> bytes:
    if isinstance(message, bytes):
        return message
    try:
        return base64.b64decode(message, validate=True)
    except binascii.Error as error:
        raise DamagedMessage(f"a message of {len(message)} characters is not base64: {error}") from error
