"""The calls that change the weights of one vLLM engine: in this process, or on a server over HTTP."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from http.client import HTTPException
from typing import Any, Literal

from ...errors import WeightSyncError

Pause = Literal["keep", "wait", "abort"]
Update = Mapping[str, Any]  # the fields of `engine.SparseUpdateInfo`
# The timeout of requests to a server that has not answered another one, and of those that end a connection, in seconds.
_PATIENCE = 10.0


def kept_by_all(count: int) -> str:
    """Return the end of the error with which so many workers of an engine have all refused an update."""
    return f"all {count} workers have kept their weights"


class ServerLost(WeightSyncError):
    """A server cannot be reached, has ended during a request, or has not answered it in time."""


class Connection(ABC):
    """One engine. All methods raise WeightSyncError with the engine's message if a call fails.

    Attributes:
        has_failed: whether the last update has failed, so that the engine needs the mask and all active values.
    """

    has_failed = False
    _may_differ = False  # the weights of its workers, since an update that has failed
    _held: str  # what an error says of an engine whose workers may have different weights

    @abstractmethod
    def weight_version(self) -> str:
        """Return the version that vLLM reports with its outputs; "default" for an engine that has just started."""

    def initialize(self, transport: str, address: str, timeout: float) -> None:
        """Let the workers connect to a sender; see `engine.SparseInitInfo`."""
        info = {"transport": transport, "address": address, "timeout": timeout}
        self._call("init_weight_transfer_engine", {"init_info": info})

    def disconnect(self) -> None:
        """Let the workers leave the sender that they are connected to."""
        self.initialize("bytes", "", 0.0)

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of workers."""

    def send(self, updates: Sequence[Update], version: str | None) -> None:
        """Apply updates in order, as one update of vLLM that sets the weight version and resets the prefix cache.

        Args:
            version: None keeps the one that the engine has.

        Raises:
            WeightSyncError: with the engine's message. An engine whose workers have all refused the update has the
                weights that it had, and generates on. Otherwise the workers of an engine of several may have different
                weights: a server remains paused until an update succeeds.
        """
        self.begin()
        self.complete(updates, version)

    def begin(self) -> None:
        """Pause the engine and start an update of vLLM, which `complete` ends."""
        paused = False
        try:
            self._pause()
            paused = True
            self._call("start_weight_update")
        except WeightSyncError as error:
            # It does not start while workers are in the session of an update that was interrupted.
            raise self._abandoned(error, sent=False, in_session=paused) from error

    def complete(self, updates: Sequence[Update], version: str | None) -> None:
        """Apply updates in the update of vLLM that `begin` has started, and end it; see `send`."""
        finished = False
        try:
            for update in updates:
                self._update(update)
            self._finish(version)
            finished = True
            self._reset_prefix_cache()
        except WeightSyncError as error:
            in_session = not finished and self._are_in_session(error)
            raise self._abandoned(error, sent=True, in_session=in_session) from error
        self._resume()
        self.has_failed = self._may_differ = False

    def _are_in_session(self, error: WeightSyncError) -> bool:
        """Whether workers may be in vLLM's session of an update that has failed with this error.

        A worker that refuses an update leaves the session. Of several workers the others are still in it. A single one
        must not be told to finish: vLLM would log the traceback of "finish_weight_update called without a matching
        start_weight_update".
        """
        if not isinstance(error, ServerLost):
            with suppress(WeightSyncError):
                return self.world_size() > 1
        return True

    def _abandoned(self, error: WeightSyncError, *, sent: bool, in_session: bool) -> WeightSyncError:
        """End an update that has failed, and return its error with the state in which the engine is left."""
        self.has_failed = True
        if in_session:
            with suppress(WeightSyncError):
                self._finish(None)
        text = str(error)
        actions: list[Callable[[], str | None]] = [self._reset_prefix_cache, lambda: self._resume_or_hold(str(error))]
        for action in actions if sent else [] if self._may_differ else [self._resume]:
            try:
                text += action() or ""
            except WeightSyncError as second:
                both_lost = isinstance(error, ServerLost) and isinstance(second, ServerLost)
                if not both_lost and str(second) not in text:
                    text += f"; then {second}"
        return WeightSyncError(text)

    def _resume_or_hold(self, error: str) -> str:
        """Resume an engine of one worker, and one whose workers have all refused the update that has this error.

        Another one is kept paused, and what the error is to say of it is returned. The workers of data parallelism
        count too, and are not in the agreement of those of one replica.
        """
        self._may_differ = True
        if (count := self.world_size()) == 1 or kept_by_all(count) in error:
            self._may_differ = False
            self._resume()
            return ""
        self._hold()
        return f"; the weights of its {count} workers may differ, and {self._held}"

    @abstractmethod
    def _pause(self) -> None: ...

    @abstractmethod
    def _resume(self) -> None: ...

    @abstractmethod
    def _hold(self) -> None:
        """Keep the engine paused, or pause it."""

    @abstractmethod
    def _call(self, method: str, content: dict[str, Any] | None = None, /) -> Any:
        """Call a method of vLLM by its name, which is also that of a server's route."""

    @abstractmethod
    def _update(self, update: Update) -> None: ...

    @abstractmethod
    def _finish(self, version: str | None) -> None: ...

    @abstractmethod
    def _reset_prefix_cache(self) -> None:
        """Drop all KV blocks: running requests compute theirs again, and no later request finds old ones.

        Those that a KV connector has moved to other memory are dropped too.
        """


