"""The engine of vLLM's weight transfer that applies messages of a `WeightSender`, or deltas, to a worker's model.

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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.device_allocator import get_mem_allocator_instance
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...delta import SparseDelta
from ...errors import DamagedMessage, DeltaError, WeightSyncError
from ...weight_sync import DeltaSwitch, Destination, Message, PendingMessage, WeightReceiver
from ...weight_sync.encoding import Layout, changed_tensors
from ...weight_sync.transports import TRANSPORTS, FolderReceiver, open_receiver
from ...weight_sync.transports.channel import ReceiverChannel
from ..loader_trace import trace_layout
from .connections import kept_by_all
from .packed_layers import PackedLayers, checkpoint_of

_Outcome = tuple[str | None, bool]  # the error of a worker, and whether its weights are those that it had before


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
    """One message, an action with a delta, or a round of the transport.

    Attributes:
        message: `Message.to_bytes()`, as bytes or in base64 (for JSON); None for other transports than "bytes".
        delta: `{"register": name, "source": folder or name on the hub}`, `{"remove": name}` or `{"switch": name}`, with
            None for the base.
    """

    message: str | bytes | None = None
    delta: dict[str, str | None] | None = None


@dataclass(eq=False)
class _OfModel:
    """What an engine knows of the weights of a model; an attribute of the model."""

    weights: ModelWeights
    receiver: VLLMReceiver
    deltas: DeltaSwitch


class SparseWeightTransferEngine(WeightTransferEngine[SparseInitInfo, SparseUpdateInfo]):
    """Backend `sparse_opt` of `WeightTransferConfig`."""

    init_info_cls = SparseInitInfo
    update_info_cls = SparseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # A worker that ends drops its model, whose memory must then be free: in sleep mode vLLM refuses a second engine
        # of a process otherwise. So this engine has no reference to it, and what it knows of the weights ends with it.
        self.model: Any = weakref.proxy(model)
        self._default_model = self.model
        weights = ModelWeights(model, vllm_config)
        vars(model)["sparse_opt"] = _OfModel(weights, VLLMReceiver(weights), DeltaSwitch(weights.tensors))
        self._channel: ReceiverChannel | FolderReceiver | None = None
        self._timeout = 0.0

    @property
    def _of_model(self) -> _OfModel:
        found: _OfModel = vars(self.model)["sparse_opt"]
        return found

    @property
    def _deltas(self) -> DeltaSwitch:
        return self._of_model.deltas

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
            transport, self._of_model.receiver, address, device=self.device, timeout=self._timeout, name=name
        )

    def start_weight_update(self) -> None:
        """Do nothing: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finished its work when it returns."""

    def receive_weights(self, update_info: SparseUpdateInfo) -> None:
        """Check and apply one message, or what the sender of the transport sends in its next round, or use a delta.

        Raises:
            WeightSyncError: a message is damaged, out of order or foreign, a weight of the mask cannot be updated in
                this model, or the engine sleeps. The weights and the version have not changed.
            DeltaError: as the methods of `DeltaSwitch`. The weights and the active delta have not changed.
        """
        if update_info.delta is not None:
            self._use_delta(**update_info.delta)
        else:
            self._on_all_workers(lambda: self._receive(update_info))

    def _receive(self, update_info: SparseUpdateInfo) -> None:
        self._require_awake()
        if (active := self._deltas.active) is not None:
            raise WeightSyncError(f"delta {active!r} is active: switch to the base before the updates of a trainer")
        if update_info.message is not None:
            self._of_model.receiver.receive(_decoded(update_info.message))
        elif self._channel is None:
            raise WeightSyncError("an update came without a message, and the engine is connected to no sender")
        elif self._channel.receive(self._timeout) is None:
            raise WeightSyncError("the sender has closed its channel")

    def _use_delta(self, source: str | None = None, **action: str | None) -> None:
        """Register, remove or switch to a delta, on all workers or on none."""
        deltas, before = self._deltas, self._deltas.active
        match action:
            case {"register": str(name)} if source is not None:
                self._on_all_workers(lambda: self._register(name, source), undo=lambda: deltas.remove(name))
            case {"remove": str(name)}:
                self._on_all_workers(lambda: deltas.remove(name))
            case {"switch": target}:
                self._on_all_workers(lambda: self._switch(target), undo=lambda: self._switch(before))
            case _:
                self._on_all_workers(lambda: _refuse(action))

    def _register(self, name: str, source: str) -> None:
        self._require_awake()
        delta = SparseDelta.from_pretrained(source)
        self._deltas.register(name, delta, checkpoint_of(self.model, self.vllm_config), self._of_model.weights.find)

    def _switch(self, name: str | None) -> None:
        self._require_awake()
        before = self._deltas.active
        changed = self._deltas.switch(name)
        try:
            self._of_model.weights.repack(changed)
        except BaseException:
            self._of_model.weights.repack(self._deltas.switch(before))
            raise

    def _require_awake(self) -> None:
        """Raise WeightSyncError if sleep mode has released the memory of the weights, which must not be written."""
        if not self.vllm_config.model_config.enable_sleep_mode:
            return
        held = get_mem_allocator_instance().pointer_to_data.values()
        if any(data.tag == "weights" and data.is_asleep for data in held):
            raise WeightSyncError("the engine sleeps: wake it up before its weights are changed")

    def _on_all_workers(self, work: Callable[[], None], undo: Callable[[], None] | None = None) -> None:
        """Do this worker's part of some work.

        Args:
            undo: is called if the work of this worker has succeeded and that of another one has not.

        Raises:
            WeightSyncError: the work of one of several workers has failed; on the last worker alone, with the errors of
                all. A single worker raises its own error.
        """
        if self.parallel_config.world_size == 1:
            work()
            return
        outcome = _outcome_of(work)
        outcomes = _of_all_workers(outcome)
        if undo is not None and any(text is not None for text, _ in outcomes):
            if outcome[0] is None:
                text, _ = _outcome_of(undo)
                outcome = text, text is None
            outcomes = _of_all_workers(outcome)
        errors = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
        if errors and get_tp_group().is_last_rank and get_pp_group().is_last_rank:
            n, texts = len(outcomes), "; ".join(dict.fromkeys(errors.values()))
            kept = all(kept for _, kept in outcomes)
            whose = kept_by_all(n) if kept else f"failed on workers {', '.join(map(str, errors))} of {n}"
            raise WeightSyncError(f"{texts}; {whose}")

    def shutdown(self) -> None:
        """Release the connection. The weights stay as they are."""
        self._disconnect()

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if isinstance(channel, ReceiverChannel):
            channel.close()


class ModelWeights:
    """Where a model in vLLM has the weights of its checkpoint, and the layers that are to be packed after a change.

    Args:
        model: as vLLM has loaded it.
        vllm_config: vLLM's configuration of it.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._packed: PackedLayers | None = None
        # By name of each weight that was found: the layers that compute with a packed copy of it.
        self._holders: dict[str, list[nn.Module]] = {}
        # Layers that are to be packed again; they remain here if vLLM fails to pack one of them.
        self._stale: dict[nn.Module, None] = {}

    def find(self, layout: Layout) -> dict[str, list[Destination]]:
        """Return where vLLM has the weights of a mask. Packed layers get plain weights."""
        if self._packed is None:
            self._packed = PackedLayers(self._model)
        parallel = self._vllm_config.parallel_config
        is_whole = parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel
        config = self._vllm_config.model_config.hf_config
        with self._packed.as_loaded():
            slices = trace_layout(self._model, layout, is_whole=is_whole, config=config)
            for name, pieces in slices.items():
                self._packed.require_known_layout(name, pieces)
        slices = self._packed.keep(slices, self._vllm_config)
        self._holders.update({name: self._packed.holding(pieces) for name, pieces in slices.items()})
        return slices

    def are_packed(self, layout: Layout) -> bool:
        """Whether layers compute with packed copies of weights that were found."""
        return any(self._holders[tensor.name] for tensor in layout.tensors if tensor.nnz)

    def repack(self, names: Iterable[str]) -> None:
        """Pack the layers again whose weights have changed."""
        self._stale.update(dict.fromkeys(layer for name in names for layer in self._holders[name]))
        if self._packed is not None:
            self._packed.repack(self._stale)
        self._stale.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the model has now, and the plain weights of packed layers."""
        yield from self._model.parameters()
        yield from self._model.buffers()
        if self._packed is not None:
            yield from self._packed.kept()


class VLLMReceiver(WeightReceiver):
    """A receiver of the weights of a model in vLLM."""

    def __init__(self, weights: ModelWeights) -> None:
        super().__init__(None, destinations=self._find)
        self._places = weights
        self._found: Layout | None = None  # of the last mask that was tried
        self._followed: Layout | None = None

    def receive(self, message: Message | PendingMessage | bytes | bytearray | memoryview) -> int | None:
        """Apply a message as `WeightReceiver.receive` does, and pack the layers again that it has changed."""
        message = message.wait() if isinstance(message, Message | PendingMessage) else Message.from_bytes(message)
        version = super().receive(message)
        if message.kind == "mask":
            self._followed = self._found
        elif (layout := self._followed) is not None and self._places.are_packed(layout):
            changed = changed_tensors(message, layout, torch.device("cpu"))
            self._places.repack(tensor.entry.name for tensor in changed)
        return version

    def _find(self, layout: Layout) -> dict[str, list[Destination]]:
        self._found = layout
        return self._places.find(layout)


def _refuse(action: Mapping[str, str | None]) -> None:
    raise WeightSyncError(f"delta is {dict(action)}, expected register and source, remove, or switch")


def _outcome_of(work: Callable[[], None]) -> _Outcome:
    try:
        work()
    except Exception as error:  # of any kind: the other workers wait for the outcome of this one
        return f"{type(error).__name__}: {error}", isinstance(error, WeightSyncError | DeltaError)
    return None, False


def _of_all_workers(outcome: _Outcome) -> list[_Outcome]:
    """Return the outcomes of all workers in the order of their ranks."""
    outcomes = [outcome]
    for group in (get_tp_group(), get_pp_group()):
        parts: list[Any] = [None] * group.world_size
        dist.all_gather_object(parts, outcomes, group=group.cpu_group)
        outcomes = [of_worker for part in parts for of_worker in part]
    return outcomes


def _decoded(message: str | bytes) -> bytes:
    if isinstance(message, bytes):
        return message
    try:
        return base64.b64decode(message, validate=True)
    except binascii.Error as error:
        raise DamagedMessage(f"a message of {len(message)} characters is not base64: {error}") from error
