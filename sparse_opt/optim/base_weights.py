"""The weights a run started from, kept at the elements that may have changed since."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import backends
from .buckets import Bucket, compact
from .collector import GradientCollector, arrived_inside
from .segments import Segments, fits_uint16, index_dtype, longest_run, pack_indices
from .signals import UninterruptedContext

# While the base weights are in, autograd must take them for another version of the parameters: a graph made inside
# may not run backward outside, nor the other way round. Outside again the bits and so the version are the old ones.
_ELSEWHERE = itertools.count(2**30)


@dataclass(eq=False)
class BaseWeights(Segments):
    """W0 at every element that was ever active, for parameters that one op call can take."""

    values: Tensor  # [nnz], the parameters' dtype
    ops: Any

    def __post_init__(self) -> None:
        self.numels = [p.numel() for p in self.params]

    @classmethod
    def of(cls, bucket: Bucket) -> BaseWeights:
        return cls(
            bucket.params,
            bucket.indices,
            bucket.index_bases,
            bucket.starts,
            bucket.ends,
            bucket.run_length,
            compact(bucket),
            bucket.ops,
        )

    def swap_(self) -> None:
        """Exchange the model's weights with the base, bit for bit."""
        if [p.numel() for p in self.params] != self.numels:
            raise RuntimeError("a parameter has another size than when its mask was bound")
        self.ops.indexed_swap_(self.params, self.values, self.indices, self.starts, self.ends, **self.layout())

    def parts(self) -> Iterator[tuple[Parameter, tuple[Tensor, Tensor]]]:
        """(parameter, (positions, values)) of each."""
        for i, param in enumerate(self.params):
            yield param, (self.positions(i), self.values[self.segment(i)])


def rebuild(
    buckets: list[Bucket], held: dict[Parameter, tuple[Tensor, Tensor]], backend: str | None
) -> list[BaseWeights]:
    """Base weights of the active elements and of those in `held`, parameter -> (positions, values).

    An element not held has never changed, so its base is the weight as it is. Parameters may be held that no bucket
    has any more: their elements left the mask.
    """
    active = {p: (b, i) for b in buckets for i, p in enumerate(b.params)}
    longest = max(b.run_length for b in buckets)
    split: dict[tuple[Any, ...], list[tuple[Parameter, Tensor, Tensor]]] = {}
    for param in dict.fromkeys([*active, *held]):
        flat = param.detach().view(-1)
        nothing = torch.empty(0, dtype=index_dtype(param), device=param.device)
        held_positions, held_values = held.get(param, (nothing, flat[:0]))
        bucket, i = active.get(param, (None, 0))
        union = torch.cat([held_positions, nothing if bucket is None else bucket.positions(i)]).unique(sorted=True)
        base = flat[union.long()]
        base[torch.searchsorted(union, held_positions)] = held_values
        run_length = longest_run(union, longest)
        narrow = fits_uint16(param, union, run_length)
        key = (bucket, param.device, param.dtype, union.dtype, run_length, narrow)
        split.setdefault(key, []).append((param, union[::run_length], base))
    bases = []
    for (bucket, device, _, _, run_length, narrow), parts in split.items():
        params, indices, values = (list(column) for column in zip(*parts, strict=True))
        ends = list(itertools.accumulate(part.numel() for part in values))
        starts = [end - part.numel() for end, part in zip(ends, values, strict=True)]
        ops = backends.functions(device, backend)
        where = pack_indices(indices, starts, ends, narrow)
        if bucket is not None and _equal(where, (bucket.indices, bucket.index_bases)):
            where = bucket.indices, bucket.index_bases  # one copy for both
        bases.append(BaseWeights(params, *where, starts, ends, run_length, torch.cat(values), ops))
    return bases


def _equal(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> bool:
    return all(
        x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


class InBaseWeights(UninterruptedContext):
    """The model is W0 inside and itself again outside, bit for bit, also after an exception or a signal.

    Inside, the parameters whose elements change places are constants (`requires_grad` is False), so that a graph made
    there holds no edge to them that could be followed outside. Autograd would drop the gradients of a graph that was
    made outside and runs backward inside: every such parameter has a hook that refuses them, the collector's or one of
    this class.

    Args:
        prepare: gives the weights to swap; raises where that is not allowed.
        named: the optimizer's parameters, for messages.
    """

    def __init__(
        self,
        prepare: Callable[[], list[BaseWeights]],
        collector: GradientCollector,
        named: Callable[[], Iterable[tuple[str, Parameter]]],
    ) -> None:
        super().__init__()
        self._prepare, self._collector, self._named = prepare, collector, named
        self._undo = ExitStack()

    def enter(self) -> None:
        """See `UninterruptedContext`."""
        bases = self._prepare()
        undo = self._undo.callback
        self._collector.enter_base()
        undo(self._collector.leave_base)
        params = tuple(p for base in bases for p in base.params if not p.is_inference())
        undo(torch.clear_autocast_cache)
        undo(_set_versions, params, tuple(p._version for p in params))
        trained = [p for p in params if p.requires_grad]
        undo(_set_requires_grad, trained, True)
        _set_requires_grad(trained, False)
        refuse, refusing = self._refuse, [_hooks_on(p) for p in trained if not self._collector.has_hook_on(p)]
        undo(_remove_hooks, refusing, refuse)
        for hooks in refusing:
            hooks[refuse] = refuse
        with torch.no_grad():
            for base in bases:
                base.swap_()
                undo(base.swap_)
        _set_versions(params, (next(_ELSEWHERE),) * len(params))
        torch.clear_autocast_cache()  # it holds casts of the weights that were in before

    def leave(self) -> None:
        """See `UninterruptedContext`. What can't be undone does not keep the rest from being undone."""
        with torch.no_grad():
            self._undo.close()

    def _refuse(self, param: Tensor) -> None:
        name = next((name for name, p in self._named() if p is param), "a parameter")
        raise RuntimeError(arrived_inside(name))


def _set_versions(params: tuple[Parameter, ...], versions: tuple[int, ...]) -> None:
    torch._C._autograd._unsafe_set_version_counter(params, versions)


def _set_requires_grad(params: Iterable[Parameter], requires_grad: bool) -> None:
    for param in params:
        param.requires_grad = requires_grad


def _hooks_on(param: Parameter) -> dict[Any, Callable[[Tensor], None]]:
    """Where `register_post_accumulate_grad_hook` puts hooks, which refuses parameters that require no gradient."""
    hooks: dict[Any, Callable[[Tensor], None]] | None = param._post_accumulate_grad_hooks
    if hooks is None:
        hooks = param._post_accumulate_grad_hooks = OrderedDict()
    return hooks


def _remove_hooks(hooks_on: Iterable[dict[Any, Callable[[Tensor], None]]], key: object) -> None:
    for hooks in hooks_on:
        hooks.pop(key, None)
