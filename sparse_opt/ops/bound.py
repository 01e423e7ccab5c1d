"""Swap and gather bound to a fixed list of tensors and segments, whose calls skip most of the arguments' handling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import backends
from . import checks
from .registry import increment_versions


@dataclass(eq=False)
class BoundOps:
    """The ops on a fixed list of tensors and their active elements, with the arguments of `bind` as attributes.

    The methods are `indexed_swap_`, `indexed_replace_` and `masked_grad_gather_`, with the arguments of the functions
    of `sparse_opt.ops`, except those that are bound, and the same results.
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
        self._native: Any = backends.bind(self.tensors, *self._segments, **self._layout, backend=self.backend)

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

    def _call(self, op: str, *args: Any, **kwargs: Any) -> None:
        """Check the arguments, and call the op on the backend, which is chosen in the op's first call."""
        if op not in self._functions:
            self._functions[op] = backends.function(op, self.indices.device, self.backend)
        checks.of(op)(*args, **kwargs, **self._layout)
        self._functions[op](*args, **kwargs, **self._layout)


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
    """Bind swap, replace and gather to tensors and their active elements, for calls that repeat.

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
