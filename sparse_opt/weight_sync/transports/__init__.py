"""Transports of weights from a trainer to inference engines; docs/weight_sync.md has a table to choose one.

process_group.py   broadcasts of gloo or NCCL, between processes and hosts that share no process group
cuda_ipc.py        handles of GPU memory, between processes of one host
folder.py          a delta log, which any number of receivers follow
by_name.py         the receiver of a transport that is given by its name

For any other one, `Message.to_bytes` and `WeightReceiver.receive` are enough.
"""

from .by_name import TRANSPORTS, open_receiver
from .cuda_ipc import CudaIpcReceiver, CudaIpcSender, SharedMessage, open_shared
from .folder import FolderReceiver
from .process_group import ProcessGroupReceiver, ProcessGroupSender

__all__ = [
    "TRANSPORTS",
    "CudaIpcReceiver",
    "CudaIpcSender",
    "FolderReceiver",
    "ProcessGroupReceiver",
    "ProcessGroupSender",
    "SharedMessage",
    "open_receiver",
    "open_shared",
]