class LocalEngine(Connection):
    """A `vllm.LLM` of this process.

    Args:
        llm: it runs no requests during an update, because `LLM.generate` returns after its requests have ended. The
            caller holds it: its memory is free when the caller drops it.
    """

    _held = "it must not generate before an update has succeeded"

    def __init__(self, llm: Any) -> None:
        self._llm = weakref.ref(llm)

    def weight_version(self) -> str:
        return self._call("get_weight_version")

    def world_size(self) -> int:
        return int(self._engine().llm_engine.vllm_config.parallel_config.world_size_across_dp)

    def _pause(self) -> None:
        """Do nothing: no requests run."""

    def _resume(self) -> None:
        """Do nothing: no requests run."""

    def _hold(self) -> None:
        """Do nothing: the caller decides when to generate."""

    def _update(self, update: Update) -> None:
        self._call("update_weights", {"update_info": dict(update)})

    def _finish(self, version: str | None) -> None:
        self._call("finish_weight_update", version)

    def _reset_prefix_cache(self) -> None:
        if not self._call("reset_prefix_cache", True, True):
            raise WeightSyncError("reset_prefix_cache of the vLLM engine failed: blocks are still in use")

    def _engine(self) -> Any:
        if (llm := self._llm()) is None:
            raise WeightSyncError("the vLLM engine was deleted: keep the LLM as long as it is updated")
        return llm

    def _call(self, method: str, *args: Any) -> Any:
        llm = self._engine()
        try:
            return getattr(llm, method)(*args)
        except Exception as error:  # vLLM raises a plain Exception with the message of the worker's error
            raise WeightSyncError(f"{method} of the vLLM engine failed: {error}") from error


