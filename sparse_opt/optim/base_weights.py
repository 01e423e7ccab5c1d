"""Base weights: the starting weights of every element that may have changed, and the context that swaps them in."""

from __future__ import annotations

import importlib
import itertools
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ContextDecorator, ExitStack
from dataclasses import InitVar, dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..masks.positions import index_dtype
from ..ops import bind
from ..tensors import BASE_VERSION
from .buckets import Bucket, CompactWeights
from .gradients.collector import GradientCollector, inside_base_error
from .quantised import ShownBase
from .ranks import sharding
from .ranks.sharding import Shard
from .segments import LocalSegments, compact, fits_uint16, longest_run, packed

Handler = Callable[[int, FrameType | None], Any]

# `signal` wraps this module; its functions convert every argument and result to enums, which takes 15 times as long.
_signal = importlib.import_module("_signal")
_SIGNALS = tuple(sorted(signal.valid_signals()))

# Inside `base_weights()` the parameters have version counters of their own, so that a backward pass outside
# through a graph built inside raises, and vice versa. Readers of trained weights see by them that these are not there:
# `holds_base_weights`. On exit the bits are restored, and so are the version counters.
_ELSEWHERE = itertools.count(BASE_VERSION)
_set_versions = torch._C._autograd._unsafe_set_version_counter


@dataclass(eq=False)
class BaseWeights(LocalSegments):
    """W0 at every element of local shards that was ever active, for a set of shards that one op call can take."""

    values: Tensor  # [nnz], the parameters' dtype; offloaded ones are in pinned host memory
    backend: InitVar[str | None]
    current: CompactWeights | None = None  # of the same active elements
    offload: InitVar[bool] = False
    # Memory on the device that offloaded values may overwrite while the model holds them
    spare: Callable[[], Tensor] | None = None

    def __post_init__(self, backend: str | None, offload: bool) -> None:
        super().__post_init__()
        if offload and self.device.type != "cpu":
            self.values = self.values.to("cpu").pin_memory()
        # `values` on the device while the model holds them; without `current`, the model's weights instead
        self._exchanged: Tensor | None = None
        self._ops = bind(self.params, self.indices, self.starts, self.ends, **self.layout(), backend=backend)

    def enter_(self) -> None:
        """Put the base into the model, bit for bit."""
        values = self._on_device()
        if self.current is None:
            self._ops.indexed_swap_(values)
        else:
            self._ops.indexed_replace_(self.current.values, values)
        self._exchanged = values

    def _on_device(self) -> Tensor:
        if self.spare is not None and self.values.device != self.device:
            spare = self.spare().view(torch.uint8)
            if spare.numel() >= self.values.nbytes:
                return spare[: self.values.nbytes].view(self.values.dtype).copy_(self.values, non_blocking=True)
        return self.values.to(self.device, non_blocking=True)

    def leave_(self) -> None:
        """Undo `enter_`, bit for bit."""
        if [p.numel() for p in self.params] != self.numels:
            raise RuntimeError("a parameter has another size than when its mask was bound")
        assert self._exchanged is not None
        if self.current is None:
            self._ops.indexed_swap_(self._exchanged)
        else:
            self._ops.indexed_replace_(self._exchanged, self.current.values)
        self._exchanged = None

    def parts(self) -> Iterator[tuple[Shard, tuple[Tensor, Tensor]]]:
        """Yield (shard, (positions in its local tensor, values)) for each shard."""
        for i, shard in enumerate(self.shards):
            yield shard, (self.positions(i), self.values[self.segment(i)])


def of_buckets(
    buckets: list[Bucket], backend: str | None, collector: GradientCollector, *, offload: bool
) -> list[BaseWeights]:
    """Return the current active weights as base weights.

    Offloaded ones are swapped in by way of the compact gradient's memory, if no gradient waits there for a step.

    Raises:
        ValueError: `offload`, and parameters are sharded by fully_shard.
    """
    _require_offloadable(buckets, offload)
    return [
        BaseWeights(
            **b.shared(),
            values=compact(b),
            backend=backend,
            current=b.weights,
            offload=offload,
            spare=partial(collector.unused_memory, b.gradient),
        )
        for b in buckets
        if not b.is_over_quantised
    ]


