"""BroadcastGroup: a process group of its own from the trainer's first rank to the rollout workers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import WeightSyncError
from ...tensors import dtype_name
from ...weight_sync.message import tensor_list
from ...weight_sync.transports.control import first_line
from ...weight_sync.transports.process_group import wait_for


def listen(host: str, timeout: float) -> dist.TCPStore:
    """Open a store on a free port of this host, which the members of groups meet at."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def connect(address: str, timeout: float) -> dist.TCPStore:
    """Connect to the store at host:port."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


class BroadcastGroup:
    """Broadcasts from rank 0 to the other ranks: NCCL between GPUs, gloo between CPUs.

    The ranks have process groups already, of the trainer or of a replica, which have other members.

    Args:
        store: of rank 0, that all ranks are connected to.
        key: name of the group in the store.
        device: of the tensors that are broadcast.
        timeout: of a broadcast, in seconds.

    Attributes:
        has_failed: whether a broadcast has failed, after which the group cannot be used.
    """

    has_failed = False

    def __init__(self, store: dist.Store, key: str, rank: int, size: int, device: torch.device, timeout: float) -> None:
        self.key, self._device, self._timeout = key, device, timeout
        self._members = f"rank {rank} of the {size} members (the trainer is rank 0, the others are rollout workers)"
        store = dist.PrefixStore(key, store)
        if device.type == "cpu":
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        else:
            options = dist.ProcessGroupNCCL.Options()
            # At its own timeout NCCL ends the process; `_broadcast` gives up earlier.
            options._timeout = timedelta(seconds=10 * timeout + 60)
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def send(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Broadcast what JSON can hold, and tensors by name; return the bytes of both.

        Raises:
            WeightSyncError: it has failed, or not ended within the timeout.
        """
        entries = [[name, dtype_name(tensor), list(tensor.shape)] for name, tensor in tensors.items()]
        data = json.dumps({**content, "tensors": json.dumps(entries)}).encode()
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        self._broadcast(torch.tensor([text.numel()], dtype=torch.int64, device=self._device))
        self._broadcast(text)
        for tensor in tensors.values():
            self._broadcast(tensor.to(self._device).contiguous())
        return text.numel() + sum(tensor.nbytes for tensor in tensors.values())

    def receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Receive what rank 0 sends: the content, and the tensors by name, in new memory.

        Raises:
            WeightSyncError: as `send`.
        """
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._broadcast(text)
        content: dict[str, Any] = json.loads(bytes(text.cpu().numpy()))
        tensors = {}
        for name, dtype, shape in tensor_list(content):
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._broadcast(tensors[name])
        return content, tensors

    def close(self) -> None:
        """End the group, also while a broadcast runs."""
        self._group.abort()

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():  # bytes, because no backend sends all dtypes
            try:
                work = self._group.broadcast([tensor.view(-1).view(torch.uint8)])
                wait_for(work, self._group, time.monotonic(), self._timeout)
            except RuntimeError as error:
                self.has_failed = True
                raise WeightSyncError(
                    f"a broadcast of weights has failed at {self._members}: {first_line(error)}; another member has "
                    "ended or does not receive, and the next update makes a new group and sends all weights"
                ) from error
