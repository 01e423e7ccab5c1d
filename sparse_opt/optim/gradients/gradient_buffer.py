"""GradientBuffer: the compact gradient of some parameters between two steps, and its native implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...ops.checks import FLOAT_DTYPES
from ..segments import Segments, Tiles


class Product(NamedTuple):
    """The gradient of parameter i of a buffer, as left^T @ right, or that of each expert."""

    i: int
    left: Tensor  # [tokens, rows]
    right: Tensor  # [tokens, columns]
    token_offsets: Tensor | None = None  # of experts, by whom the tokens are sorted: as in `tile_weight_grad_`


def write_tiles(ops: Any, values: Tensor, left: Tensor, right: Tensor, tiles: Tensor, tile_size: int) -> None:
    """Write the active tiles of one matrix, left^T @ right, by `ops.tile_weight_grad_`, whose arguments these are."""
    ops.tile_weight_grad_(
        values,
        [left.contiguous()],
        [right.contiguous()],
        tiles,
        [0],
        [len(tiles)],
        tile_size=tile_size,
        scale=None,
        accumulate=False,
        sum_sq=None,
        found_inf=None,
    )


@dataclass(eq=False)
class GradientBuffer(Segments, ABC):
    """The active elements of the parameters' gradients, as one flat tensor, between two steps.

    The first gradient that a parameter receives after `drop` overwrites its segment of `values`; later ones are added
    in fp32 and rounded to the dtype of `values`. An implementation may queue gradients: call `finish` before reading
    `values`, or writing to them, as a reduction across ranks does.

    There are two implementations: `NativeGradientBuffer`, and its reference in python_collection.py. `binding.bind`
    chooses one; no other code depends on the choice. A buffer does not decide whether a gradient is accepted;
    `GradientCollector` does. Methods may be called from several threads at the same time if its lock is held.
    """

    names: list[str]
    values: Tensor  # [nnz]; with grads='dense' it may be [0] until `gather_dense_grads`
    sum_sq: Tensor  # [n] fp32; see `sums_of_squares`
    tiles: Tiles | None
    ops: Any  # one attribute per op, on the chosen backend
    found_inf: Tensor | None = field(default=None, init=False)

    # Receiving gradients

    def require_numel(self, i: int, numel: int) -> None:
        """Raise a ValueError that names parameter i unless its gradient has as many elements as it had when bound."""
        if numel != self.numels[i]:
            found = f"the gradient of {self.names[i]!r} has {numel} elements"
            raise ValueError(f"{found}, but the parameter had {self.numels[i]} when its mask was bound")

    def set_found_inf(self, found_inf: Tensor | None) -> None:
        """Set the tensor of one element that becomes inf when a gradient that is added is not finite."""
        self.found_inf = found_inf

    @abstractmethod
    def add_dense(self, i: int, grad: Tensor) -> None:
        """Add the active elements of `grad`, the dense gradient of parameter i."""

    @abstractmethod
    def add_tiles(self, products: Sequence[Product]) -> None:
        """Add the active tiles of each product to the gradient of its parameter."""

    @abstractmethod
    def add_values(self, i: int, values: Tensor) -> None:
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
            write_tiles(self.ops, values, left, right, tiles, self.tiles.tile_size)
            del left  # free it before the next part is computed
        return values

    # Receiving gradients from autograd without the collector, if the implementation can

    def register_hook(self, i: int, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a post-accumulate-grad hook on parameter i. It is not called for gradients received directly."""
        return self.params[i].register_post_accumulate_grad_hook(hook)

    def set_direct(self, direct: bool) -> None:
        """Allow or forbid to receive gradients directly; after `direct=False` none is being received."""

    def linear_route(
        self, i: int, transposed: bool, add_product: Callable[[Tensor, Tensor], bool], is_hooked: Callable[[], bool]
    ) -> Any:
        """Return the native route of a linear layer whose weight is parameter i; None if there is none.

        See csrc/autograd/tile_linear.h. `add_product` gets the operands that are not received directly.
        """
        return None

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
                self.add_dense(i, param.grad)
        self.finish()

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
        # How much may be queued, by keyword: the active tiles of products (`tiles`), the memory of their operands
        # (`tile_bytes`) and that of dense gradients (`gradient_bytes`).
        self.set_queue_limits = self._native.set_queue_limits

    def add_dense(self, i: int, grad: Tensor) -> None:
        self._native.add_dense_(i, grad)

    def add_tiles(self, products: Sequence[Product]) -> None:
        self._native.add_tiles_(*(list(column) for column in zip(*products, strict=True)))

    def add_values(self, i: int, values: Tensor) -> None:
        self._native.add_values_(i, values)

    def set_found_inf(self, found_inf: Tensor | None) -> None:
        self._native.set_found_inf(found_inf)

    def register_hook(self, i: int, hook: Callable[[Tensor], None]) -> RemovableHandle:
        handle = super().register_hook(i, hook)
        self._native.register_hook(i, self.params[i]._post_accumulate_grad_hooks)
        return handle

    def set_direct(self, direct: bool) -> None:
        self._native.set_direct(direct)

    def linear_route(
        self, i: int, transposed: bool, add_product: Callable[[Tensor, Tensor], bool], is_hooked: Callable[[], bool]
    ) -> Any:
        return self._native.route(i, transposed, add_product, is_hooked)

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
        clipped = self._native.clip(max_norm)
        return None if clipped is None else clipped.unbind()

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
