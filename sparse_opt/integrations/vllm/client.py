"""The trainer's side of weight updates for vLLM: which engine needs which message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...errors import WeightSyncError, listed
from ...weight_sync import DistributedWeightSender, PendingMessage, WeightSender
from ...weight_sync.background import Background
from .connections import Connection, Pause, connections_to


class VLLMWeightSync:
    """Sends the weights of a masked run to vLLM engines, in this process or behind HTTP.

    An engine that is not at the version before an update, because it was restarted or refused the previous update, gets
    the mask and all active values instead.

    Args:
        sender: of the trained model. With a `DistributedWeightSender`, create this object on all ranks and call its
            methods alike: rank 0 sends, and its errors are raised on all ranks.
        engines: a `vllm.LLM` of this process, the address of a server (`http://host:8000`), or a list of these. They
            are started with `weight_transfer_config=WeightTransferConfig(backend="sparse_opt")`; servers with
            `--weight-transfer-config '{"backend": "sparse_opt"}'` and `VLLM_SERVER_DEV_MODE=1`.
        pause: what a server does with running requests during an update. "keep": they wait, and go on with the new
            weights, which compute their KV cache again. "wait": they end first. "abort": they are aborted. None: the
            server does not pause, and a request may see weights of both versions.
        timeout: of each HTTP request, in seconds.
    """

    def __init__(
        self,
        sender: WeightSender | DistributedWeightSender,
        engines: Any,
        *,
        pause: Pause | None = "keep",
        timeout: float = 300.0,
    ) -> None:
        self.sender = sender
        self._own = sender.sender if isinstance(sender, DistributedWeightSender) else sender
        self._connections = connections_to(engines, pause, timeout)
        self._background = Background([] if self._own is None else [self._own.device])

    def connect(self) -> int:
        """Send the mask and all active values of the current version to all engines, and return the version.

        Raises:
            WeightSyncError: an engine refuses them or cannot be reached; gives its message. The others have them.
        """
        self._background.require_idle()
        self._on_sender(self._send_whole)
        return self.sender.version

    def update(self) -> int:
        """Send what has changed since the last call to all engines, reset their prefix caches, and return the version.

        The version is also the `weight_version` that vLLM gives with each output.

        Raises:
            WeightSyncError: an engine refuses the update or cannot be reached; gives its message. An engine of one
                worker keeps its weights and its version; the workers of an engine of several may have different
                weights, and a server then remains paused. The next call brings it to the sender's version. The others
                have the new version.
        """
        self._background.require_idle()
        pending = self.sender.update()
        self._on_sender(lambda: self._send_update(pending))
        return self.sender.version

    def begin_update(self) -> None:
        """Make the next version as `update` does, and send it in the background: `finish_update` waits for it.

        Returns when the active values are copied in the order of the current stream (see `WeightSender.update`), so
        that the next training step may follow directly. A thread sends the message, on streams of its own. An `LLM` of
        this process must not be used until `finish_update`, and no CUDA graph may be captured.

        Raises:
            WeightSyncError: an update has begun and was not finished. Or as `WeightSender.update`.
        """
        self._background.require_idle()
        pending = self.sender.update()
        self._background.begin(lambda: self._send_update(pending))

    def finish_update(self) -> int:
        """Wait until all engines have the version that `begin_update` has made, and return it.

        Raises:
            WeightSyncError: no update has begun. Or as `update`.
        """
        with self._background.finishing() as wait:
            self._on_sender(wait)
        return self.sender.version

    def _on_sender(self, function: Callable[[], object]) -> None:
        """Call a function where the sender is, and raise its errors on all ranks."""
        if isinstance(self.sender, DistributedWeightSender):
            self.sender.on_rank_0(function)
        else:
            function()

    def _send_whole(self) -> None:
        sender = self._own
        if sender is None:  # on another rank
            return
        messages = _whole(sender)
        _on_all(self._connections, lambda connection: connection.send(messages, sender.version))

    def _send_update(self, pending: PendingMessage | None) -> None:
        sender = self._own
        if sender is None or pending is None:  # on another rank
            return
        message = pending.wait()
        data = message.to_bytes()
        whole: list[bytes] = []
        lock = threading.Lock()

        def send(connection: Connection) -> None:
            if not connection.has_failed and connection.weight_version() == str(message.base_version):
                connection.send([data], message.version)
                return
            with lock:
                if not whole:
                    with self._background.streams():
                        whole.extend(_whole(sender))
            connection.send(whole, message.version)

        _on_all(self._connections, send)


def _whole(sender: WeightSender) -> list[bytes]:
    return [sender.mask_message().to_bytes(), sender.state_message().to_bytes()]


def _on_all(connections: Sequence[Connection], action: Callable[[Connection], None]) -> None:
    """Run an action for all engines at once, and raise one error for all that failed after the others have ended."""
    with ThreadPoolExecutor(len(connections)) as pool:
        raise_errors([pool.submit(action, connection) for connection in connections])


def raise_errors(futures: Sequence[Future[None]], *others: WeightSyncError) -> None:
    """Wait for all, and raise one WeightSyncError for all that failed and for `others`; another error as it is."""
    errors = [*others, *(error for future in futures if (error := future.exception()) is not None)]
    for error in errors:
        if not isinstance(error, WeightSyncError):
            raise error
    if errors:
        raise WeightSyncError(listed([str(error) for error in errors], "; "))
