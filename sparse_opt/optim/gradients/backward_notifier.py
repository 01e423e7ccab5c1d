"""BackwardNotifier: calls back when the gradients of groups of parameters are complete in a backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
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
    """The same as csrc/optim/backward_notifier.h, for installations without the extension."""

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
            self._handles.append(node.register_hook(self._hook(group)))

    def _hook(self, group: int) -> Callable[[Any, Any], None]:
        def reached(grad_inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> None:
            with self._lock:
                number = torch._C._current_graph_task_id()
                if number != self._pass:  # a pass that raised never ended
                    self._pass, self._remaining = number, list(self._sizes)
                    torch.autograd.Variable._execution_engine.queue_callback(self._ended)
                self._remaining[group] -= 1
                complete = self._remaining[group] == 0
            if complete:
                self._ready(group)

        return reached

    def remove(self) -> None:
        """See `BackwardNotifier`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
