"""The trainer's side of weight updates for vLLM: messages in requests, or by a transport (NCCL, gloo, CUDA IPC)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ...errors import WeightSyncError, listed
from ...weight_sync import DistributedWeightSender, PendingMessage, WeightSender
from ...weight_sync.transports.channel import SenderChannel
from .connections import Connection, Pause, Update, connections_to


class VLLMClient(ABC):
    """What the clients have in common. With a `DistributedWeightSender`, create a client on all ranks and call its
    methods alike: rank 0 sends, and its errors are raised on all ranks.
    """

    def __init__(
        self,
        weights: WeightSender | DistributedWeightSender,
        engines: Any,
        *,
        pause: Pause | None = "keep",
        timeout: float = 300.0,
    ) -> None:
        self.weights = weights
        self._connections = connections_to(engines, pause, timeout)

    def connect(self) -> int:
        """Bring all engines to the current version, and return it. They get the mask and all active values.

        Raises:
            WeightSyncError: an engine cannot be reached or refuses the weights; gives its message. The others have
                them.
        """
        self.weights.on_rank_0(lambda: self.send(None))
        return self.weights.version

    @abstractmethod
    def send(self, update: PendingMessage | None) -> None:
        """Bring all engines to the version of the sender's last update; None: whatever they have. On rank 0 only."""


class VLLMWeightSync(VLLMClient):
    """Sends the weights of a masked run to vLLM engines, in this process or behind HTTP.

    An engine that is not at the version before an update, because it was restarted or refused the previous update, gets
    the mask and all active values instead.

    Args:
        weights: the sender of the trained model; see `VLLMClient`.
        engines: a `vllm.LLM` of this process, the address of a server (`http://host:8000`), or a list of these. They
            are started with `weight_transfer_config=WeightTransferConfig(backend="sparse_opt")`; servers with
            `--weight-transfer-config '{"backend": "sparse_opt"}'` and `VLLM_SERVER_DEV_MODE=1`.
        pause: what a server does with running requests during an update. "keep": they wait, and go on with the new
            weights, which compute their KV cache again. "wait": they end first. "abort": they are aborted. None: the
            server does not pause, and a request may see weights of both versions.
        timeout: of each HTTP request, in seconds.
    """

    def update(self) -> int:
        """Send what has changed since the last call to all engines, reset their prefix caches, and return the version.

        The version is also the `weight_version` that vLLM gives with each output.

        Raises:
            WeightSyncError: an engine refuses the update or cannot be reached; gives its message. An engine of one
                worker keeps its weights and its version; the workers of an engine of several may have different
                weights, and a server then remains paused. The next call brings it to the sender's version. The others
                have the new version.
        """
        update = self.weights.update()
        self.weights.on_rank_0(lambda: self.send(update))
        return self.weights.version

    def send(self, update: PendingMessage | None) -> None:
        """See `VLLMClient.send`; engines that are not at the version before it get the mask and all active values."""
        sender = self.weights.sender
        assert sender is not None  # on rank 0
        message = None if update is None else update.wait()
        data = None if message is None else message.to_bytes()
        whole: list[Update] = []
        lock = threading.Lock()

        def send(connection: Connection) -> None:
            if message is not None and not connection.has_failed:
                if connection.weight_version() == str(message.base_version):
                    connection.send([{"message": data}], str(message.version))
                    return
            with lock:
                if not whole:
                    messages = sender.mask_message(), sender.state_message()
                    whole.extend({"message": message.to_bytes()} for message in messages)
            connection.send(whole, str(sender.version))

        with ThreadPoolExecutor(len(self._connections)) as pool:
            _raise_errors([pool.submit(send, connection) for connection in self._connections])


class VLLMChannelSync(VLLMClient):
    """Sends the weights of a masked run to vLLM engines by a channel, from GPU to GPU with NCCL or CUDA IPC.

    Requests to the engines only start and end each update. Every worker of an engine is a receiver of the channel.

        channel = ProcessGroupSender(WeightSender(optimizer), "10.0.0.1:29600", backend="nccl")
        sync = VLLMChannelSync(channel, "http://10.0.0.2:8000")
        sync.connect()
        ...
        sync.update()

    Args:
        channel: let only this object call its methods; `close` it at the end: the engines then leave it.
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
        super().__init__(channel.weights, engines, pause=pause, timeout=timeout)
        self._channel = channel
        self._workers: dict[Connection, int] = {}  # of the engines that have joined the channel
        channel.before_close(self._disconnect)  # a worker receives in updates only, and would not notice it

    def update(self, *, verify: bool = False) -> int:
        """Send what has changed since the last call to all engines, reset their prefix caches, and return the version.

        Engines that have restarted are connected again, and get the mask and all active values.

        Args:
            verify: let all workers read all active weights afterwards, and compare them with the sender's; see
                `SenderChannel.update`. Workers of tensor and pipeline parallelism, which have only parts of the
                weights, have the version then, but are an error.

        Raises:
            WeightSyncError: an engine cannot be reached or refuses the update, or its workers are lost or have other
                weights; gives the messages. Engines without an error have the version; the next call brings the others
                to it.
        """
        update = self.weights.update()
        self.weights.on_rank_0(lambda: self.send(update, verify=verify))
        return self.weights.version

    def send(self, update: PendingMessage | None, *, verify: bool = False) -> None:
        """Run a round of the channel while the engines that can be reached are in an update."""
        if update is None:
            self._workers.clear()
        version = str(self.weights.version)
        problems: list[WeightSyncError] = []
        with ThreadPoolExecutor(len(self._connections)) as pool:
            joined = [pool.submit(self._join, engine) for engine in self._connections]
            reached = _successful(self._connections, joined)
            # Requests may have to end first, which can take longer than the channel waits for a receiver.
            begun = [pool.submit(engine.begin) for engine in reached]
            ready = _successful(reached, begun)
            completed = [pool.submit(engine.complete, [{"message": None}], version) for engine in ready]
            try:
                self._channel.send(update, sum(self._workers[engine] for engine in ready), verify=verify)
            except WeightSyncError as error:
                problems.append(error)
        _raise_errors([*joined, *begun, *completed], *problems)

    def _join(self, engine: Connection) -> None:
        """Let the workers of an engine that has just started join the channel."""
        if engine in self._workers and engine.weight_version() != "default":
            return
        self._workers.pop(engine, None)
        engine.initialize(self._channel.transport, self._channel.address, self._channel.timeout)
        self._workers[engine] = engine.world_size()

    def _disconnect(self) -> None:
        """Let the workers leave the channel. Those of an engine that does not answer are lost."""
        for engine in self._workers:
            with suppress(WeightSyncError):
                engine.disconnect()
        self._workers.clear()


def _raise_errors(futures: Sequence[Future[None]], *others: WeightSyncError) -> None:
    """Wait for all, and raise one WeightSyncError for all that failed and for `others`; another error as it is."""
    errors = [*others, *(error for future in futures if (error := future.exception()) is not None)]
    for error in errors:
        if not isinstance(error, WeightSyncError):
            raise error
    if errors:
        raise WeightSyncError(listed([str(error) for error in errors], "; "))


def _successful(engines: Sequence[Connection], futures: Sequence[Future[None]]) -> list[Connection]:
    """Wait for what was submitted for each engine, and return the engines for which it has succeeded."""
    return [engine for engine, future in zip(engines, futures, strict=True) if future.exception() is None]