def _require_offloadable(buckets: list[Bucket], offload: bool) -> None:
    if offload and (sharded := [bucket for bucket in buckets if bucket.is_sharded]):
        raise ValueError(f"offload_base_weights=True, but {sharded[0].names[0]!r} is sharded by fully_shard")


def rebuild(
    buckets: list[Bucket],
    held: dict[Shard, tuple[Tensor, Tensor]],
    backend: str | None,
    collector: GradientCollector,
    *,
    offload: bool,
) -> list[BaseWeights]:
    """Build the base weights of the active elements and of those in `held`, shard -> (positions, values).

    An element that is not in `held` has never changed, so its base value is the current weight. Raises as `of_buckets`.
    """
    _require_offloadable(buckets, offload)
    buckets = [bucket for bucket in buckets if not bucket.is_over_quantised]
    active = {shard: (b, i) for b in buckets for i, shard in enumerate(b.shards)}
    longest = max((b.run_length for b in buckets), default=1)
    split: dict[tuple[Any, ...], list[tuple[Shard, Tensor, Tensor]]] = {}
    for shard in dict.fromkeys([*active, *held]):
        flat = shard.local.detach().view(-1)
        nothing = torch.empty(0, dtype=index_dtype(shard.param.numel()), device=flat.device)
        held_positions, held_values = held.get(shard, (nothing, flat[:0]))
        bucket, i = active.get(shard, (None, 0))
        union = torch.cat([held_positions, nothing if bucket is None else bucket.positions(i)]).unique(sorted=True)
        base = flat[union.long()]
        base[torch.searchsorted(union, held_positions)] = held_values.to(flat.device)
        run_length = longest_run(union, longest)
        narrow = fits_uint16(shard.param, union, run_length)
        key = (bucket, flat.device, flat.dtype, union.dtype, run_length, narrow)
        split.setdefault(key, []).append((shard, union, base))
    bases = []
    for (bucket, _, _, _, run_length, narrow), parts in split.items():
        shards, positions, values = (list(column) for column in zip(*parts, strict=True))
        local = [shard.local for shard in shards]
        found = LocalSegments(local, *packed(positions, run_length, narrow), run_length, shards)
        current = None
        if bucket is not None and found.same_elements(bucket):
            found, current = bucket, bucket.weights  # one copy of the indices
        spare = None if bucket is None else partial(collector.unused_memory, bucket.gradient)
        bases.append(
            BaseWeights(
                **found.shared(),
                values=torch.cat(values),
                backend=backend,
                current=current,
                offload=offload,
                spare=spare,
            )
        )
    return bases


