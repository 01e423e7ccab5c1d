"""UninterruptedContext: a context manager whose entry and exit no signal handler interrupts."""

from __future__ import annotations

import importlib
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ContextDecorator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# `signal` wraps this module; its functions convert every argument and result to enums, which takes 15 times as long.
_signal = importlib.import_module("_signal")
_SIGNALS = tuple(sorted(signal.valid_signals()))


class UninterruptedContext(ContextDecorator, ABC):
    """A context manager whose `__enter__` and `__exit__` cannot be interrupted by an exception of a signal handler.

    Python calls a signal handler in the main thread, between two instructions of the code that runs there, and raises
    the handler's exception (KeyboardInterrupt on Ctrl-C) at that point. That may be before the first line of an
    `__exit__` (or after the last line of a generator's `with` block), where no `try` protects the code, so the handlers
    themselves have to be deferred. From entry to exit each Python handler is wrapped in another one, which calls it

    - immediately if the signal arrives in the body of the `with` statement, or after it;
    - after everything is undone, if the signal arrives during `__exit__`;
    - after everything is done, if it arrives during `__enter__`; an exception of the handler then undoes the entry.

    Signals without a Python handler are not affected, nor are threads other than the main one, which run no handlers.
    Use it in a `with` statement. A caller that calls `__enter__` itself, as `contextlib.ExitStack` does, can be
    interrupted right after that call, and a generator that contains the `with` statement (`contextlib.contextmanager`)
    can be interrupted outside of the generator, which is then not resumed.
    """

    def __init__(self) -> None:
        self._is_entered = self._is_deferring = False
        self._installed: list[tuple[int, _DeferringHandler]] = []
        self._deferred: list[tuple[Handler, int, FrameType | None]] = []

    @abstractmethod
    def enter(self) -> None:
        """Make the changes. If it raises, `leave` is called."""

    @abstractmethod
    def leave(self) -> None:
        """Undo the changes that `enter` has made so far, which may be none."""

    def __enter__(self) -> None:
        if self._is_entered:
            raise RuntimeError(f"this {type(self).__name__} has been entered, and not left")
        try:
            self._is_entered = True
            self._defer()
            self.enter()
            self._call_deferred()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._leave()

    def _leave(self) -> None:
        try:
            self.leave()
        finally:
            self._stop_deferring()

    def _defer(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_deferring = True
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                wrapper = _DeferringHandler(self, _unwrapped(handler))
                self._installed.append((number, wrapper))
                _signal.signal(number, wrapper)

    def _stop_deferring(self) -> None:
        try:
            self._is_entered = False
            if threading.current_thread() is threading.main_thread():
                self._restore_handlers()
        finally:
            self._is_deferring = False
            self._call_deferred()

    def _restore_handlers(self) -> None:
        """Restore all handlers, even if a restored one is called and raises meanwhile."""
        if self._installed:
            number, wrapper = self._installed[-1]
            try:
                if _signal.getsignal(number) is wrapper:  # otherwise the body has installed another one
                    _signal.signal(number, _unwrapped(wrapper.handler))
                self._installed.pop()
            finally:
                self._restore_handlers()

    def _call_deferred(self) -> None:
        if self._deferred:
            handler, number, frame = self._deferred.pop(0)
            try:
                handler(number, frame)
            finally:
                self._call_deferred()

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Call `handler` for a signal that arrived while `frame` was running, or defer it."""
        caller = frame
        while self._is_deferring and caller is not None:
            if caller.f_code in _CODES and caller.f_locals.get("self") is self:
                self._deferred.append((handler, number, caller.f_back))
                return
            caller = caller.f_back
        handler(number, frame)


_CODES = (UninterruptedContext.__enter__.__code__, UninterruptedContext.__exit__.__code__)


class _DeferringHandler:
    """A signal handler that wraps another one; the context decides when the other one is called."""

    def __init__(self, context: UninterruptedContext, handler: Handler) -> None:
        self.context, self.handler = context, handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.context.handle(self.handler, number, frame)

    @property
    def is_in_use(self) -> bool:
        return self.context._is_deferring


def _unwrapped(handler: Handler) -> Handler:
    """Return the handler without the wrappers of contexts that are no longer in use."""
    while isinstance(handler, _DeferringHandler) and not handler.is_in_use:
        handler = handler.handler
    return handler
