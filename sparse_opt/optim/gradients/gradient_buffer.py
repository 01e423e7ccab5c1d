"""GradientBuffer: the compact gradient of some parameters, with a Python and a native implementation.

`bind` chooses the implementation; no other code depends on the choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...ops.checks import FLOAT_DTYPES
from ..segments import Segments
from .tile_backward import NativeRoute, OpRoute, Product, Route, TileSink
from .tiles import Tiles


@dataclass(eq=False)
class GradientBuffer(Segments, ABC):
    """The active elements of the parameters' gradients, as one flat tensor, between two steps.

    The first gradient that a parameter receives after `drop` overwrites its segment of `values`; later ones are added
    in fp32 and rounded to the dtype of `values`. An implementation may queue gradients: call `finish` before reading
    `values`, or writing to them, as a reduction across ranks does.

    A buffer does not decide whether a gradient is accepted; `GradientCollector` does. Methods may be called from
    several threads at the same time if the collector's lock is held.
    """

    names: list[str]
    values: Tensor  # [nnz]; with grads='dense' it may be [0] until `gather_dense_grads`
    sum_sq: Tensor  # [n] fp32; see `sums_of_squares`
    tiles: Tiles | None
    ops: Any  # one attribute per op, on the chosen backend

    # Receiving gradients. If a result is not finite, `found_inf`, a tensor of one element, is set to inf.

    @abstractmethod
    def add_dense(self, i: int, grad: Tensor, found_inf: Tensor | None) -> None:
        """Add the active elements of `grad`, the dense gradient of parameter i."""

    @abstractmethod
    def add_tiles(self, products: Sequence[Product], found_inf: Tensor | None) -> None:
        """Add the active tiles of each product to the gradient of its parameter."""

    @abstractmethod
    def add_values(self, i: int, values: Tensor, found_inf: Tensor | None) -> None:
        """Add `values`, fp32 [slots of parameter i], such as the result of `tile_rows`."""

    def tile_rows(self, i: int, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> Tensor:
        """Compute the active tiles of left^T @ right, with left [tokens, rows] in parts: fp32 [slots of parameter i].

        The compact gradient does not change; `add_values` adds the result to it.

        Args:
            parts: (first row, [tokens, rows from it on]), together all rows. Each part is released before the next one.
            right: [tokens, columns].
        """
        assert self.tiles is not None
        start, end = self.starts[i], self.ends[i]
        values = torch.zeros(end - start, dtype=torch.float32, device=self.device)
        right = right.contiguous()
        for first_row, left in parts:
            tiles = self.tiles.of_rows(i, first_row, first_row + left.shape[1])
            tiles[:, 2] -= start
            self.ops.tile_weight_grad_(
                values,
                [left.contiguous()],
                [right],
                tiles,
                [0],
                [len(tiles)],
                tile_size=self.tiles.tile_size,
                scale=None,
                accumulate=False,
                sum_sq=None,
                found_inf=None,
            )
            del left  # free it before the next part is computed
        return values

    # Receiving gradients from autograd without the collector, if the implementation can

    def register_hook(self, i: int, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a post-accumulate-grad hook on parameter i. It is not called for gradients received directly."""
        return self.params[i].register_post_accumulate_grad_hook(hook)

    @abstractmethod
    def route(self, i: int, sink: TileSink, *, transposed: bool) -> Route:
        """Return a route for the layer whose weight is parameter i; `sink` does not get gradients received directly."""

    def set_direct(self, direct: bool, found_inf: Tensor | None) -> None:
        """Allow or forbid to receive gradients directly; after `direct=False` none is being received.

        Args:
            found_inf: set to inf if one of them is not finite; None: not recorded.
        """

    def set_queue_limits(
        self, *, tiles: int | None = None, tile_bytes: int | None = None, gradient_bytes: int | None = None
    ) -> None:
        """Change how much may be queued before it is added to the compact gradient; 0 means nothing.

        Args:
            tiles: the number of active tiles to compute.
            tile_bytes: the memory of the operands of these products.
            gradient_bytes: the memory of the dense gradients to gather.
        """

    # Reading the compact gradient

    @property
    @abstractmethod
    def received(self) -> list[bool]:
        """For each parameter, whether it has received a gradient since `drop`."""

    @abstractmethod
    def received_tiles(self, i: int) -> bool:
        """Whether parameter i has received tiles since `drop`, so that its hook is called without a gradient."""

    def finish(self) -> None:
        """Add all queued gradients. Afterwards `values` may be read on the current stream."""

    def sums_of_squares(self, received: list[bool]) -> Tensor:
        """Return the sum of squares of the gradient of each parameter, 0 for those not in `received`: [n] fp32."""
        return self.sum_sq if all(received) else self.sum_sq.where(to_device(received, torch.bool, self.device), 0.0)

    def clip(self, max_norm: float) -> tuple[Tensor, Tensor] | None:
        """Return (norm, factor that clips to max_norm), of one fp32 element each, if one call can compute them.

        Every parameter must have received a gradient.
        """
        return None

    @abstractmethod
    def drop(self) -> None:
        """Discard the compact gradient, and all queued ones. Nothing is written."""

    # Dense gradients, in `param.grad`

    def gather_dense_grads(self) -> None:
        """Replace the compact gradient by the active elements of the dense gradients."""
        self.drop()
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self.add_dense(i, param.grad, None)

    def has_dense_grads(self) -> bool:
        return any(p.grad is not None for p in self.params)

    def names_with_dense_grads(self) -> str:
        return ", ".join(name for name, p in zip(self.names, self.params, strict=True) if p.grad is not None)

    def check_dense_grads(self) -> None:
        """Raise an error that names the parameter if a dense gradient cannot be read at the indices."""
        first = None
        for name, param in zip(self.names, self.params, strict=True):
            grad = param.grad
            if grad is None:
                continue
            what = f"the gradient of {name!r}"
            if grad.layout != torch.strided:
                raise RuntimeError(f"{what} is {grad.layout}, expected a strided tensor")
            if grad.shape != param.shape:
                raise ValueError(f"{what} has shape {list(grad.shape)}, expected {list(param.shape)}")
            if grad.device != self.device:
                raise ValueError(f"{what} is on {grad.device}, expected {self.device}")
            if grad.dtype not in FLOAT_DTYPES:
                raise ValueError(f"{what} is {grad.dtype}, expected bfloat16, float16 or float32")
            first = first or (name, grad.dtype)
            if grad.dtype != first[1]:
                raise ValueError(f"{what} is {grad.dtype}, but that of {first[0]!r} is {first[1]}; expected one dtype")


