"""Sends updates in a thread, so that training goes on meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..errors import WeightSyncError


class Background:
    """Runs the sending of one update at a time in a thread, on streams of its own.

    Args:
        devices: that the sending uses. On its GPUs it has new current streams, since the current stream of a new thread
            is the default one, on which training usually runs.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        # The same ones for every update: the allocator gives memory of one stream to no other.
        self._streams: list[torch.cuda.Stream] = []
        self._future: Future[object] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called, and the function was not finished by `finishing`."""
        return self._future is not None

    def require_idle(self) -> None:
        """Raise WeightSyncError if an update has begun and was not finished."""
        if self._future is not None:
            raise WeightSyncError("an update has begun: call finish_update() first")

    def begin(self, send: Callable[[], object]) -> None:
        """Call a function in a new thread."""
        self.require_idle()

        def run() -> None:
            with self.streams():
                send()

        pool = ThreadPoolExecutor(1, thread_name_prefix="sparse_opt_weight_sync")
        self._future = pool.submit(run)
        pool.shutdown(wait=False)  # the thread ends with the function

    @contextlib.contextmanager
    def finishing(self) -> Iterator[Callable[[], object]]:
        """Provide a function that waits for the one that has begun, and raises its error.

        Afterwards the next one may begin, unless the wait was interrupted, as by Ctrl-C: then call this again.

        Raises:
            WeightSyncError: none has begun.
        """
        if self._future is None:
            raise WeightSyncError("no update has begun: call begin_update() first")
        try:
            yield self._future.result
        except Exception:
            self._future = None
            raise
        self._future = None

    @contextlib.contextmanager
    def streams(self) -> Iterator[None]:
        """Give the calling thread other current streams on the GPUs than those of training."""
        self._streams = self._streams or [torch.cuda.Stream(device) for device in self._gpus]
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield
