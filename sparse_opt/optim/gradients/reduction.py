"""GradientReducer: averages compact gradients over the ranks of a process group, next to the backward pass."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ... import backends
from ..ranks.group import all_reduce_mean, wait
from .gradient_buffer import GradientBuffer
from .python_collection import PythonBackwardNotifier

# Smaller pieces start earlier, but each costs the host about 0.25 ms: see "Reductions of compact gradients" in
# docs/dev/notebook.md.
MAX_PIECE_BYTES = 50 * 2**20


@dataclass(frozen=True, eq=False)
class Piece:
    """A contiguous part of one buffer, the gradients of whole parameters, that one all-reduce averages."""

    buffer: GradientBuffer
    params: range
    # [nnz of the piece], a view of the buffer's values. It is kept: a thread of the process group that released the
    # last reference to a tensor would have to take the interpreter's lock, which ends the process at its exit.
    values: Tensor


def split(buffers: Sequence[GradientBuffer], position: Mapping[Tensor, int], max_bytes: int) -> list[Piece]:
    """Split the buffers into pieces of at most `max_bytes`, or one parameter; in the order in which they complete.

    Args:
        position: of each parameter in the model. A backward pass completes the gradients of the last parameters first.
    """
    pieces = []
    for buffer in buffers:
        end, size = len(buffer.params), buffer.values.element_size()
        while end:
            begin = end - 1
            while begin and (buffer.ends[end - 1] - buffer.starts[begin - 1]) * size <= max_bytes:
                begin -= 1
            values = buffer.values[buffer.starts[begin] : buffer.ends[end - 1]]
            pieces.append(Piece(buffer, range(begin, end), values))
            end = begin
    return sorted(pieces, key=lambda piece: -min(position[piece.buffer.params[i]] for i in piece.params))


def backward_notifier(
    params: Sequence[Tensor], group_of: Sequence[int], ready: Callable[[int], None], ended: Callable[[], None]
) -> Any:
    """Call `ready(g)` when a backward pass has accumulated the gradients of all parameters of group g, and `ended()`.

    The latter is called at the end of each pass that has reached any parameter. As in DistributedDataParallel, the
    hooks are on the nodes that accumulate gradients: they run once in a pass, after post-accumulate-grad hooks, also
    for undefined gradients. `remove()` of the result removes them.

    Args:
        group_of: the number of each parameter's group.
    """
    native, _ = backends.autograd_module()
    return (PythonBackwardNotifier if native is None else native.BackwardNotifier)(params, group_of, ready, ended)


def _call(method: weakref.WeakMethod[Callable[..., None]], *arguments: int) -> None:
    bound = method()
    if bound is not None:
        bound(*arguments)


def _require_outermost_pass() -> None:
    """Raise a RuntimeError in a nested backward pass, from which the end of the outermost one cannot be observed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:  # the backward pass of a node, on this thread
            raise RuntimeError(
                "gradients arrived in a backward pass inside another one, as of torch.utils.checkpoint with "
                "use_reentrant=True, where they cannot be reduced across ranks; use use_reentrant=False"
            )
        frame = frame.f_back


