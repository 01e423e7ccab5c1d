"""The transport by broadcasts of a process group, gloo or NCCL, from the sender to receivers in other processes.

The group has the sender as rank 0 and the receivers as the others. It is made for this purpose, over the store of the
control connection, so that trainer and engines keep the process groups that they have. A receiver that joins or is lost
changes the members; then a new group is made.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DamagedMessage
from ..arriving import Begun, Written
from ..distributed import DistributedWeightSender
from ..message import TOTALS, Entry, Message, checked_entries
from ..receiver import WeightReceiver
from ..sender import Announcement, PendingMessage, WeightSender
from .channel import SenderChannel
from .control import BUSY_SECONDS, TransportName, first_line
from .receiver_channel import ReceiverChannel, tensors_of

Backend = Literal["gloo", "nccl"]


def wait_for(work: Any, backend: Any, began: float, timeout: float) -> None:
    """Wait until a broadcast has ended, which `work.wait` does not: with NCCL it lets only the stream wait.

    Args:
        backend: of the group; aborted at the timeout.
        began: `time.monotonic()` when the waiting began.

    Raises:
        RuntimeError: it has failed, or has not ended within `timeout` seconds.
    """
    while not work.is_completed():
        waited = time.monotonic() - began
        if waited > timeout:
            backend.abort()
            raise RuntimeError(f"a broadcast has not finished within {timeout:g} s")
        if waited > BUSY_SECONDS:
            time.sleep(0.0001)
    work.wait()


class _Group:
    """A group for broadcasts from rank 0. Errors and timeouts are RuntimeErrors, and end the group."""

    def __init__(self, store: dist.Store, key: str, rank: int, size: int, backend: Backend, timeout: float) -> None:
        self.key, self._timeout = key, timeout
        store = dist.PrefixStore(f"group/{key}", store)
        if backend == "gloo":
            self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        else:
            options = dist.ProcessGroupNCCL.Options()
            # At its own timeout NCCL ends the process. `finish` gives up by itself; before it, a receiver may wait long
            # for the message of a broadcast that it has begun.
            options._timeout = timedelta(days=1)
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)

    def begin(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Begin to broadcast tensors from rank 0 to the others, which have tensors of the same sizes.

        In the order of the current stream. The tensors are contiguous, and on the group's device; those without
        elements are left out. Returns what `finish` takes.
        """
        parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        return [self._backend.broadcast([part]) for part in parts]

    def finish(self, works: Iterable[Any]) -> None:
        """Wait until broadcasts are done. Raises RuntimeError if one fails, or after the timeout."""
        began = time.monotonic()
        for work in works:
            wait_for(work, self._backend, began, self._timeout)

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
        self._backend = backend
        super().__init__(weights, address, device=_device(backend, device), timeout=timeout)
        self._group: _Group | None = None
        self._members: list[int] = []
        self._made = 0
        self._begun: tuple[list[Any], list[Tensor]] | None = None  # broadcasts of announced tensors, and these

    @property
    def transport(self) -> TransportName:
        return self._backend

    def _offer(self, message: Message, receivers: Sequence[int]) -> dict[str, Any]:
        if self._group is None or self._members != list(receivers):
            self._drop()
            self._made += 1
            self._members = list(receivers)
        return {"group": str(self._made), "receivers": self._members, "timeout": self.timeout}

    def _early_offer(self, receivers: Sequence[int]) -> dict[str, Any] | None:
        is_made = self._group is not None and self._members == list(receivers)
        return {"group": str(self._made)} if is_made else None

    def _begin(self, update: PendingMessage, announced: Announcement) -> bool:
        assert self._group is not None
        try:
            values = self._on_device(update.announced(announced).values())
            works = self._group.begin(values)
            # The digests are computed while the values are on their way.
            totals = self._on_device([update.totals()])
            self._begun = [*works, *self._group.begin(totals)], [*values, *totals]
        except RuntimeError:  # raised again for the message
            return False
        return True

    def _on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor.to(self._device).contiguous() for tensor in tensors]

    def _withdraw(self) -> None:
        self._drop()

    def _transfer(self, tensors: Sequence[Tensor]) -> str | None:
        control, _ = self._connected()
        (works, _), self._begun = self._begun or ([], []), None
        try:
            on_device = self._on_device(tensors)
            if self._group is None:
                size = 1 + len(self._members)
                self._group = _Group(control.store, str(self._made), 0, size, self._backend, self.timeout)
            self._group.finish([*works, *self._group.begin(on_device)])
        except RuntimeError as error:
            self._drop()
            return first_line(error)
        return None

    def _after(self, message: Message, *, complete: bool) -> None:
        if not complete:
            self._drop()

    def _end(self) -> None:
        self._drop()

    def _drop(self) -> None:
        group, self._group, self._members, self._begun = self._group, None, [], None
        if group is not None:
            group.abort()


