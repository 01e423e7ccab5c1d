"""UpdateSender: makes updates, and sends them in a thread while training goes on."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..errors import WeightSyncError
from .distributed import DistributedWeightSender
from .sender import PendingMessage, WeightSender


class UpdateSender(ABC):
    """The base of channels and of clients of inference engines, whose updates may be sent in the background.

    Args:
        weights: the sender of the weights.
        devices: that the sending uses. On its GPUs a thread has new current streams, since the current stream of a new
            thread is the default one, on which training usually runs.
    """

    def __init__(self, weights: WeightSender | DistributedWeightSender, devices: Iterable[torch.device]) -> None:
        self.weights = weights
        self.devices = tuple(dict.fromkeys(devices))
        # The same ones for every update: the allocator gives memory of one stream to no other.
        self._streams: list[torch.cuda.Stream] = []
        self._future: Future[object] | None = None  # of an update that has begun

    def begin_update(self) -> None:
        """Make the next version as `update` does, and send it in the background: `finish_update` waits for it.

        Returns when the active values are copied in the order of the current stream (see `WeightSender.update`), so
        that the next training step may follow directly. A thread sends the message, on streams of its own, for which
        neither the host nor the training stream waits. Until `finish_update`, only `close` and `receivers` of a channel
        may be used, no `LLM` of this process may run, and no CUDA graph may be captured.

        Raises:
            WeightSyncError: an update has begun and was not finished. Or as `WeightSender.update`.
        """
        self._require_idle()
        update = self.weights.update()

        def run() -> None:
            if update is not None:  # on rank 0
                with self._on_own_streams():
                    self.send(update)

        pool = ThreadPoolExecutor(1, thread_name_prefix="sparse_opt_weight_sync")
        self._future = pool.submit(run)
        pool.shutdown(wait=False)  # the thread ends with the function

    def finish_update(self) -> int:
        """Wait until the version that `begin_update` has made is sent, and return its number.

        If this is interrupted, as by Ctrl-C, call it again.

        Raises:
            WeightSyncError: no update has begun. Or as `update`.
        """
        if self._future is None:
            raise WeightSyncError("no update has begun: call begin_update() first")
        try:
            self.weights.on_rank_0(self._future.result)
        except Exception:
            self._future = None
            raise
        self._future = None
        return self.weights.version

    @abstractmethod
    def send(self, update: PendingMessage | None) -> None:
        """Bring all to the version of the sender's last update; None: whatever they have. On rank 0 only."""

    def _require_idle(self) -> None:
        """Raise WeightSyncError if an update has begun and was not finished."""
        if self._future is not None:
            raise WeightSyncError("an update has begun: call finish_update() first")

    @contextlib.contextmanager
    def _on_own_streams(self) -> Iterator[None]:
        """Give the calling thread other current streams on the GPUs than those of training."""
        gpus = [device for device in self.devices if device.type == "cuda"]
        self._streams = self._streams or [torch.cuda.Stream(device) for device in gpus]
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield
