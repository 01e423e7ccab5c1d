"""The transport by broadcasts of a process group, gloo or NCCL, from the sender to receivers in other processes.

The group has the sender as rank 0 and the receivers as the others. It is made for this purpose, over the store of the
control connection, so that trainer and engines keep the process groups that they have. A receiver that joins or is lost
changes the members; then a new group is made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import DistributedWeightSender
from ..encoding import Entry, Message
from ..receiver import WeightReceiver
from ..sender import WeightSender
from .channel import ReceiverChannel, SenderChannel, tensors_of
from .control import BUSY_SECONDS, first_line

Backend = Literal["gloo", "nccl"]


class BroadcastGroup:
    """A process group for broadcasts from rank 0, in addition to those that the processes have.

    Args:
        store: of rank 0, that all ranks are connected to.
        key: names the group in the store.
        timeout: seconds for a broadcast.
    """

    def __init__(self, store: dist.Store, key: str, rank: int, size: int, backend: Backend, timeout: float) -> None:
        self.key, self._timeout = key, timeout
        store = dist.PrefixStore(f"group/{key}", store)
        if backend == "gloo":
            self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        else:
            options = dist.ProcessGroupNCCL.Options()
            # At its own timeout NCCL ends the process; `broadcast` gives up earlier.
            options._timeout = timedelta(seconds=10 * timeout + 60)
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from rank 0 to the others, which have tensors of the same sizes, and wait until it is done.

        They are contiguous, and on the group's device; those without elements are left out.

        Raises:
            RuntimeError: a broadcast has failed, or they have not all ended within the timeout. The group is of no use
                then.
        """
        parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]  # no backend has all dtypes
        began = time.monotonic()
        for work in [self._backend.broadcast([part]) for part in parts]:
            # `work.wait` does not end with the broadcast: with NCCL it lets only the stream wait.
            while not work.is_completed():
                waited = time.monotonic() - began
                if waited > self._timeout:
                    self._backend.abort()
                    raise RuntimeError(f"a broadcast has not finished within {self._timeout:g} s")
                if waited > BUSY_SECONDS:
                    time.sleep(0.0001)
            work.wait()

    def abort(self) -> None:
        """End the group, also while a broadcast runs.

        gloo frees a group only when its broadcast has failed, for which the host may wait until the timeout.
        """
        self._backend.abort()


class ProcessGroupSender(SenderChannel):
    """Broadcasts the weights of a trainer to receivers in other processes or on other hosts.

    See `SenderChannel` for the methods.

        channel = ProcessGroupSender(WeightSender(optimizer), "10.0.0.1:29600", backend="nccl")
        channel.wait_for_receivers(2)
        for batch in batches:
            ...
            optimizer.step()
            channel.update()

    A receiver that is lost is noticed before a broadcast starts, unless that happens during the transfer itself. Then
    gloo reports it at once or after `timeout`, and NCCL after `timeout`; NCCL may also end the process, as in every
    group (`TORCH_NCCL_ASYNC_ERROR_HANDLING`).

    Args:
        weights, address, timeout: see `SenderChannel`.
        backend: gloo, over TCP from and to the host's memory; or nccl, between GPUs. The receivers use the same one.
        device: of the tensors that are broadcast; default: the CPU for gloo, the current GPU for NCCL.
    """

    def __init__(
        self,
        weights: WeightSender | DistributedWeightSender,
        address: str,
        *,
        backend: Backend = "gloo",
        device: torch.device | str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.transport: Backend = backend
        super().__init__(weights, address, device=_device(backend, device), timeout=timeout)
        self._group: BroadcastGroup | None = None
        self._members: list[int] = []
        self._made = 0

    def _offer(self, message: Message, receivers: Sequence[int]) -> dict[str, Any]:
        if self._group is None or self._members != list(receivers):
            self._drop()
            self._made += 1
            self._members = list(receivers)
        return {"group": str(self._made), "receivers": self._members, "timeout": self.timeout}

    def _transfer(self, tensors: Sequence[Tensor]) -> str | None:
        control, _ = self._connected()
        try:
            on_device = [tensor.to(self._device).contiguous() for tensor in tensors]
            if self._group is None:
                size = 1 + len(self._members)
                self._group = BroadcastGroup(control.store, str(self._made), 0, size, self.transport, self.timeout)
            self._group.broadcast(on_device)
        except RuntimeError as error:
            self._drop()
            return first_line(error)
        return None

    def _drop(self) -> None:
        group, self._group, self._members = self._group, None, []
        if group is not None:
            group.abort()


class ProcessGroupReceiver(ReceiverChannel):
    """Receives the weights that a `ProcessGroupSender` broadcasts. See `ReceiverChannel` for the methods.

        channel = ProcessGroupReceiver(WeightReceiver(model), "10.0.0.1:29600", backend="nccl")
        while channel.receive() is not None:
            ...

    Args:
        weights, address, timeout, name: see `ReceiverChannel`.
        backend, device: as of the sender.
    """

    def __init__(
        self,
        weights: WeightReceiver,
        address: str,
        *,
        backend: Backend = "gloo",
        device: torch.device | str | None = None,
        timeout: float = 60.0,
        name: str | None = None,
    ) -> None:
        self.transport: Backend = backend
        self._device = _device(backend, device)
        super().__init__(weights, address, timeout=timeout, name=name)
        self._group: BroadcastGroup | None = None

    def _fetch(self, command: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Tensor]:
        try:
            if self._group is None or self._group.key != command["group"]:
                self._drop()
                receivers = command["receivers"]
                rank, size = 1 + receivers.index(self._control.number), 1 + len(receivers)
                # With the sender's timeout: it waits for the replies as long.
                timeout = command["timeout"]
                self._group = BroadcastGroup(self._control.store, command["group"], rank, size, self.transport, timeout)
            tensors = tensors_of(entries, self._device)
            self._group.broadcast(tensors.values())
        except RuntimeError:
            self._drop()
            raise
        return tensors

    def _drop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _device(backend: Backend, device: torch.device | str | None) -> torch.device:
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}, expected gloo or nccl")
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
