"""The reference of native gradient collection, in Python: one op call for each gradient, on any backend."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .gradient_buffer import GradientBuffer, Product, to_device


class PythonGradientBuffer(GradientBuffer):
    """The same as csrc/autograd/gradient_buffer.h, without its queues."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drop()

    def add_dense(self, i: int, grad: Tensor) -> None:
        self._gather([i], [grad], self.sum_sq[i : i + 1], accumulate=self._received[i])
        self._received[i] = True

    def _gather(self, which: list[int], grads: list[Tensor], sum_sq: Tensor, *, accumulate: bool) -> None:
        self.ops.masked_grad_gather_(
            self.values,
            [grad.contiguous() for grad in grads],
            self.indices,
            [self.starts[i] for i in which],
            [self.ends[i] for i in which],
            scale=None,
            accumulate=accumulate,
            sum_sq=sum_sq,
            found_inf=self.found_inf,
            **self.layout(which),
        )

    def add_tiles(self, products: Sequence[Product]) -> None:
        assert self.tiles is not None
        for i, left, right, token_offsets in products:
            self.ops.tile_weight_grad_(
                self.values,
                [left.contiguous()],
                [right.contiguous()],
                self.tiles.table,
                self.tiles.starts[i : i + 1],
                self.tiles.ends[i : i + 1],
                tile_size=self.tiles.tile_size,
                scale=None,
                accumulate=self._received[i],
                sum_sq=self.sum_sq[i : i + 1],
                found_inf=self.found_inf,
                token_offsets=token_offsets,
            )
            self._received[i] = self._received_tiles[i] = True

    def add_values(self, i: int, values: Tensor) -> None:
        slots = self.values[self.segment(i)]
        if self._received[i]:
            slots.add_(values)  # the sum is rounded once
        else:
            slots.copy_(values)
        stored = slots.float()
        self.sum_sq[i] = stored.square().sum()
        if self.found_inf is not None:
            self.found_inf.masked_fill_(~stored.isfinite().all(), torch.inf)
        self._received[i] = self._received_tiles[i] = True

    @property
    def received(self) -> list[bool]:
        return self._received

    def received_tiles(self, i: int) -> bool:
        return self._received_tiles[i]

    def drop(self) -> None:
        self._received = [False] * len(self.params)
        self._received_tiles = [False] * len(self.params)

    def gather_dense_grads(self) -> None:  # one call: with grads='dense' this is also the buffer of native backends
        if self.values.numel() != self.nnz:
            self.values = self.values.new_zeros(self.nnz)
        which = [i for i, p in enumerate(self.params) if p.grad is not None]
        grads = [p.grad for p in self.params if p.grad is not None]
        sum_sq = self.sum_sq if len(which) == len(self.params) else torch.zeros_like(self.sum_sq[: len(which)])
        if which:
            self._gather(which, grads, sum_sq, accumulate=False)
        if len(which) < len(self.params):
            self.sum_sq[to_device(which, torch.int64, self.device)] = sum_sq
        self._received = [p.grad is not None for p in self.params]


class PythonBackwardNotifier:
    """The same as csrc/autograd/backward_notifier.h."""

    def __init__(
        self,
        params: Sequence[Tensor],
        group_of: Sequence[int],
        ready: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self._ready, self._ended = ready, ended
        self._sizes = [group_of.count(group) for group in range(max(group_of) + 1)]
        self._remaining: list[int] = []
        self._pass = -1
        self._lock = threading.Lock()  # a pass has a thread for each device
        # A parameter does not keep its node alive.
        self._nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(param).node for param in params]
        pairs = zip(self._nodes, group_of, strict=True)
        self._handles = [node.register_hook(NotifierHook(self, group)) for node, group in pairs]

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
        """Remove the hooks."""
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
