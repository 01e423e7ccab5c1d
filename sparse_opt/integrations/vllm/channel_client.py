"""The trainer's side of weight updates for vLLM whose values travel by a transport: NCCL, gloo or CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...errors import WeightSyncError
from ...weight_sync import DistributedWeightSender, PendingMessage
from ...weight_sync.background import Background
from ...weight_sync.transports.channel import SenderChannel
from .client import raise_errors
from .connections import Connection, Pause, connections_to


class VLLMChannelSync:
    """Sends the weights of a masked run to vLLM engines by a channel, from GPU to GPU with NCCL or CUDA IPC.

    Requests to the engines only start and end each update. Every worker of an engine is a receiver of the channel.

        channel = ProcessGroupSender(WeightSender(optimizer), "10.0.0.1:29600", backend="nccl")
        sync = VLLMChannelSync(channel, "http://10.0.0.2:8000")
        sync.connect()
        ...
        sync.update()

    Args:
        channel: let only this object call its methods; `close` it after `finish_update`. With a
            `DistributedWeightSender`, create this object on all ranks and call its methods alike.
        engines, pause, timeout: see `VLLMWeightSync`.
    """

    def __init__(
        self,
        channel: SenderChannel,
        engines: Any,
        *,
        pause: Pause | None = "keep",
        timeout: float = 300.0,
    ) -> None:
        self.channel = channel
        self._connections = connections_to(engines, pause, timeout)
        self._workers: dict[Connection, int] = {}  # of the engines that have joined the channel
        self._background = Background(channel.devices)

    def connect(self) -> int:
        """Bring all engines to the current version, and return it.

        Raises:
            WeightSyncError: an engine cannot be reached or refuses the weights; gives its message. The others have
                them.
        """
        self._background.require_idle()
        self._workers.clear()
        self._on_sender(lambda: self._send(None))
        return self.channel.weights.version

    def update(self, *, verify: bool = False) -> int:
        """Send what has changed since the last call to all engines, reset their prefix caches, and return the version.

        Engines that have restarted are connected again, and get the mask and all active values.

        Args:
            verify: let all workers read all active weights afterwards, and compare them with the sender's, also those
                of tensor parallelism; see `SenderChannel.update`.

        Raises:
            WeightSyncError: an engine cannot be reached or refuses the update, or its workers are lost or have other
                weights; gives the messages. Engines without an error have the version; the next call brings the others
                to it.
        """
        self._background.require_idle()
        update = self.channel.weights.update()
        self._on_sender(lambda: self._send(update, verify=verify))
        return self.channel.weights.version

    def begin_update(self) -> None:
        """Make the next version as `update` does, and send it in the background; see `VLLMWeightSync.begin_update`."""
        self._background.require_idle()
        update = self.channel.weights.update()
        self._background.begin(lambda: None if update is None else self._send(update))

    def finish_update(self) -> int:
        """Wait until all engines have the version that `begin_update` has made, and return it.

        Raises:
            WeightSyncError: no update has begun. Or as `update`.
        """
        with self._background.finishing() as wait:
            self._on_sender(wait)
        return self.channel.weights.version

    def _send(self, update: PendingMessage | None, *, verify: bool = False) -> None:
        """Run a round of the channel while the engines that can be reached are in an update."""
        version = self.channel.weights.version
        problems: list[WeightSyncError] = []
        with ThreadPoolExecutor(len(self._connections)) as pool:
            joined = [pool.submit(self._join, engine) for engine in self._connections]
            reached = _successful(self._connections, joined)
            # Requests may have to end first, which can take longer than the channel waits for a receiver.
            begun = [pool.submit(engine.begin) for engine in reached]
            ready = _successful(reached, begun)
            completed = [pool.submit(engine.complete, [None], version) for engine in ready]
            try:
                self.channel.send(update, sum(self._workers[engine] for engine in ready), verify=verify)
            except WeightSyncError as error:
                problems.append(error)
        raise_errors([*joined, *begun, *completed], *problems)

    def _join(self, engine: Connection) -> None:
        """Let the workers of an engine that has just started join the channel."""
        if engine in self._workers and engine.weight_version() != "default":
            return
        self._workers.pop(engine, None)
        engine.initialize(self.channel.transport, self.channel.address, self.channel.timeout)
        self._workers[engine] = engine.world_size()

    def _on_sender(self, function: Callable[[], object]) -> None:
        """Call a function on the rank that sends, and raise its errors on all ranks."""
        weights = self.channel.weights
        if isinstance(weights, DistributedWeightSender):
            weights.on_rank_0(function)
        else:
            function()


def _successful(engines: Sequence[Connection], futures: Sequence[Future[None]]) -> list[Connection]:
    """Wait for what was submitted for each engine, and return the engines for which it has succeeded."""
    return [engine for engine, future in zip(engines, futures, strict=True) if future.exception() is None]
