"""VLLMDeltas: several deltas of one base, served by one vLLM engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ...delta import SparseDelta
from ...errors import WeightSyncError
from .connections import connections_to


class VLLMDeltas:
    """Switches a vLLM engine between the weights of its base and of several deltas. It does not restart.

        deltas = VLLMDeltas(llm, {"math": "user/math-delta", "code": delta})
        deltas.switch("math")
        llm.generate(...)
        deltas.switch(None)  # the base

    The engine's workers decode each delta once, and keep it on the device of their weights. After a switch, the
    `weight_version` of outputs is the name of the delta, or "default" for the base.

    All requests that run have the weights of one delta: whoever sends them decides when to switch.

    Args:
        engine: a `vllm.LLM` of this process, or the address of a server; started as for `VLLMWeightSync`, with the
            checkpoint of the base. It must have the weights of this checkpoint.
        deltas: by name; see `register`.
        pause: what a server does with running requests at a switch: "wait" lets them end first, "abort" aborts them.
        timeout: of each HTTP request, in seconds.

    Raises:
        WeightSyncError: as `register`.
    """

    def __init__(
        self,
        engine: Any,
        deltas: Mapping[str, SparseDelta | str | PathLike[str]] | None = None,
        *,
        pause: Literal["wait", "abort"] = "wait",
        timeout: float = 300.0,
    ) -> None:
        if pause not in ("wait", "abort"):  # "keep" would let a request go on with the weights of another delta
            raise WeightSyncError(f"pause is {pause!r}, expected 'wait' or 'abort'")
        (self._engine,) = connections_to([engine], pause, timeout)
        for name, delta in (deltas or {}).items():
            self.register(name, delta)

    def register(self, name: str, delta: SparseDelta | str | PathLike[str]) -> None:
        """Decode a delta in the engine, which must have the weights of its base and keeps them.

        Args:
            delta: a delta, which is written to a temporary folder; or a folder that the engine can read, or a name on
                the hub, as for `SparseDelta.from_pretrained`.

        Raises:
            WeightSyncError: the delta is damaged or for another base, or changes weights that cannot be updated in this
                engine; names the tensor. Or the engine cannot be reached.
        """
        if isinstance(delta, SparseDelta):
            with tempfile.TemporaryDirectory() as folder:
                delta.save_pretrained(folder)
                self._send("register", name, source=folder)
            return
        source = Path(delta)
        self._send("register", name, source=str(source.resolve() if source.is_dir() else delta))

    def remove(self, name: str) -> None:
        """Let the engine forget a delta that is not active, and free its memory. Raises WeightSyncError."""
        self._send("remove", name)

    def switch(self, name: str | None) -> None:
        """Give the engine the weights of a delta, or with None those of the base, and reset its prefix cache.

        Raises:
            WeightSyncError: there is no such delta, other code has changed its weights, or the engine sleeps; the
                engine then keeps its weights, and generates on. Or it cannot be reached.
        """
        self._send("switch", name, version="default" if name is None else name)

    def _send(self, action: str, name: str | None, *, version: str | None = None, **source: str) -> None:
        self._engine.send([{"delta": {action: name, **source}}], version)
