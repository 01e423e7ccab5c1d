"""The receivers' end of a transport: replies to the sender's rounds (channel.py), and applies their messages."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import WeightSyncError
from ..encoding import Entry, Message, checked_header, tensor_list
from ..receiver import WeightReceiver
from .control import ControlClient, TransportName, first_line

# A receiver that has replied to a status waits for its message this many timeouts of the sender, which waits once for
# the states of lost receivers, and up to four times while it sends another message (two transfers, two replies).
_TIMEOUTS_OF_A_ROUND = 5


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
            if command["do"] == "nothing":  # the sender could not make the update that it has asked for states for
                reserved = 0.0
                continue
            if command["do"] == "verify":
                self._control.reply(self._verification())
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
            self._control.reply(status | self._verification() if command["verify"] else status)
            if self.weights.version is not None and not status["state"]:
                return self.weights.version

    def _status(self) -> dict[str, Any]:
        # A mask and a version of another sender say nothing about this one's.
        mask = self.weights.mask_digest if self._has_mask else None
        return {"mask": mask, "version": self.weights.version, "state": self._needs_state}

    def _verification(self) -> dict[str, Any]:
        """Return what the sender compares with its own weights."""
        version = self.weights.version
        if version is None:
            return {"version": None}
        try:
            digest = self.weights.read_digest()
        except WeightSyncError as error:
            self._has_mask, self._needs_state = False, True
            return {"refused": str(error)}
        return {"version": version, "parts": self.weights.parts, "digest": digest}

    @property
    @abstractmethod
    def transport(self) -> TransportName:
        """The name of the transport, which must be that of the sender."""

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
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """Release what the transport holds."""


def tensors_of(entries: Iterable[Entry], device: torch.device) -> dict[str, Tensor]:
    """Return new tensors of the names, dtypes and shapes that `tensor_list` returns, for a transport to fill."""
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape in entries}
