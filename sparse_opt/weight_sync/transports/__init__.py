"""Transports of weights from a trainer to inference engines; docs/weight_sync.md has a table to choose one.

process_group.py   broadcasts of gloo or NCCL, between processes and hosts that share no process group
cuda_ipc.py        handles of GPU memory, between processes of one host
folder.py          a delta log, which any number of receivers follow

For any other one, `Message.to_bytes` and `WeightReceiver.receive` are enough.
"""

from __future__ import annotations

from typing import get_args

import torch

from ..receiver import WeightReceiver
from .channel import ReceiverChannel
from .control import TransportName
from .cuda_ipc import CudaIpcReceiver, CudaIpcSender
from .folder import FolderReceiver
from .process_group import ProcessGroupReceiver, ProcessGroupSender

__all__ = [
    "TRANSPORTS",
    "CudaIpcReceiver",
    "CudaIpcSender",
    "FolderReceiver",
    "ProcessGroupReceiver",
    "ProcessGroupSender",
    "open_receiver",
]

TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)


def open_receiver(
    transport: str,
    weights: WeightReceiver,
    address: str,
    *,
    device: torch.device | str | None = None,
    timeout: float = 60.0,
    name: str | None = None,
) -> ReceiverChannel | FolderReceiver:
    """Connect a receiver of weights to the sender of a transport.

    Args:
        transport: one of `TRANSPORTS`: what `SenderChannel.transport` returns, or "folder".
        weights: the receiver of the weights.
        address: host:port of the sender; for "folder", the path of the delta log.
        device: GPU for "nccl"; default: the current one. The other transports do not use it.
        timeout, name: see `ReceiverChannel`; "folder" does not use them.

    Raises:
        ValueError: there is no transport of this name.
        WeightSyncError: no sender responds at the address.
    """
    if transport == "gloo":
        return ProcessGroupReceiver(weights, address, backend="gloo", timeout=timeout, name=name)
    if transport == "nccl":
        return ProcessGroupReceiver(weights, address, backend="nccl", device=device, timeout=timeout, name=name)
    if transport == "cuda_ipc":
        return CudaIpcReceiver(weights, address, timeout=timeout, name=name)
    if transport == "folder":
        return FolderReceiver(weights, address)
    raise ValueError(f"transport is {transport!r}, expected one of {', '.join(TRANSPORTS)}")
