"""The transport by CUDA IPC, between processes of one host: the receivers copy from the sender's GPU memory."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...errors import WeightSyncError
from ..distributed import DistributedWeightSender
from ..encoding import Entry, Message
from ..sender import WeightSender
from .channel import ReceiverChannel, SenderChannel, tensors_of


class CudaIpcSender(SenderChannel):
    """Sends the weights of a trainer to receivers on the same host, which copy them from this process's GPU.

    See `SenderChannel` for the methods. A message is copied into a buffer that each receiver has opened once, and
    that is kept between updates: up to 2 bytes per active element in bf16.

    Args:
        weights, address, timeout: see `SenderChannel`.
        device: GPU for the messages; default: the current one.
    """

    transport = "cuda_ipc"

    def __init__(
        self,
        weights: WeightSender | DistributedWeightSender,
        address: str,
        *,
        device: torch.device | str | None = None,
        timeout: float = 60.0,
    ) -> None:
        gpu = torch.device(device or torch.device("cuda", torch.cuda.current_device()))
        super().__init__(weights, address, device=gpu, timeout=timeout)
        self._buffer: Tensor | None = None
        self._has_mask = False  # the buffer
        self._made = 0  # buffers
        self._holders: set[int] = set()  # receivers that have opened the buffer

    def _offer(self, message: Message, receivers: Sequence[int]) -> dict[str, Any]:
        data = [_bytes_of(tensor.to(self._device)) for tensor in message.tensors.values()]
        sizes = [part.numel() for part in data]
        # The buffer of a mask is larger than every update needs.
        if self._buffer is None or self._buffer.numel() < sum(sizes) or self._has_mask:
            self._drop()
            self._buffer = torch.empty(max(sum(sizes), 1), dtype=torch.uint8, device=self._device)
            self._made += 1
        self._has_mask = message.kind == "mask"
        for place, part in zip(self._buffer[: sum(sizes)].split(sizes), data, strict=True):
            place.copy_(part)
        torch.cuda.current_stream(self._device).synchronize()
        new = {str(r): _exported(self._buffer) for r in receivers if r not in self._holders}
        self._holders.update(receivers)
        return {"buffer": self._made, "memory": new}

    def _drop(self) -> None:
        if self._buffer is not None:
            self._buffer, self._holders = None, set()
            torch.cuda.ipc_collect()


class CudaIpcReceiver(ReceiverChannel):
    """Receives the weights of a `CudaIpcSender` on the same host. See `ReceiverChannel` for the methods.

    Args:
        weights, address, timeout, name: see `ReceiverChannel`. The process must see the sender's GPU; the receiver's
            weights may be on another one.
    """

    transport = "cuda_ipc"
    _buffer: Tensor | None = None  # the sender's memory
    _number = 0  # of the buffer

    def _fetch(self, command: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Tensor]:
        memory = command["memory"].get(str(self._control.number))
        if memory is not None:
            self._buffer, self._number = None, command["buffer"]  # closes the one before
            self._buffer = _opened(memory)
        if self._buffer is None or self._number != command["buffer"]:
            # An error of the transport: the sender sends the message again, in a new buffer.
            raise RuntimeError(f"the sender's buffer {command['buffer']} could not be opened before")
        gpu = torch.device("cuda", torch.cuda.current_device())
        tensors = tensors_of(entries, gpu)
        sizes = [tensor.nbytes for tensor in tensors.values()]
        if sum(sizes) > self._buffer.numel():
            raise WeightSyncError(
                f"a message by CUDA IPC has {self._buffer.numel()} bytes, expected {sum(sizes)} by its header"
            )
        for tensor, part in zip(tensors.values(), self._buffer[: sum(sizes)].split(sizes), strict=True):
            _bytes_of(tensor).copy_(part)
        torch.cuda.current_stream(gpu).synchronize()
        return tensors

    def _drop(self) -> None:
        self._buffer = None


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _exported(buffer: Tensor) -> dict[str, Any]:
    """Return what `_opened` takes, as JSON values; a new one for each process that opens the memory."""
    # The arguments of rebuild_cuda_tensor but the classes, the dtype and the number of the device.
    _, arguments = reduce_tensor(buffer)
    handles = [base64.b64encode(a).decode("ascii") if isinstance(a, bytes) else a for a in arguments[7:]]
    return {"device": _uuid(buffer.device.index), "numel": buffer.numel(), "first": arguments[3], "handles": handles}


def _opened(memory: Mapping[str, Any]) -> Tensor:
    """Return the bytes [n] of another process's GPU memory.

    Raises:
        WeightSyncError: this process does not see the GPU.
    """
    device = _device_of(memory["device"])
    handles = [base64.b64decode(a, validate=True) if isinstance(a, str) else a for a in memory["handles"]]
    storage = torch.storage.TypedStorage
    buffer: Tensor = rebuild_cuda_tensor(
        Tensor, (memory["numel"],), (1,), memory["first"], storage, torch.uint8, device, *handles
    )
    return buffer


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _device_of(uuid: str) -> int:
    """Return this process's number of a GPU, which may differ from that of another process."""
    seen = [_uuid(i) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise WeightSyncError(
            f"the message is on GPU {uuid}, which this process does not see (it sees {', '.join(seen) or 'none'}): "
            "CUDA IPC needs the same host, and the GPU in CUDA_VISIBLE_DEVICES"
        )
    return seen.index(uuid)
