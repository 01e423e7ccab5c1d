"""Context managers that are entered and left whole, whatever signals arrive."""

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

# What `signal` wraps: its own functions convert every argument and result to enums, which takes 15 times as long.
_signal = importlib.import_module("_signal")
_SIGNALS = tuple(sorted(signal.valid_signals()))


class UninterruptedContext(ContextDecorator, ABC):
    """A context manager whose `__enter__` and `__exit__` are not cut short by what a signal handler raises.

    Python calls a signal handler in the main thread, between two instructions of whatever runs there. What the handler
    raises, as KeyboardInterrupt on Ctrl-C, is raised at that place. That may be before the first line of an `__exit__`
    (or after the last line of a generator's `with` block), where no `try` is in force yet, so the handlers themselves
    have to wait. From entry to exit each of Python's handlers has another one in front of it, which calls it

    - at once if the signal arrives in the body of the `with` statement, or after it;
    - when everything is undone again, if the signal arrives during `__exit__`;
    - when everything is done, if it arrives during `__enter__`, and what it raises undoes the entry.

    Signals without a Python handler do not concern it, nor other threads than the main one, which run no handlers.
    Use it in a `with` statement. A caller that calls `__enter__` itself, as `contextlib.ExitStack` does, may be
    interrupted right after it, and a generator with the `with` statement in it (`contextlib.contextmanager`) may be
    interrupted outside of the generator, which is then not resumed.
    """

    def __init__(self) -> None:
        self._is_entered = self._is_deferring = False
        self._in_front: list[tuple[int, _InFront]] = []
        self._deferred: list[tuple[Handler, int, FrameType | None]] = []

    @abstractmethod
    def enter(self) -> None:
        """Make the changes. If it raises, `leave` is called."""

    @abstractmethod
    def leave(self) -> None:
        """Undo those changes that have been made, which may be none."""

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
                in_front = _InFront(self, _still_in_use(handler))
                self._in_front.append((number, in_front))
                _signal.signal(number, in_front)

    def _stop_deferring(self) -> None:
        try:
            self._is_entered = False
            if threading.current_thread() is threading.main_thread():
                self._put_back()
        finally:
            self._is_deferring = False
            self._call_deferred()

    def _put_back(self) -> None:
        """Restore the handlers, all of them even if one that is in place again is called and raises."""
        if self._in_front:
            number, in_front = self._in_front[-1]
            try:
                if _signal.getsignal(number) is in_front:  # else the body has installed another one
                    _signal.signal(number, _still_in_use(in_front.handler))
                self._in_front.pop()
            finally:
                self._put_back()

    def _call_deferred(self) -> None:
        if self._deferred:
            handler, number, frame = self._deferred.pop(0)
            try:
                handler(number, frame)
            finally:
                self._call_deferred()

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Call `handler` for a signal that has arrived while `frame` was running, or defer it."""
        caller = frame
        while self._is_deferring and caller is not None:
            if caller.f_code in _CODES and caller.f_locals.get("self") is self:
                self._deferred.append((handler, number, caller.f_back))
                return
            caller = caller.f_back
        handler(number, frame)


_CODES = (UninterruptedContext.__enter__.__code__, UninterruptedContext.__exit__.__code__)


class _InFront:
    """A signal handler that leaves it to a context when to call another one."""

    def __init__(self, context: UninterruptedContext, handler: Handler) -> None:
        self.context, self.handler = context, handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.context.handle(self.handler, number, frame)

    @property
    def is_in_use(self) -> bool:
        return self.context._is_deferring


def _still_in_use(handler: Handler) -> Handler:
    """The handler, or the one behind it where the context in front has been left, out of turn or interrupted."""
    while isinstance(handler, _InFront) and not handler.is_in_use:
        handler = handler.handler
    return handler
