"""BackwardNotifier: calls back when the gradients of groups of parameters are complete in a backward pass."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter


class BackwardNotifier(Protocol):
    """Calls `ready(g)` when a backward pass has accumulated the gradients of all parameters of group g, and `ended()`.

    The latter is called at the end of each pass that has reached any parameter. As in DistributedDataParallel, the
    hooks are on the nodes that accumulate the gradients: they run once in a pass, also for undefined gradients, and
    after the parameter's post-accumulate-grad hooks. `binding.backward_notifier` creates one.
    """

    def remove(self) -> None:
        """Remove the hooks."""


class PythonBackwardNotifier:
    """The same as csrc/autograd/backward_notifier.h, for installations without the extension."""

    def __init__(
        self,
        params: Sequence[Parameter],
        group_of: Sequence[int],
        ready: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self._ready, self._ended = ready, ended
        self._sizes = [group_of.count(group) for group in range(max(group_of) + 1)]
        self._remaining: list[int] = []
        self._pass = -1
        self._lock = threading.Lock()  # a pass has a thread for each device
        self._nodes: list[Any] = []  # a parameter does not keep its node alive
        self._handles = []
        for param, group in zip(params, group_of, strict=True):
            node = torch.autograd.graph.get_gradient_edge(param).node
            self._nodes.append(node)
            self._handles.append(node.register_hook(NotifierHook(self, group)))

    def reached(self, group: int) -> None:
        """Count a parameter of the group whose gradient has been accumulated."""
        with self._lock:
            number = torch._C._current_graph_task_id()
            if number != self._pass:  # a pass that raised never ended
                self._pass, self._remaining = number, list(self._sizes)
                torch.autograd.Variable._execution_engine.queue_callback(self._ended)
            self._remaining[group] -= 1
            complete = self._remaining[group] == 0
        if complete:
            self._ready(group)

    def remove(self) -> None:
        """See `BackwardNotifier`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


class NotifierHook:
    """The hook of a `PythonBackwardNotifier` on a parameter's node. It does not use the gradient.

    The node does not keep the notifier alive: Python's garbage collector could not free the cycle.
    """

    def __init__(self, notifier: PythonBackwardNotifier, group: int) -> None:
        self._notifier, self._group = weakref.ref(notifier), group

    def __call__(self, grad_inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
        notifier = self._notifier()
        if notifier is not None:
            notifier.reached(self._group)


def in_nested_pass() -> bool:
    """Whether the running backward pass was started by the backward pass of a node of another one, on this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return frame is not None
