"""The control connection of a transport: which receivers there are, what each one needs, and what it has applied.

The sender hosts a `torch.distributed.TCPStore`; each receiver connects to it. Both may already be in process groups of
their own, which are neither used nor changed. A receiver joins at any time by taking the next number. The sender writes
one command after the other into the receiver's inbox, and the receiver answers each with one reply:

    members                  count of the receivers that have joined, plus 2**32 for each one that has left
    receiver/{r}             JSON: the receiver's name
    left/{r}                 set by a receiver that has left
    inbox/{r}/{n}            JSON: command n
    reply/{r}/{n}            JSON: the reply to command n

    {"do": "status", ...}    -> {"mask": digest or null, "version": version or null, "state": the receiver asks for one}
    {"do": "message", "header": the message's header, "verify": ..., and what the transport adds}
                             -> as for status, and if "verify" is true and the weights are not those of the version
                             {"unverified": the error}; or {"failed": why the tensors did not arrive}; or {"refused":
                             the error}
    {"do": "close"}          -> {}

Everything is JSON; nothing is unpickled. The connection is neither encrypted nor authenticated: use it in a private
network. The store listens on all interfaces, whatever host is given: the host is only what receivers connect to.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from ...errors import WeightSyncError
from ...tensors import compact_json

TransportName = Literal["gloo", "nccl", "cuda_ipc", "folder"]

_NONE = "none"  # no key of the store has this value
_UNTIL_LEFT = 0.05  # seconds to wait for a reply before the sender asks whether the receiver has left
_LEFT = 2**32  # counts in "members" as a receiver that has left

# A pause between two polls is a thousandth of the time waited so far, at most these seconds: polls delay no round
# noticeably, and many idle receivers do not keep the sender's store busy. A poll takes about 20 us.
_LONGEST_POLL = 0.005
# Seconds of waiting without a pause: most replies come within them, and the shortest pause of a thread is 0.15 ms.
BUSY_SECONDS = 0.01


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port". Raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"address is {address!r}, expected host:port")
    return host, int(port)


class ControlServer:
    """The sender's end: sends commands to the receivers that have joined, and collects their replies.

    Attributes:
        address: host:port that receivers connect to; the port is a free one if it was given as 0.
        names: number of a receiver -> its name, for those that have joined and are not lost.
    """

    def __init__(self, address: str, timeout: float) -> None:
        host, port = split_address(address)
        self.timeout = timeout
        try:
            self.store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise WeightSyncError(f"cannot listen on {address}: {first_line(error)}") from error
        self.address = f"{host}:{self.store.port}"
        self.names: dict[int, str] = {}
        self._known = self._left = 0
        self._sent: dict[int, int] = {}
        self._taken: list[str] = []  # keys of replies that are no longer needed

    def discover(self) -> None:
        """Add the receivers that have joined since the last call to `names`, and remove those that have left."""
        left, joined = divmod(self.store.add("members", 0), _LEFT)
        for number in range(self._known + 1, joined + 1):
            text = _read(self.store, f"receiver/{number}", time.monotonic() + self.timeout, [])
            if text is not None:
                self.names[number] = str(json.loads(text)["name"])
                self._sent[number] = 0
            self._known = number
        if left != self._left:
            self._left = left
            for number in [number for number in self.names if self.store.check([f"left/{number}"])]:
                del self.names[number], self._sent[number]

    def post(self, receivers: Iterable[int], command: dict[str, Any]) -> None:
        """Send one command to those of some receivers that are there."""
        text = compact_json(command)
        for number in receivers:
            if number in self._sent:
                self.store.set(f"inbox/{number}/{self._sent[number]}", text)
                self._sent[number] += 1

    def collect(self, receivers: Iterable[int], timeout: float) -> dict[int, dict[str, Any]]:
        """Return the replies to the command posted last.

        Those of receivers that have not replied in time are missing, and of those that have left, which are then no
        longer in `names`.
        """
        deadline = time.monotonic() + timeout
        replies = {}
        for number in list(receivers):
            if number not in self._sent:
                continue
            key = f"reply/{number}/{self._sent[number] - 1}"
            text = None
            while text is None and number in self.names:
                now = time.monotonic()
                text = _read(self.store, key, min(deadline, now + _UNTIL_LEFT), self._taken)
                if now >= deadline:
                    break
                if text is None:
                    self.discover()
            if text is not None:
                replies[number] = json.loads(text)
                self._taken.append(key)
        return replies

    def drop(self, number: int) -> str:
        """Forget a lost receiver and return its name. If it is alive, it joins again when it reads its inbox."""
        self.post([number], {"do": "rejoin"})
        del self._sent[number]
        return self.names.pop(number)


class ControlClient:
    """A receiver's end: takes commands in order and replies to them.

    Attributes:
        number: of the receiver, from 1 on; ascending in the order of joining.
        name: host, process and number, or the name given; errors of the sender name the receiver by it.
    """

    def __init__(self, address: str, timeout: float, name: str | None) -> None:
        host, port = split_address(address)
        self.address, self.timeout = address, timeout
        try:
            self.store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise WeightSyncError(
                f"no sender of weights responds at {address} within {timeout:g} s: {first_line(error)}"
            ) from error
        self.name = name or f"{socket.gethostname()}, process {os.getpid()}"
        self.join()

    def join(self) -> None:
        """Take a number of its own, with an empty inbox."""
        try:
            self.number = self.store.add("members", 1) % _LEFT
            self.store.set(f"receiver/{self.number}", compact_json({"name": self.name}))
        except RuntimeError as error:
            raise self._lost(error) from error
        self._taken = 0
        self._used: list[str] = []  # keys of commands that are no longer needed

    def leave(self) -> None:
        """Notify the sender that this receiver takes no more commands; does nothing if the sender is lost."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.number}", "")
            self.store.add("members", _LEFT)

    def next(self, timeout: float) -> dict[str, Any]:
        """Wait for the next command and return it.

        Raises:
            WeightSyncError: no command has come within `timeout` seconds, or the sender is lost.
        """
        key = f"inbox/{self.number}/{self._taken}"
        try:
            text = _read(self.store, key, time.monotonic() + timeout, self._used)
        except RuntimeError as error:
            raise self._lost(error) from error
        if text is None:
            raise WeightSyncError(f"no message from the sender at {self.address} within {timeout:.3g} s")
        self._used.append(key)
        self._taken += 1
        command: dict[str, Any] = json.loads(text)
        return command

    def reply(self, content: dict[str, Any]) -> None:
        """Reply to the command taken last. Raises WeightSyncError if the sender is lost."""
        try:
            self.store.set(f"reply/{self.number}/{self._taken - 1}", compact_json(content))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> WeightSyncError:
        return WeightSyncError(f"the sender at {self.address} is lost: {first_line(error)}")


def _read(store: dist.Store, key: str, deadline: float, useless: list[str]) -> str | None:
    """Wait for a key, at most until `deadline` (`time.monotonic`), and return its value; None if it has not come.

    Polls, since `Store.get` and `Store.wait` cannot be interrupted and log a warning at every timeout. Deletes the
    `useless` keys while there is nothing to read, because a deletion takes as long as a poll.
    """
    begin = time.monotonic()
    while True:
        # The value, or what is expected if there is none: one round trip, where `check` and `get` take three.
        value: bytes = store.compare_set(key, _NONE, _NONE)
        if value != _NONE.encode():
            return value.decode()
        while useless:
            store.delete_key(useless.pop())
        now = time.monotonic()
        if now >= deadline:
            return None
        if now - begin > BUSY_SECONDS:
            time.sleep(min((now - begin) / 1000, _LONGEST_POLL))


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)