class InBaseWeights(ContextDecorator):
    """The context manager of `SparseOptimizer.base_weights`, which has its contract.

    The swapped parameters are constants inside, so that a graph built inside has no edge to them. A graph built outside
    that runs backward inside would drop its gradients silently; a hook on every such parameter raises instead.

    Python calls a signal handler between two instructions of the main thread's code, also before the first one of an
    `__exit__`, where no `try` protects the code. So from entry to exit each Python handler is wrapped in another one,
    which calls it immediately if the signal arrives in the body, and otherwise after `__enter__` or `__exit__` has done
    everything; its exception then undoes an entry.

    Args:
        prepare: returns the weights to swap; raises if the swap is not allowed.
        root: returns the model whose parameters may be sharded; see `sharding.reshard`.
        named: returns the names of the unsharded parameters, for messages.
    """

    def __init__(
        self,
        prepare: Callable[[], Sequence[BaseWeights | ShownBase]],
        collector: GradientCollector,
        root: Callable[[], nn.Module | None],
        named: Callable[[], Iterable[tuple[str, Parameter]]],
    ) -> None:
        self._prepare, self._collector, self._root, self._named = prepare, collector, root, named
        self._undo = ExitStack()
        self.is_deferring = self._is_entered = False
        self._installed: list[tuple[int, _DeferringHandler]] = []
        self._deferred: list[tuple[Handler, int, FrameType | None]] = []

    def __enter__(self) -> None:
        if self._is_entered:
            raise RuntimeError(f"this {type(self).__name__} has been entered, and not left")
        try:
            self._is_entered = True
            self._defer()
            self._swap_in()
            self._call_deferred()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._leave()

    def _swap_in(self) -> None:
        bases = self._prepare()
        undo = self._undo.callback
        self._collector.enter_base()
        undo(self._collector.leave_base)
        shards = [shard for base in bases for shard in base.shards if not shard.unsharded.is_inference()]
        # Graphs refer to the unsharded parameters, readers to those of the model.
        params = tuple({id(p): p for shard in shards for p in (shard.unsharded, shard.param)}.values())
        undo(torch.clear_autocast_cache)
        undo(_set_versions, params, tuple(p._version for p in params))
        trained = [shard for shard in shards if shard.param.requires_grad]
        undo(_set_requires_grad, trained, True)
        _set_requires_grad(trained, False)
        hooked = [shard.unsharded for shard in trained if not self._collector.has_hook_on(shard.unsharded)]
        for param in hooked:  # torch's method to register a hook refuses parameters that do not require grad
            if param._post_accumulate_grad_hooks is None:
                param._post_accumulate_grad_hooks = OrderedDict()
            undo(param._post_accumulate_grad_hooks.pop, self, None)
            param._post_accumulate_grad_hooks[self] = self._refuse
        root = self._root()
        undo(sharding.gather, sharding.incomplete(root))
        undo(sharding.reshard, root)
        with torch.no_grad():
            for base in bases:
                base.enter_()
                undo(base.leave_)
        sharding.reshard(root)
        _set_versions(params, (next(_ELSEWHERE),) * len(params))
        torch.clear_autocast_cache()  # it holds casts of the previous weights

    def _leave(self) -> None:
        """Undo what `_swap_in` has done so far, each change even if another one fails, then call deferred handlers."""
        try:
            with torch.no_grad():
                self._undo.close()
        finally:
            try:
                self._is_entered = False
                if threading.current_thread() is threading.main_thread():
                    self._restore_handlers()
            finally:
                self.is_deferring = False
                self._call_deferred()

    def _refuse(self, param: Tensor) -> None:
        name = next((name for name, p in self._named() if p is param), "a parameter")
        raise RuntimeError(inside_base_error(name))

    # Signals

    def _defer(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.is_deferring = True
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                wrapper = _DeferringHandler(self, _unwrapped(handler))
                self._installed.append((number, wrapper))
                _signal.signal(number, wrapper)

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
        while self.is_deferring and caller is not None:
            if caller.f_code in _CODES and caller.f_locals.get("self") is self:
                self._deferred.append((handler, number, caller.f_back))
                return
            caller = caller.f_back
        handler(number, frame)


_CODES = (InBaseWeights.__enter__.__code__, InBaseWeights.__exit__.__code__)


class _DeferringHandler:
    """A signal handler that wraps another one; the context decides when the other one is called."""

    def __init__(self, context: InBaseWeights, handler: Handler) -> None:
        self.context, self.handler = context, handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.context.handle(self.handler, number, frame)


def _unwrapped(handler: Handler) -> Handler:
    """Return the handler without the wrappers of contexts that are no longer in use."""
    while isinstance(handler, _DeferringHandler) and not handler.context.is_deferring:
        handler = handler.handler
    return handler


def _set_requires_grad(shards: Iterable[Shard], requires_grad: bool) -> None:
    for shard in shards:
        shard.param.requires_grad = shard.unsharded.requires_grad = requires_grad