class PythonGradientBuffer(GradientBuffer):
    """Adds each gradient with an op call when it arrives, on any backend."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drop()

    def add_dense(self, i: int, grad: Tensor, found_inf: Tensor | None) -> None:
        if grad.numel() != self.numels[i]:
            raise ValueError(
                f"the gradient of {self.names[i]!r} has {grad.numel()} elements, but the parameter had "
                f"{self.numels[i]} when its mask was bound"
            )
        self._gather([i], [grad], self.sum_sq[i : i + 1], accumulate=self._received[i], found_inf=found_inf)
        self._received[i] = True

    def _gather(
        self, which: list[int], grads: list[Tensor], sum_sq: Tensor, *, accumulate: bool, found_inf: Tensor | None
    ) -> None:
        self.ops.masked_grad_gather_(
            self.values,
            [grad.contiguous() for grad in grads],
            self.indices,
            [self.starts[i] for i in which],
            [self.ends[i] for i in which],
            scale=None,
            accumulate=accumulate,
            sum_sq=sum_sq,
            found_inf=found_inf,
            **self.layout(which),
        )

    def add_tiles(self, products: Sequence[Product], found_inf: Tensor | None) -> None:
        assert self.tiles is not None
        for i, left, right in products:
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
                found_inf=found_inf,
            )
            self._received[i] = self._received_tiles[i] = True

    def add_values(self, i: int, values: Tensor, found_inf: Tensor | None) -> None:
        slots = self.values[self.segment(i)]
        if self._received[i]:
            slots.add_(values)  # the sum is rounded once
        else:
            slots.copy_(values)
        stored = slots.float()
        self.sum_sq[i] = stored.square().sum()
        if found_inf is not None:
            found_inf.masked_fill_(~stored.isfinite().all(), torch.inf)
        self._received[i] = self._received_tiles[i] = True

    def gather_dense_grads(self) -> None:
        if self.values.numel() != self.nnz:
            self.values = self.values.new_zeros(self.nnz)
        which = [i for i, p in enumerate(self.params) if p.grad is not None]
        grads = [p.grad for p in self.params if p.grad is not None]
        sum_sq = self.sum_sq if len(which) == len(self.params) else torch.zeros_like(self.sum_sq[: len(which)])
        if which:
            self._gather(which, grads, sum_sq, accumulate=False, found_inf=None)
        if len(which) < len(self.params):
            self.sum_sq[to_device(which, torch.int64, self.device)] = sum_sq
        self._received = [p.grad is not None for p in self.params]

    def route(self, i: int, sink: TileSink, *, transposed: bool) -> Route:
        return OpRoute(sink, i, self.params[i], transposed=transposed)

    @property
    def received(self) -> list[bool]:
        return self._received

    def received_tiles(self, i: int) -> bool:
        return self._received_tiles[i]

    def drop(self) -> None:
        self._received = [False] * len(self.params)
        self._received_tiles = [False] * len(self.params)


@dataclass(eq=False)
class NativeGradientBuffer(GradientBuffer):
    """Receives gradients in C++, without the interpreter's lock, and on a GPU adds many of them in one launch.

    See csrc/autograd/gradient_buffer.h.
    """

    bound: Any  # the result of `backends.bind`

    def __post_init__(self) -> None:
        super().__post_init__()
        table: tuple[Any, ...] = ()
        if self.tiles is not None:
            table = self.tiles.table, self.tiles.starts, self.tiles.ends, self.tiles.tile_size
        self._native = self.bound.gradient_buffer(self.values, self.sum_sq, *table)

    def add_dense(self, i: int, grad: Tensor, found_inf: Tensor | None) -> None:
        self._native.add_dense_(i, grad, found_inf)

    def add_tiles(self, products: Sequence[Product], found_inf: Tensor | None) -> None:
        which, lefts, rights = (list(column) for column in zip(*products, strict=True))
        self._native.add_tiles_(which, lefts, rights, found_inf)

    def add_values(self, i: int, values: Tensor, found_inf: Tensor | None) -> None:
        self._native.add_values_(i, values, found_inf)

    def register_hook(self, i: int, hook: Callable[[Tensor], None]) -> RemovableHandle:
        handle = super().register_hook(i, hook)
        self._native.register_hook(i, self.params[i]._post_accumulate_grad_hooks)
        return handle

    def route(self, i: int, sink: TileSink, *, transposed: bool) -> Route:
        return NativeRoute(sink, i, self.params[i], transposed=transposed, buffer=self._native)

    def set_direct(self, direct: bool, found_inf: Tensor | None) -> None:
        self._native.set_direct(direct, found_inf)

    def set_queue_limits(
        self, *, tiles: int | None = None, tile_bytes: int | None = None, gradient_bytes: int | None = None
    ) -> None:
        self._native.set_queue_limits(tiles, tile_bytes, gradient_bytes)

    @property
    def received(self) -> list[bool]:
        received: list[bool] = self._native.received()
        return received

    def received_tiles(self, i: int) -> bool:
        return bool(self._native.received_tiles(i))

    def finish(self) -> None:
        self._native.finish()

    def sums_of_squares(self, received: list[bool]) -> Tensor:
        self._native.sum_squares_()
        return super().sums_of_squares(received)

    def clip(self, max_norm: float) -> tuple[Tensor, Tensor] | None:
        if not self._native.can_clip():
            return None
        norm, coefficient = self._native.clip(max_norm).unbind()
        return norm, coefficient

    def drop(self) -> None:
        self._native.drop()

    def has_dense_grads(self) -> bool:
        return bool(self.bound.has_grads())


def to_device(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a small tensor on the device, without a synchronization.

    In the capture of a CUDA graph it is filled element by element: replays would copy host memory that is in other use.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        filled = torch.empty(len(values), dtype=dtype, device=device)
        for element, value in zip(filled, values, strict=True):
            element.fill_(value)
        return filled
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
