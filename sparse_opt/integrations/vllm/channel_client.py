"""The trainer's side of weight updates for vLLM whose values travel by a transport: NCCL, gloo or CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import WeightSyncError
from ...weight_sync import DistributedWeightSender
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
        channel: with a `DistributedWeightSender`, create this object on all ranks and call its methods alike.
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
        self._workers: dict[Connection, int] = {}

    def connect(self) -> int:
        """Bring all engines to the current version, and return it.

        Raises:
            WeightSyncError: an engine cannot be reached or refuses the weights; gives its message.
        """
        self._on_sender(lambda: self._initialize(self._connections))
        version = self.channel.weights.version
        self._round(self.channel.wait_for_receivers, version)
        return version

    def update(self) -> int:
        """Send what has changed since the last call to all engines, reset their prefix caches, and return the version.

        Engines that have restarted are connected again, and get the mask and all active values.

        Raises:
            WeightSyncError: an engine cannot be reached or refuses the update, or its workers are lost; gives the
                messages. Engines without an error have the version; the next call brings the others to it.
        """

        def connect_new() -> None:
            self._initialize(
                [c for c in self._connections if c not in self._workers or c.weight_version() == "default"]
            )

        self._on_sender(connect_new)
        version = self.channel.weights.version + 1
        self._round(self.channel.update, version)
        return version

    def _initialize(self, connections: Iterable[Connection]) -> None:
        """Let the workers of engines that have just started join the channel."""
        for connection in connections:
            connection.initialize(self.channel.transport, self.channel.address, self.channel.timeout)
            self._workers[connection] = connection.world_size()

    def _round(self, action: Callable[[int], object], version: int) -> None:
        """Run a round of the channel, given the number of workers, while the engines are in an update."""
        engines = self._connections if self.channel.address else []
        problems: list[WeightSyncError] = []
        with ThreadPoolExecutor(len(self._connections)) as pool:
            # Requests may have to end first, which can take longer than the channel waits for a receiver.
            begun = [pool.submit(engine.begin) for engine in engines]
            ready = [e for e, future in zip(engines, begun, strict=True) if future.exception() is None]
            futures = begun + [pool.submit(engine.complete, [None], version) for engine in ready]
            try:
                action(sum(self._workers[engine] for engine in ready))
            except WeightSyncError as error:
                problems.append(error)
        self._on_sender(lambda: raise_errors(futures, *problems))
        if problems:
            raise problems[0]

    def _on_sender(self, function: Callable[[], None]) -> None:
        """Call a function on the rank that sends, and raise its errors on all ranks."""
        weights = self.channel.weights
        if isinstance(weights, DistributedWeightSender):
            weights.on_rank_0(function)
        else:
            function()
