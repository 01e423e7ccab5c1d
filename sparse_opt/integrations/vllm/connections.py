"""The calls that change the weights of one vLLM engine: in this process, or on a server over HTTP."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any, Literal

from ...errors import WeightSyncError

Pause = Literal["keep", "wait", "abort"]


class Connection(ABC):
    """One engine. All methods raise WeightSyncError with the engine's message if a call fails."""

    @abstractmethod
    def weight_version(self) -> str:
        """Return the version that vLLM reports with its outputs; "default" for an engine that has just started."""

    @abstractmethod
    def initialize(self, transport: str, address: str, timeout: float) -> None:
        """Let the workers connect to a sender; see `engine.SparseInitInfo`."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of workers."""

    def send(self, messages: Sequence[bytes | None], version: int) -> None:
        """Apply messages in order, as one update of vLLM that sets the weight version and resets the prefix cache.

        Args:
            messages: None is what the sender of the transport sends in a round.
        """
        with self._paused():
            self._start()
            try:
                for message in messages:
                    self._update(message)
            except WeightSyncError:
                # A worker that refuses an update leaves vLLM's session. Of several workers the others are still in it;
                # a single one answers that there is none.
                with suppress(WeightSyncError):
                    self._finish(None)
                raise
            self._finish(str(version))
            self._reset_prefix_cache()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        yield

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _update(self, message: bytes | None) -> None: ...

    @abstractmethod
    def _finish(self, version: str | None) -> None: ...

    @abstractmethod
    def _reset_prefix_cache(self) -> None:
        """Drop all KV blocks: running requests compute theirs again, and no later request finds old ones."""


class LocalEngine(Connection):
    """A `vllm.LLM` of this process.

    Args:
        llm: it runs no requests during an update, because `LLM.generate` returns after its requests have ended.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def weight_version(self) -> str:
        return self._call("get_weight_version")

    def initialize(self, transport: str, address: str, timeout: float) -> None:
        info = {"transport": transport, "address": address, "timeout": timeout}
        self._call("init_weight_transfer_engine", {"init_info": info})

    def world_size(self) -> int:
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size_across_dp)

    def _start(self) -> None:
        self._call("start_weight_update")

    def _update(self, message: bytes | None) -> None:
        self._call("update_weights", {"update_info": {"message": message}})

    def _finish(self, version: str | None) -> None:
        self._call("finish_weight_update", version)

    def _reset_prefix_cache(self) -> None:
        self._call("reset_prefix_cache", True)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._llm, method)(*args)
        except Exception as error:  # vLLM raises a plain Exception with the message of the worker's error
            raise WeightSyncError(f"{method} of the vLLM engine failed: {error}") from error


class Server(Connection):
    """A server of vLLM with its development routes (VLLM_SERVER_DEV_MODE=1).

    Args:
        address: `http://host:port`.
        pause: see `VLLMWeightSync`.
        timeout: of each request, in seconds.
    """

    def __init__(self, address: str, pause: Pause | None, timeout: float) -> None:
        if urllib.parse.urlsplit(address).scheme not in ("http", "https"):
            raise WeightSyncError(f"the address of the vLLM server is {address!r}, expected http://host:port")
        self._address = address.rstrip("/")
        self._pause = pause
        self._timeout = timeout

    def weight_version(self) -> str:
        return str(self._call("weight_info", method="GET")["weight_version"])

    def initialize(self, transport: str, address: str, timeout: float) -> None:
        info = {"transport": transport, "address": address, "timeout": timeout}
        self._call("init_weight_transfer_engine", {"init_info": info})

    def world_size(self) -> int:
        return int(self._call("get_world_size", method="GET")["world_size"])

    @contextmanager
    def _paused(self) -> Iterator[None]:
        if self._pause is None:
            yield
            return
        self._call(f"pause?mode={self._pause}")
        try:
            yield
        finally:
            self._call("resume")

    def _start(self) -> None:
        self._call("start_weight_update")

    def _update(self, message: bytes | None) -> None:
        content = None if message is None else base64.b64encode(message).decode()
        self._call("update_weights", {"update_info": {"message": content}})

    def _finish(self, version: str | None) -> None:
        self._call("finish_weight_update", {"weight_version": version})

    def _reset_prefix_cache(self) -> None:
        if not self._call("reset_prefix_cache?reset_running_requests=true")["success"]:
            raise WeightSyncError(f"{self._address}/reset_prefix_cache failed: blocks are still in use")

    def _call(self, route: str, content: dict[str, Any] | None = None, method: str = "POST") -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._address}/{route}",
            data=None if content is None else json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            raise WeightSyncError(f"{self._address}/{route} answered {error.code}: {_message(error.read())}") from error
        except (OSError, HTTPException) as error:
            raise WeightSyncError(f"{self._address}/{route} cannot be reached: {error}") from error
        return json.loads(body) if body else {}


def connections_to(engines: Any, pause: Pause | None, timeout: float) -> list[Connection]:
    """Return a connection for each engine: an `LLM`, the address of a server, or a list of these."""
    several = isinstance(engines, Sequence) and not isinstance(engines, str)
    return [
        Server(engine, pause, timeout) if isinstance(engine, str) else LocalEngine(engine)
        for engine in (engines if several else [engines])
    ]


def _message(body: bytes) -> str:
    """Return the message of an error response of vLLM, or the start of the body."""
    try:
        return " ".join(str(json.loads(body)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