@dataclass
class _Accepted:
    """Announced tensors, their broadcasts, what the device does with them if it has begun, and what has failed."""

    tensors: dict[str, Tensor]
    capacity: dict[str, int]  # see `Announcement`
    works: list[Any] = field(default_factory=list)
    begun: Begun | None = None
    error: Exception | None = None


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
        self._backend, self._device = backend, _device(backend, device)
        super().__init__(weights, address, timeout=timeout, name=name)
        self._group: _Group | None = None
        self._ended = ""  # key of the last group that has ended
        self._accepted: _Accepted | None = None

    @property
    def transport(self) -> TransportName:
        return self._backend

    def _accept(self, announced: dict[str, Any]) -> bool:
        if self._group is None or self._group.key != announced["group"]:
            return False
        blocking = (os.environ.get(name, "0") for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))
        if self._backend == "nccl" and any(value != "0" for value in blocking):
            return False  # `_join` would wait for the broadcast, while the sender might withdraw it
        try:
            tensors = tensors_of(checked_entries(announced["tensors"]), self._device)
            self._accepted = _Accepted(tensors, announced["capacity"])
        except (RuntimeError, DamagedMessage):  # raised again for the message
            return False
        return True

    def _join(self) -> None:
        accepted, group = self._accepted, self._group
        assert accepted is not None and group is not None
        try:
            if TOTALS in accepted.tensors:
                accepted.tensors[TOTALS].zero_()  # if the broadcast fails, not those of an earlier update by chance
            # For gloo its timeout begins here. If it ends because other receivers are slow, the sender sends again.
            accepted.works = group.begin(accepted.tensors.values())
        except Exception as error:  # of any type: `_fetch` raises it, so that the sender gets a reply
            accepted.error = error
            return
        if self._backend == "nccl":
            try:
                try:
                    accepted.begun = self._begin(accepted)
                except RuntimeError as error:  # of the device, for memory for example
                    self._undo()
                    text = f"an update could not begin before its message, and is received as any other: {error}"
                    warnings.warn(text, stacklevel=2)
            except Exception as error:  # as above
                accepted.error = error

    def _begin(self, accepted: _Accepted) -> Begun | None:
        """Let the device work on announced tensors when they arrive."""
        totals = accepted.tensors.pop(TOTALS, None)
        for work in accepted.works if totals is None else accepted.works[:-1]:
            work.wait()  # lets the current stream wait
        begun = self.weights.begin(accepted.tensors, accepted.capacity)
        if totals is not None and isinstance(begun, Written):
            accepted.works[-1].wait()
            self._written = begun
            begun.write(totals)
        return begun

    def _leave(self) -> None:
        if self._accepted is not None:
            self._end()

    def _fetch(self, command: dict[str, Any], entries: Sequence[Entry]) -> tuple[dict[str, Tensor], Begun | None]:
        accepted = _Accepted({}, {})
        if command.get("announced"):
            if self._accepted is None or self._group is None:
                raise RuntimeError("the transfer of the announced tensors was ended")
            accepted = self._accepted
        given = accepted.tensors
        try:
            if isinstance(accepted.error, RuntimeError):
                raise accepted.error
            group = self._group if given and self._group is not None else self._of(command)
            others = tensors_of([entry for entry in entries if entry[0] not in given], self._device)
            group.finish([*accepted.works, *group.begin(others.values())])
        except RuntimeError:
            self._end()
            raise
        self._accepted = None
        if accepted.error is not None:
            raise accepted.error
        return {name: given[name] if name in given else others[name] for name, _, _ in entries}, accepted.begun

    def _of(self, command: dict[str, Any]) -> _Group:
        """Return the group of a message, which is made if it is a new one."""
        if command["group"] == self._ended:
            raise RuntimeError("the process group has ended here")
        if self._group is None or self._group.key != command["group"]:
            self._end()
            receivers = command["receivers"]
            rank, size = 1 + receivers.index(self._control.number), 1 + len(receivers)
            # With the sender's timeout: it waits for the replies as long.
            timeout = command["timeout"]
            self._group = _Group(self._control.store, command["group"], rank, size, self._backend, timeout)
        return self._group

    def _end(self) -> None:
        group, self._group, self._accepted = self._group, None, None
        if group is not None:
            self._ended = group.key
            group.abort()


def _device(backend: Backend, device: torch.device | str | None) -> torch.device:
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}, expected gloo or nccl")
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
