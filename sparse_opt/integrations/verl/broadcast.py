"""WeightBroadcast: weights and messages from the trainer's first rank to the rollout workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import WeightSyncError
from ...weight_sync.encoding import listed, tensor_list
from ...weight_sync.transports.channel import tensors_of
from ...weight_sync.transports.control import first_line, split_address
from ...weight_sync.transports.process_group import BroadcastGroup


def open_store(address: str, timeout: float, *, is_master: bool = False) -> dist.TCPStore:
    """Connect to the store at host:port, which the members of groups meet at, or open it there."""
    host, port = split_address(address)
    return dist.TCPStore(
        host.strip("[]"), port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


class WeightBroadcast:
    """Broadcasts weights and messages from rank 0 to the other ranks: NCCL between GPUs, gloo between CPUs.

    Args:
        store, key: see `BroadcastGroup`.
        device: of the tensors that are broadcast.
        timeout: of a broadcast, in seconds.

    Attributes:
        has_failed: whether a broadcast has failed, after which the group cannot be used.
    """

    has_failed = False

    def __init__(self, store: dist.Store, key: str, rank: int, size: int, device: torch.device, timeout: float) -> None:
        self._device = device
        self._members = f"rank {rank} of the {size} members (the trainer is rank 0, the others are rollout workers)"
        self._group = BroadcastGroup(store, key, rank, size, "gloo" if device.type == "cpu" else "nccl", timeout)

    def send(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        """Broadcast what JSON can hold, and tensors by name; return the bytes of both.

        Raises:
            WeightSyncError: it has failed, or not ended within the timeout.
        """
        data = json.dumps({**content, "tensors": listed(tensors)}).encode()
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        self._broadcast(torch.tensor([text.numel()], dtype=torch.int64, device=self._device), text)
        self._broadcast(*(tensor.to(self._device).contiguous() for tensor in tensors.values()))
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
        tensors = tensors_of(tensor_list(content), self._device)
        self._broadcast(*tensors.values())
        return content, tensors

    def close(self) -> None:
        """End the group, also while a broadcast runs."""
        self._group.abort()

    def _broadcast(self, *tensors: Tensor) -> None:
        try:
            self._group.broadcast(tensors)
        except RuntimeError as error:
            self.has_failed = True
            raise WeightSyncError(
                f"a broadcast of weights has failed at {self._members}: {first_line(error)}; another member has "
                "ended or does not receive, and the next update makes a new group and sends all weights"
            ) from error