class Server(Connection):
    """A server of vLLM with its development routes (VLLM_SERVER_DEV_MODE=1).

    Args:
        address: `http://host:port`.
        pause: see `VLLMWeightSync`.
        timeout: of each request, in seconds.
    """

    _held = "it is paused until an update has succeeded"

    def __init__(self, address: str, pause: Pause | None, timeout: float) -> None:
        if urllib.parse.urlsplit(address).scheme not in ("http", "https"):
            raise WeightSyncError(f"the address of the vLLM server is {address!r}, expected http://host:port")
        self._address = address.rstrip("/")
        self._mode = pause
        self._timeout = timeout
        self._is_held = False  # paused after an error, also with pause=None

    def _abandoned(self, error: WeightSyncError, *, sent: bool, in_session: bool) -> WeightSyncError:
        with self._impatient() if isinstance(error, ServerLost) else nullcontext():
            return super()._abandoned(error, sent=sent, in_session=in_session)

    def disconnect(self) -> None:
        with self._impatient():
            super().disconnect()

    @contextmanager
    def _impatient(self) -> Iterator[None]:
        """Let requests wait for `_PATIENCE` seconds at most."""
        timeout = self._timeout
        self._timeout = min(timeout, _PATIENCE)
        try:
            yield
        finally:
            self._timeout = timeout

    def weight_version(self) -> str:
        return str(self._value("weight_info", "weight_version", method="GET"))

    def world_size(self) -> int:
        count = self._value("get_world_size", "world_size", method="GET")
        if not isinstance(count, int):
            raise WeightSyncError(f"{self._address}/get_world_size has world_size {count!r}, expected a number")
        return count

    def _pause(self) -> None:
        if self._mode is not None:
            # The caches are reset after the update. Each reset takes as long as vLLM has blocks, about 50 ns for one.
            self._call(f"pause?mode={self._mode}&clear_cache=false")

    def _resume(self) -> None:
        if self._mode is not None or self._is_held:
            self._call("resume")
            self._is_held = False

    def _hold(self) -> None:
        if self._mode is None and not self._is_held:
            self._call("pause?mode=keep&clear_cache=false")
        self._is_held = True

    def _update(self, update: Update) -> None:
        content = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in update.items()}
        self._call("update_weights", {"update_info": content})

    def _finish(self, version: str | None) -> None:
        self._call("finish_weight_update", {"weight_version": version})

    def _reset_prefix_cache(self) -> None:
        if not self._value("reset_prefix_cache?reset_running_requests=true&reset_external=true", "success"):
            raise WeightSyncError(f"{self._address}/reset_prefix_cache failed: blocks are still in use")

    def _value(self, route: str, key: str, method: str = "POST") -> Any:
        answer = self._call(route, method=method)
        if not isinstance(answer, dict) or key not in answer:
            raise WeightSyncError(f"{self._address}/{route} answered {str(answer)[:200]!r}, expected {key!r} in it")
        return answer[key]

    def _call(self, route: str, content: dict[str, Any] | None = None, method: str = "POST") -> Any:
        return request_json(f"{self._address}/{route}", content, method=method, timeout=self._timeout)


def connections_to(engines: Any, pause: Pause | None, timeout: float) -> list[Connection]:
    """Return a connection for each engine: an `LLM`, the address of a server, or a list of these."""
    several = isinstance(engines, Sequence) and not isinstance(engines, str)
    return [
        Server(engine, pause, timeout) if isinstance(engine, str) else LocalEngine(engine)
        for engine in (engines if several else [engines])
    ]


def request_json(url: str, content: Any = None, *, method: str = "POST", timeout: float) -> Any:
    """Return the JSON answer of a vLLM server; {} if it has no body.

    Args:
        content: sent as JSON; None sends no body.
        timeout: in seconds.

    Raises:
        ServerLost: the server cannot be reached, ends during the request, or does not answer within `timeout`.
        WeightSyncError: it answers with an error, whose message this has, or not in JSON.
    """
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        raise WeightSyncError(f"{url} answered {error.code}: {_message(error.read())}") from error
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            raise ServerLost(f"{url} has not answered within {timeout:g} s") from error
        how = "cannot be reached" if isinstance(error, urllib.error.URLError) else "has ended during the request"
        raise ServerLost(f"{url} {how}: {cause}") from error
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        text = body[:200].decode(errors="replace")
        raise WeightSyncError(f"{url} answered {text!r}, expected JSON") from error


def _message(body: bytes) -> str:
    """Return the message of an error response of vLLM, or the start of the body."""
    try:
        return " ".join(str(json.loads(body)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
