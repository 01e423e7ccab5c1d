"""The rounds of a transport: brings every receiver to the sender's version, with as few messages as each one needs.

A round asks every receiver for its state. A receiver without the mask gets the mask message; one that then has other
weights than the sender, that has missed an update, or that asks for it, gets a state message; the others get the
update. A subclass only moves the tensors of one message to several receivers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import WeightSyncError, listed
from ..distributed import DistributedWeightSender
from ..message import Message, checked_header, tensor_list
from ..receiver import WeightReceiver
from ..sender import PendingMessage, WeightSender
from .control import ControlClient, ControlServer, first_line

# A receiver that has replied to a status waits for its message this many timeouts of the sender, which waits once for
# the states of lost receivers, and up to four times while it sends another message (two transfers, two replies).
_TIMEOUTS_OF_A_ROUND = 5


@dataclass
class _Problems:
    """What went wrong in a round: receiver -> its name if it is lost, or why it refused a message."""

    lost: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def concern(self, receiver: int) -> bool:
        return receiver in self.lost or receiver in self.refused


class SenderChannel(ABC):
    """The trainer's end of a transport.

    With a `DistributedWeightSender`, construct it on all ranks and call its methods alike: rank 0 has the connections,
    and its errors are raised on all ranks.

    Args:
        weights: the sender of the weights; let only this channel call its `update`.
        address: host:port at which the receivers reach this process; port 0 takes a free one. The store listens on all
            interfaces, whatever the host, without authentication: restrict access to the port by other means.
        timeout: seconds that a receiver may take to reply to a message; one that does not is dropped, and named in the
            error of the round.

    Raises:
        WeightSyncError: the address cannot be used.
    """

    def __init__(self, weights: WeightSender | DistributedWeightSender, address: str, *, timeout: float = 60.0) -> None:
        self.weights, self.timeout = weights, timeout
        self._sender = weights.sender if isinstance(weights, DistributedWeightSender) else weights
        self._control: ControlServer | None = None
        self._on_all_ranks(lambda: self._listen(address))

    @property
    def address(self) -> str:
        """host:port for the receivers; empty on ranks other than 0, and after `close`."""
        return "" if self._control is None else self._control.address

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the receivers that have joined and are not lost; empty on ranks other than 0."""
        if self._control is None:
            return ()
        self._control.discover()
        return tuple(self._control.names.values())

    def wait_for_receivers(self, count: int, timeout: float = 300.0) -> None:
        """Wait until `count` receivers have joined, and bring all to the sender's current version.

        Raises:
            WeightSyncError: fewer have joined within `timeout` seconds; those hold the version. Or as `update`.
        """
        self._on_all_ranks(lambda: self._round(None, count, timeout))

    def update(self, receivers: int = 0) -> int:
        """Make the next version from the current weights, bring all receivers to it, and return its number.

        Returns when every receiver holds the version. Receivers that have joined since the last call are included.
        Without receivers, only the version is made.

        Args:
            receivers: wait first until at least this many have joined, for `timeout` seconds at most. A receiver that
                was lost because it was slow joins again when it next receives: without this, after the round.

        Raises:
            WeightSyncError: receivers are lost, or have refused a message; names them. Or fewer than `receivers` have
                joined. All others hold the version. The next round does without the lost ones, and sends a state to
                those that refused.
        """
        update = self.weights.update()
        self._on_all_ranks(lambda: self._round(update, receivers, self.timeout))
        return self.weights.version

    def close(self, timeout: float | None = None) -> None:
        """End the connections: `receive` of the receivers returns None.

        Args:
            timeout: seconds to wait for receivers that are busy elsewhere, such as generating; their `receive` raises
                WeightSyncError if they come later. Default: the channel's timeout.
        """
        self._on_all_ranks(lambda: self._close(self.timeout if timeout is None else timeout))

    def _on_all_ranks(self, function: Callable[[], object]) -> None:
        """Call a function where the sender is, and raise its errors on all ranks."""
        if isinstance(self.weights, DistributedWeightSender):
            self.weights.on_rank_0(function)
        else:
            function()

    def _listen(self, address: str) -> None:
        self._control = ControlServer(address, self.timeout)

    def _connected(self) -> tuple[ControlServer, WeightSender]:
        if self._control is None or self._sender is None:
            raise WeightSyncError("the channel is closed")
        return self._control, self._sender

    def _missing(self, count: int, timeout: float) -> str | None:
        """Wait until `count` receivers have joined, or for `timeout` seconds; return what is missing then."""
        control, _ = self._connected()
        deadline = time.monotonic() + timeout
        control.discover()
        while len(control.names) < count:
            if time.monotonic() >= deadline:
                joined = f"{len(control.names)} receivers have joined at {self.address} within {timeout:g} s"
                return f"{joined}, expected {count}"
            time.sleep(0.02)
            control.discover()
        return None

    def _close(self, timeout: float) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.discover()
            control.post(control.names, {"do": "close"})
            # The store, and with it the command, ends with this object.
            control.collect(control.names, timeout)
            self._end()

    def _round(self, update: PendingMessage | None, count: int, timeout: float) -> None:
        """Bring all receivers to the sender's version, by `update` those at the version before it.

        Waits `timeout` seconds for `count` receivers to join, and does without those that have not. The receivers are
        asked for their states while the GPU makes the update.
        """
        control, sender = self._connected()
        missing = self._missing(count, timeout)
        control.post(control.names, {"do": "status", "transport": self.transport, "timeout": self.timeout})
        problems = _Problems()
        states = self._collect(list(control.names), problems)
        without_mask = [r for r, state in states.items() if state["mask"] != sender.mask.digest]
        if without_mask:
            states |= self._send(sender.mask_message(), without_mask, problems)
        states = {r: state for r, state in states.items() if not problems.concern(r)}
        ready = {sender.version} if update is None else {sender.version, sender.version - 1}
        behind = [r for r, state in states.items() if state["state"] or state["version"] not in ready]
        if behind:
            self._send(sender.state_message(), behind, problems)
        following = [r for r, state in states.items() if r not in behind and state["version"] != sender.version]
        if update is not None and following:
            self._send(update.wait(), following, problems)
        if problems.lost or problems.refused or missing is not None:
            clauses = [] if missing is None else [missing]
            clauses += [f"{name} has not replied within {self.timeout:g} s" for name in problems.lost.values()]
            clauses += [f"{control.names[r]} refused it: {reason}" for r, reason in problems.refused.items()]
            raise WeightSyncError(f"version {sender.version}: {listed(clauses, '; ')}")

    def _send(self, message: Message, receivers: Sequence[int], problems: _Problems) -> dict[int, dict[str, Any]]:
        """Send a message; once more, to those still there, if the loss of a receiver has broken the transfer."""
        control, _ = self._connected()
        remaining, reason = list(receivers), ""
        states: dict[int, dict[str, Any]] = {}
        for _ in range(2):
            control.post(remaining, {"do": "message", "header": message.header(), **self._offer(message, remaining)})
            failure = self._transfer(message)
            replies = self._collect(remaining, problems)
            failed = [r for r, reply in replies.items() if "failed" in reply]
            self._after(message, complete=failure is None and not failed and not problems.lost)
            states |= {r: reply for r, reply in replies.items() if r not in failed}
            remaining = failed
            if not remaining:
                return states
            reason = failure or replies[remaining[0]]["failed"]
        problems.refused.update(dict.fromkeys(remaining, f"the transfer failed: {reason}"))
        return states

    def _collect(self, receivers: Sequence[int], problems: _Problems) -> dict[int, dict[str, Any]]:
        """Return the replies that are not refusals, and drop the receivers that have not replied."""
        control, _ = self._connected()
        replies = control.collect(receivers, self.timeout)
        for r in receivers:
            if r not in replies:
                problems.lost[r] = control.drop(r)
        problems.refused.update({r: reply["refused"] for r, reply in replies.items() if "refused" in reply})
        return {r: reply for r, reply in replies.items() if "refused" not in reply}

    @property
    @abstractmethod
    def transport(self) -> str:
        """The name of the transport, which must be that of the receivers."""

    @abstractmethod
    def _offer(self, message: Message, receivers: Sequence[int]) -> dict[str, Any]:
        """Return what the receivers need besides the header, as JSON; before the command is posted."""

    @abstractmethod
    def _transfer(self, message: Message) -> str | None:
        """Move the tensors, after the command was posted; return why it failed, or None."""

    @abstractmethod
    def _after(self, message: Message, *, complete: bool) -> None:
        """Called when all receivers have replied or are lost."""

    @abstractmethod
    def _end(self) -> None:
        """Release the connections."""