class GradientReducer:
    """Replaces the compact gradients of all ranks by their mean, once per backward pass outside `no_sync()`.

    Every rank launches one all-reduce per piece, always in the order of the pieces: with `overlap` as soon as its
    gradients and those of all pieces before it are complete, else at the end of the pass. A gradient that a rank does
    not have counts as zero. If a step finds nothing reduced, it reduces then. All ranks receive the same bits. A pass
    after a reduction adds to the mean, and its own reduction averages the sum: the mean of all passes.

    Args:
        lock: of the collector; held while the buffers change.
        position: of each parameter in the model; the same on all ranks.
        overlap: False for sharded parameters: `fully_shard` gathers them in the same process group, and if a rank has
            no gradient of some, the ranks would call the collectives in different orders.
        on_launch: called before the first reduction of a pass, with the lock held.
        on_reduced: called when a backward pass has launched its last reduction, with the lock held.
    """

    def __init__(
        self,
        buffers: Sequence[GradientBuffer],
        group: dist.ProcessGroup,
        lock: threading.RLock,
        position: Mapping[Tensor, int],
        on_launch: Callable[[], None],
        on_reduced: Callable[[], None],
        *,
        overlap: bool = True,
    ) -> None:
        self.group, self._overlap = group, overlap
        self.reduced = False  # the buffers hold means, or will as soon as the reductions in flight have finished
        self._buffers, self._lock, self._on_launch, self._on_reduced = buffers, lock, on_launch, on_reduced
        self._pieces = split(buffers, position, MAX_PIECE_BYTES)
        self._notifier: Any = None
        self._enabled = True
        # Of the running pass:
        self._pass = -1
        self._ready: set[int] = set()
        self._launched = 0  # pieces
        self._works: list[dist.Work] = []
        devices = {buffer.device for buffer in buffers if buffer.device.type == "cuda"}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._number = 0  # of the last reduction

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        enabled, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = enabled

    def attach(self) -> None:
        """Register the hooks; the parameters must require grad."""
        params = [piece.buffer.params[i] for piece in self._pieces for i in piece.params]
        piece_of = [n for n, piece in enumerate(self._pieces) for _ in piece.params]
        # Weak: a native notifier keeps its functions alive where Python's garbage collector cannot see it.
        ready, end = weakref.WeakMethod(self._on_ready), weakref.WeakMethod(self._on_end)
        self._notifier = backward_notifier(params, piece_of, lambda piece: _call(ready, piece), lambda: _call(end))

    def detach(self) -> None:
        """Remove the hooks, and wait for reductions in flight."""
        if self._notifier is not None:
            self._notifier.remove()
            self._notifier = None
        self.wait()

    # Called by the notifier, on a thread of the backward pass

    def _on_ready(self, piece: int) -> None:
        with self._lock:
            if not self._enabled:
                return
            _require_outermost_pass()
            number = torch._C._current_graph_task_id()
            if number != self._pass:  # an earlier pass may have ended by an exception
                self.check_complete()
                self._pass = number
                self._ready.clear()
            self._ready.add(piece)
            while self._overlap and self._launched in self._ready:
                self._launch_next()

    def _on_end(self) -> None:
        with self._lock:
            if self._enabled:
                _require_outermost_pass()
                self._launch_all()
                self._on_reduced()

    def _launch_all(self) -> None:
        while self._launched < len(self._pieces):
            self._launch_next()
        self._launched = 0
        self._ready.clear()
        self.reduced = True

    def _launch_next(self) -> None:
        if self._launched == 0:
            self._on_launch()
            self._number += 1
        piece = self._pieces[self._launched]
        buffer = piece.buffer
        stream = self._streams.get(buffer.device)
        if stream is not None:  # gradients are added on that of the backward pass
            stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            received = buffer.received
            for i in piece.params:
                if not received[i]:
                    slots = buffer.ends[i] - buffer.starts[i]
                    buffer.add_values(i, torch.zeros(slots, dtype=torch.float32, device=buffer.device))
            buffer.finish()
            self._works.append(all_reduce_mean(piece.values, self.group))
        self._launched += 1

    # Called with the collector's lock held

    def finish(self) -> None:
        """Make the means available on the current stream; a collective if no backward pass has launched it."""
        self.check_complete()
        if not self.reduced:
            self._launch_all()
        self.wait()

    def check_complete(self) -> None:
        """Raise a RuntimeError if a backward pass ended, by an exception, after it had launched some reductions."""
        if self._launched:
            raise RuntimeError(
                f"a backward pass ended after {self._launched} of the {len(self._pieces)} reductions of its gradients, "
                "and the other ranks are waiting for the rest: end all ranks, and resume from a checkpoint"
            )

    def wait(self) -> None:
        """Make the current stream wait for the reductions in flight; with gloo, the host waits."""
        works, self._works = self._works, []
        for work in works:
            wait(work, self.group, self._number)

    def reopen(self) -> None:
        """Prepare for further gradients."""
        self.check_complete()
        self.wait()
        self.reduced = False

    # CUDA graphs of whole steps

    def attach_on(self, stream: torch.cuda.Stream) -> None:
        """Register the hooks anew, on nodes of this stream: a capture may not reach nodes of the default one."""
        if self._notifier is not None:
            self.detach()
            with torch.cuda.stream(stream):
                self.attach()

    # The mean

    def norm(self) -> Tensor:
        """Return the 2-norm of the means: one fp32 element on the first buffer's device."""
        home = self._buffers[0].device
        norms = [torch.linalg.vector_norm(b.values, dtype=torch.float32).to(home) for b in self._buffers]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def mark_nonfinite_(self, buffer: GradientBuffer, found_inf: Tensor) -> None:
        """Set `found_inf` to inf if a mean of the buffer is not finite; waits for the reductions."""
        self.wait()
        found_inf.masked_fill_(~buffer.values.isfinite().all(), torch.inf)
