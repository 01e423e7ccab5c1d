"""Ops bound to a fixed list of tensors and segments, whose calls skip most of the arguments' handling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import backends
from . import checks
from .registry import increment_versions
from .schemas import step_signature
from .step_ops import STEP_OPS, StepOp


@dataclass(eq=False)
class BoundOps:
    """The ops on a fixed list of tensors and their active elements, with the arguments of `bind` as attributes.

    The methods are the step ops, `indexed_swap_`, `indexed_replace_` and `masked_grad_gather_`, with the arguments of
    the functions of `sparse_opt.ops`, except those that are bound, and the same results.
    """

    tensors: list[Tensor]
    indices: Tensor
    starts: list[int]
    ends: list[int]
    run_length: int
    index_bases: Tensor | None
    backend: str | None

    def __post_init__(self) -> None:
        self._segments = (self.indices, self.starts, self.ends)
        self._layout: dict[str, Any] = {"run_length": self.run_length, "index_bases": self.index_bases}
        self._functions: dict[str, Callable[..., Any]] = {}
        checks.bind(self.tensors, *self._segments, **self._layout)
        self._native: Any = backends.bind(
            "indexed_swap_", self.tensors, *self._segments, **self._layout, backend=self.backend
        )

    @torch.no_grad()
    def indexed_swap_(self, compact: Tensor) -> None:
        """`ops.indexed_swap_`: exchange the active elements with `compact`, [nnz], bit for bit."""
        if self._native is not None:
            self._native.swap(compact)
        else:
            self._call("indexed_swap_", self.tensors, compact, *self._segments)
            increment_versions(self.tensors)
        increment_versions(compact)

    @torch.no_grad()
    def indexed_replace_(self, before: Tensor, after: Tensor) -> None:
        """`ops.indexed_replace_`: set the active elements, which are `before`, to `after`, [nnz] each."""
        if self._native is not None:
            self._native.replace(before, after)
        else:
            self._call("indexed_replace_", self.tensors, before, after, *self._segments)
            increment_versions(self.tensors)

    @torch.no_grad()
    def masked_grad_gather_(
        self,
        out: Tensor,
        dense: Sequence[Tensor] | None = None,
        *,
        scale: Tensor | None = None,
        accumulate: bool = False,
        sum_sq: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """`ops.masked_grad_gather_` of `dense`, such as the gradients of the bound tensors; None: of the tensors
        themselves."""
        options = {"scale": scale, "accumulate": accumulate, "sum_sq": sum_sq, "found_inf": found_inf}
        if self._native is not None:
            self._native.gather(out, None if dense is None else list(dense), **options)
        else:
            dense = self.tensors if dense is None else dense
            checks.same_shapes("masked_grad_gather_", "dense", dense, "tensors", self.tensors)
            self._call("masked_grad_gather_", out, dense, *self._segments, **options)
        increment_versions(out, sum_sq, found_inf)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]: ...  # the step ops

    def _step(self, op: StepOp, arguments: dict[str, Any]) -> None:
        """Call a step op with all arguments but the bound ones."""
        if self._native is not None:
            if (arguments["grad"] is None) == (arguments["dense_grads"] is None):
                raise ValueError(f"{op.name}: expected exactly one of grad and dense_grads")
            self._native.step(op.name, **arguments)
        else:
            own = (*op.states, "lr", "steps")
            options = {name: value for name, value in arguments.items() if name not in own}
            self._call(op.name, self.tensors, *self._segments, *(arguments[name] for name in own), **options)
            increment_versions(self.tensors)
        increment_versions(*map(arguments.get, (*op.states, "master", "weights")))

    def _call(self, op: str, *args: Any, **kwargs: Any) -> None:
        """Check the arguments, and call the op on the backend, which is chosen in the op's first call."""
        if op not in self._functions:
            self._functions[op] = backends.function(op, self.indices.device, self.backend)
        checks.of(op)(*args, **kwargs, **self._layout)
        self._functions[op](*args, **kwargs, **self._layout)


_BOUND = ("params", "indices", "starts", "ends", "run_length", "index_bases", "backend")  # arguments of `bind`


def _step_method(op: StepOp) -> Callable[..., None]:
    """Return a method of `BoundOps` with the signature of a step op without the bound arguments."""
    parameters = [p for name, p in step_signature(op).parameters.items() if name not in _BOUND]
    signature = inspect.Signature(parameters)
    required = [p.name for p in parameters if p.default is p.empty]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @torch.no_grad()
    def method(self: BoundOps, *args: Any, **kwargs: Any) -> None:
        # Not `signature.bind`, which takes longer than the rest of the call, unless the arguments are wrong.
        arguments = {**defaults, **dict(zip(required, args, strict=False)), **kwargs}
        given_twice = not kwargs.keys().isdisjoint(required[: len(args)])
        if given_twice or len(args) > len(required) or len(arguments) != len(parameters):
            signature.bind(*args, **kwargs)  # raises a TypeError that names the argument
        self._step(op, arguments)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
    method.__name__, method.__qualname__ = op.name, f"BoundOps.{op.name}"
    method.__doc__ = f"`ops.{op.name}` on the bound tensors and segments."
    return method


for _op in STEP_OPS.values():
    setattr(BoundOps, _op.name, _step_method(_op))


def bind(
    tensors: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    run_length: int = 1,
    index_bases: Tensor | None = None,
    backend: str | None = None,
) -> BoundOps:
    """Bind the ops to tensors and their active elements, for calls that repeat, such as a training step's.

    A call of an op of this module checks and converts its lists, which takes about a millisecond for the tensors of a
    3B model; a bound call does not. The tensors, their sizes and the segments must not change; the tensors' memory may.
    The calls are not traced by `torch.compile`; use the functions of this module there.

    Args:
        tensors: n tensors, as `params` or `dense` of the ops.
        indices, starts, ends, run_length, index_bases, backend: as in `indexed_adamw_`.

    Raises:
        ValueError, BackendUnavailable: as in `indexed_adamw_`. Bound calls raise the same for their own arguments.
    """
    return BoundOps(list(tensors), indices, list(starts), list(ends), run_length, index_bases, backend)