class ReceiverChannel(ABC):
    """The inference engine's end of a transport.

    Args:
        weights: the receiver of the weights.
        address: host:port of the sender.
        timeout: seconds to connect to the sender, and to wait for a message that it has announced.
        name: names this receiver in errors of the sender; default: host and process.

    Raises:
        WeightSyncError: no sender responds at the address within `timeout` seconds.
    """

    def __init__(
        self, weights: WeightReceiver, address: str, *, timeout: float = 60.0, name: str | None = None
    ) -> None:
        self.weights, self.timeout = weights, timeout
        self._control = ControlClient(address, timeout, name)
        self._has_mask = self._needs_state = False

    def request_state(self) -> None:
        """Let the sender send all active weights in its next round, as if this receiver had just joined."""
        self._needs_state = True

    def receive(self, timeout: float = 600.0) -> int | None:
        """Wait for the sender's next version, apply it, and return its number; None when the sender has closed.

        Once the sender has begun a round, this waits for the round's messages beyond `timeout`: for several timeouts of
        the sender, which may itself be waiting for lost receivers.

        Raises:
            WeightSyncError: nothing has come within `timeout` seconds; the sender is lost; or the receiver refused the
                message. The weights have not changed; after a refusal, the next round brings the mask and a state.

        Another error while a message is applied is also reported to the sender as a refusal, and raised here.
        """
        deadline = time.monotonic() + timeout
        reserved = 0.0  # seconds to wait for the next message of a round, also after the deadline
        while True:
            # Once the sender has counted on this receiver, the round is not left before its message.
            left = max(deadline - time.monotonic(), reserved)
            command = self._control.next(left)
            if command["do"] == "close":
                self._control.reply({})
                return None
            if command["do"] == "rejoin":
                self._control.join()
                reserved = 0.0
                continue
            if command["do"] == "status":
                reserved = max(self.timeout, _TIMEOUTS_OF_A_ROUND * float(command["timeout"]))
                if command["transport"] != self.transport:
                    problem = f"it receives by {self.transport}, the sender sends by {command['transport']}"
                    self._control.reply({"refused": problem})
                    raise WeightSyncError(f"{self._control.name}: {problem}")
                self._control.reply(self._status())
                continue
            try:
                try:
                    tensors = self._fetch(command)
                except RuntimeError as error:  # of the transport; the sender sends the message again
                    self._control.reply({"failed": first_line(error)})
                    continue
                message = Message.from_header(command["header"], tensors)
                self.weights.receive(message)
            except Exception as error:  # of any type: the sender gets a reply instead of waiting for its timeout
                # The mask as well: a weight may have moved.
                self._has_mask, self._needs_state = False, True
                is_refusal = isinstance(error, WeightSyncError)
                reason = str(error) if is_refusal else f"{type(error).__name__}: {first_line(error)}"
                self._control.reply({"refused": reason})
                raise
            self._has_mask |= message.kind == "mask"
            self._needs_state &= message.kind != "state"
            status = self._status()
            self._control.reply(status)
            if self.weights.version is not None and not status["state"]:
                return self.weights.version

    def _status(self) -> dict[str, Any]:
        # A mask and a version of another sender say nothing about this one's.
        mask = self.weights.mask_digest if self._has_mask else None
        return {"mask": mask, "version": self.weights.version, "state": self._needs_state}

    @property
    @abstractmethod
    def transport(self) -> str:
        """The name of the transport, which must be that of the sender."""

    @abstractmethod
    def _fetch(self, command: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a message. Raises RuntimeError if the transfer fails."""

    def close(self) -> None:
        """Leave the sender, which does without this receiver from its next round on, and release the connection.

        A receiver that is to follow again needs a new channel.
        """
        self._control.leave()
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """Release what the transport holds."""


def empty_tensors(header: Mapping[str, str], device: torch.device) -> dict[str, Tensor]:
    """Return new tensors of the names, dtypes and shapes in a message's header, for a transport to fill.

    Raises:
        DamagedMessage: the header is damaged.
    """
    entries = tensor_list(checked_header(header))
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape in entries}
