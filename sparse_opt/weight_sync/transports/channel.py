"""The two ends of a transport: the sender brings every receiver to its version, by as few messages as it needs.

A round asks every receiver for its state. A receiver without the mask gets the mask message; one that then has other
weights than the sender, that has missed an update, or that asks for it, gets a state message; the others get the
update, which is made while they reply. Subclasses only move the tensors of a message. control.py has the commands.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import WeightSyncError, listed
from ..distributed import DistributedWeightSender
from ..encoding import Entry, Message, checked_header, tensor_list
from ..receiver import WeightReceiver
from ..sender import PendingMessage, WeightSender
from .control import ControlClient, ControlServer, TransportName, first_line

# A receiver that has replied to a status waits for its message this many timeouts of the sender, which waits once for
# the states of lost receivers, and up to four times while it sends another message (two transfers, two replies).
_TIMEOUTS_OF_A_ROUND = 5


@dataclass
class _Problems:
    """What went wrong in a round: receiver -> its name if it is lost, why it refused a message or is not verified."""

    names: Mapping[int, str]  # of the receivers, also of those that have left since
    lost: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    unverified: dict[int, str] = field(default_factory=dict)

    def concern(self, receiver: int) -> bool:
        return receiver in self.lost or receiver in self.refused


class SenderChannel(ABC):
    """The trainer's end of a transport.

    With a `DistributedWeightSender`, construct it on all ranks and call its methods alike: rank 0 has the connections,
    and its errors are raised on all ranks.

    Args:
        weights: the sender of the weights; let only this channel, or who calls `send`, call its `update`.
        address: host:port at which the receivers reach this process; port 0 takes a free one. The store listens on all
            interfaces, whatever the host, without authentication: restrict access to the port by other means.
        timeout: seconds that a receiver may take to reply to a message; one that does not is dropped, and named in the
            error of the round.
        device: of the tensors that are sent.

    Attributes:
        transport: the name of the transport, which must be that of the receivers.

    Raises:
        WeightSyncError: the address cannot be used.
    """

    transport: TransportName

    def __init__(
        self,
        weights: WeightSender | DistributedWeightSender,
        address: str,
        *,
        device: torch.device,
        timeout: float = 60.0,
    ) -> None:
        self.weights, self.timeout = weights, timeout
        self._device = device
        self._sender = weights.sender
        self._before_close: list[Callable[[], object]] = []
        self._control = weights.on_rank_0(lambda: ControlServer(address, timeout))

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
        self.weights.on_rank_0(lambda: self.send(None, count, timeout))

    def update(self, receivers: int = 0, *, verify: bool = False) -> int:
        """Make the next version from the current weights, bring all receivers to it, and return its number.

        Returns when every receiver holds the version. Receivers that have joined since the last call are included.
        Without receivers, only the version is made.

        Args:
            receivers: wait first until at least this many have joined, for `timeout` seconds at most. A receiver that
                was lost because it was slow joins again when it next receives: without this, after the round.
            verify: let the receivers read all active weights afterwards, and compare their digests with the sender's.
                Other weights are not compared.

        Raises:
            WeightSyncError: receivers are lost, have refused a message, have other weights or, with `verify`, have only
                parts of the weights; names them. Or fewer than `receivers` have joined. All others hold the version.
                The next round does without the lost ones, and sends a state to those that have refused a message or
                have other weights.
        """
        update = self.weights.update()
        self.weights.on_rank_0(lambda: self.send(update, receivers, verify=verify))
        return self.weights.version

    def before_close(self, function: Callable[[], object]) -> None:
        """Let `close` call a function first, on rank 0: one that lets receivers leave which receive only when asked."""
        self._before_close.append(function)

    def close(self, timeout: float | None = None) -> None:
        """End the connections: `receive` of the receivers returns None.

        Args:
            timeout: seconds to wait for receivers that are busy elsewhere, such as generating; their `receive` raises
                WeightSyncError if they come later. Default: the channel's timeout. Receivers that have left, as the
                workers of `VLLMChannelSync` do then, are not waited for.
        """
        self.weights.on_rank_0(lambda: self._close(self.timeout if timeout is None else timeout))

    def _ask(self, control: ControlServer, receivers: Iterable[int]) -> list[int]:
        asked = list(receivers)
        control.post(asked, {"do": "status", "transport": self.transport, "timeout": self.timeout})
        return asked

    def _connected(self) -> tuple[ControlServer, WeightSender]:
        if self._control is None or self._sender is None:
            raise WeightSyncError("the channel is closed")
        return self._control, self._sender

    def _missing(self, count: int, timeout: float) -> str | None:
        """Wait until `count` receivers have joined, or for `timeout` seconds; return what is missing then."""
        control, _ = self._connected()
        deadline = time.monotonic() + timeout
        if count:  # else those that have joined are discovered in `_send`, where nothing waits for it
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
            try:
                for function in self._before_close:
                    function()
                control.discover()
                control.post(control.names, {"do": "close"})
                # The store, and with it the command, ends with this object.
                control.collect(control.names, timeout)
            finally:
                self._drop()

    def send(
        self, update: PendingMessage | None, receivers: int = 0, timeout: float | None = None, *, verify: bool = False
    ) -> None:
        """Bring all receivers to the sender's version. On rank 0 only: the part of `update` that is no collective.

        May be called in any thread, for one update at a time. The receivers are asked for their states while the GPU
        makes the update.

        Args:
            update: the last one of `weights`, for the receivers at the version before it. None: all that are not at
                the version get a state.
            receivers: wait first until at least this many have joined.
            timeout: seconds to wait for them; then those that have joined get the version. Default: the channel's.
            verify: see `update`.

        Raises:
            WeightSyncError: as `update`; or `update` is not the last one.
        """
        control, sender = self._connected()
        if update is not None and update.version != sender.version:
            raise WeightSyncError(
                f"the update is version {update.version}, expected the last one of the sender, version {sender.version}"
            )
        missing = self._missing(receivers, self.timeout if timeout is None else timeout)
        asked = self._ask(control, control.names)
        problems = _Problems(dict(control.names))
        if not self._bring(asked, update, problems, verify=verify):
            control.discover()
        if joined := [r for r in control.names if r not in asked]:
            problems.names = {**problems.names, **control.names}
            self._bring(self._ask(control, joined), None, problems, verify=verify)
        clauses = [] if missing is None else [missing]
        clauses += [f"{name} has not replied within {self.timeout:g} s" for name in problems.lost.values()]
        clauses += [f"{problems.names[r]} refused it: {reason}" for r, reason in problems.refused.items()]
        clauses += [f"{problems.names[r]}: {reason}" for r, reason in problems.unverified.items()]
        if clauses:
            raise WeightSyncError(f"version {sender.version}: {listed(clauses, '; ')}")

    def _bring(self, asked: list[int], update: PendingMessage | None, problems: _Problems, *, verify: bool) -> bool:
        """Bring the receivers that were asked for their states to the sender's version.

        Returns whether a message was sent.
        """
        _, sender = self._connected()
        states = self._collect(asked, problems)
        without_mask = [r for r, state in states.items() if state["mask"] != sender.mask.digest]
        if without_mask:
            states |= self._send(sender.mask_message(), without_mask, problems)
        states = {r: state for r, state in states.items() if not problems.concern(r)}
        ready = {sender.version} if update is None else {sender.version, sender.version - 1}
        behind = [r for r, state in states.items() if state["state"] or state["version"] not in ready]
        if behind:
            self._send(sender.state_message(), behind, problems, verify=verify)
        following = [r for r, state in states.items() if r not in behind and state["version"] != sender.version]
        if update is not None and following:
            self._send(update.wait(), following, problems, verify=verify)
        return bool(without_mask or behind or following)

    def _send(
        self, message: Message, receivers: Sequence[int], problems: _Problems, *, verify: bool = False
    ) -> dict[int, dict[str, Any]]:
        """Send a message; once more, to those still there, if the loss of a receiver has broken the transfer."""
        control, _ = self._connected()
        remaining, reason = list(receivers), ""
        states: dict[int, dict[str, Any]] = {}
        for _ in range(2):
            command = {"do": "message", "header": message.header(), "verify": verify}
            control.post(remaining, command | self._offer(message, remaining))
            complete = False
            try:
                failure = self._transfer(list(message.tensors.values()))
                control.discover()  # while the receivers apply the message
                replies = self._collect(remaining, problems)
                failed = [r for r, reply in replies.items() if "failed" in reply]
                complete = failure is None and not failed and not problems.lost
            finally:  # also after an interruption, as by Ctrl-C: receivers may be in the transfer
                if not complete:
                    self._drop()
            taken = {r: reply for r, reply in replies.items() if r not in failed}
            problems.unverified.update({r: reply["unverified"] for r, reply in taken.items() if "unverified" in reply})
            states |= taken
            remaining = [r for r in failed if r in control.names]
            if not remaining:
                return states
            reason = failure or replies[remaining[0]]["failed"]
        problems.refused.update(dict.fromkeys(remaining, f"the transfer failed: {reason}"))
        return states

    def _collect(self, receivers: Sequence[int], problems: _Problems) -> dict[int, dict[str, Any]]:
        """Return the replies but for refusals and receivers that have left, and drop those that have not replied."""
        control, _ = self._connected()
        replies = control.collect(receivers, self.timeout)
        for r in receivers:
            if r not in replies and r in control.names:
                problems.lost[r] = control.drop(r)
        problems.refused.update({r: reply["refused"] for r, reply in replies.items() if "refused" in reply})
        return {r: reply for r, reply in replies.items() if "refused" not in reply and r in control.names}

    @abstractmethod
    def _offer(self, message: Message, receivers: Sequence[int]) -> dict[str, Any]:
        """Return what the receivers need besides the header, as JSON; before the command is posted."""

    def _transfer(self, tensors: Sequence[Tensor]) -> str | None:
        """Move the tensors of a message, after the command was posted; return why it failed, or None."""
        return None

    @abstractmethod
    def _drop(self) -> None:
        """Release what the transport holds; receivers may still use it. The next message begins anew."""


class ReceiverChannel(ABC):
    """The inference engine's end of a transport.

    Args:
        weights: the receiver of the weights.
        address: host:port of the sender.
        timeout: seconds to connect to the sender, and to wait for a message after it has asked for the state.
        name: names this receiver in errors of the sender; default: host and process.

    Raises:
        WeightSyncError: no sender responds at the address within `timeout` seconds.
    """

    transport: TransportName

    def __init__(
        self, weights: WeightReceiver, address: str, *, timeout: float = 60.0, name: str | None = None
    ) -> None:
        self.weights, self.timeout = weights, timeout
        self._control = ControlClient(address, timeout, name)
        self._has_mask = self._needs_state = False

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
                    tensors = self._fetch(command, tensor_list(checked_header(command["header"])))
                except RuntimeError as error:  # of the transport; the sender sends the message again
                    self._control.reply({"failed": first_line(error)})
                    continue
                message = Message.from_header(command["header"], tensors)
                self.weights.receive(message)
                unverified = self._why_unverified() if command["verify"] else None
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
            self._control.reply(status if unverified is None else status | {"unverified": unverified})
            self._needs_state |= unverified is not None and self.weights.is_whole
            if self.weights.version is not None and not status["state"]:
                return self.weights.version

    def _why_unverified(self) -> str | None:
        """Return the error if the weights cannot be verified or are not those of the version."""
        try:
            self.weights.verify()
        except WeightSyncError as error:
            return str(error)
        return None

    def _status(self) -> dict[str, Any]:
        # A mask and a version of another sender say nothing about this one's.
        mask = self.weights.mask_digest if self._has_mask else None
        return {"mask": mask, "version": self.weights.version, "state": self._needs_state}

    @abstractmethod
    def _fetch(self, command: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Tensor]:
        """Return the tensors of a message.

        Args:
            command: of the message.
            entries: its tensors.

        Raises RuntimeError if the transfer fails.
        """

    def close(self) -> None:
        """Leave the sender, which does without this receiver from its next round on, and release the connection.

        A receiver that is to follow again needs a new channel.
        """
        self._control.leave()
        self._drop()

    @abstractmethod
    def _drop(self) -> None:
        """Release what the transport holds."""


def tensors_of(entries: Iterable[Entry], device: torch.device) -> dict[str, Tensor]:
    """Return new tensors of the names, dtypes and shapes that `tensor_list` returns, for a transport to fill."""
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape in entries}
