"""Linear layers whose backward pass computes only the active tiles of the weight gradient.

Such a layer has an instance attribute `forward`: the same product as its class's, with another backward pass. It is
C++ (csrc/optim/tile_linear.h) if the optimizer's backend is; otherwise, and under `torch.compile`, it is the two ops of
this module. They identify the layer by a number in a tensor that the second op declares as mutated, because a compiler
would otherwise drop or merge its calls.
"""

from __future__ import annotations

import itertools
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_numbers = itertools.count()
# How a backward pass uses a weight's gradient; `torch.autograd.grad` returns gradients and does not accumulate them.
GradientUse = Literal["accumulated", "returned", "unused"]


class TileSink(Protocol):
    """Receives the weight gradients that routed layers compute."""

    def receive_tiles(self, i: int, left: Tensor, right: Tensor) -> bool:
        """Keep the active tiles of left^T @ right, the gradient of parameter i; False if they are not kept."""

    def receive_tile_rows(self, i: int, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> bool:
        """`receive_tiles` with `left` in parts: (first row, its columns). No part is computed if it returns False."""


class Route(ABC):
    """Connects a layer's weight gradient to parameter i of a sink, which it does not keep alive.

    In copies of a module, and in modules loaded from a file, it is None; they are ordinary modules.
    """

    def __init__(self, sink: TileSink, i: int, weight: Tensor, *, transposed: bool) -> None:
        self.weight = weight
        self.transposed = transposed
        self.number = torch.tensor([next(_numbers)], dtype=torch.int64, device="cpu")
        self._sink, self._i = weakref.ref(sink), i
        _routes[int(self.number)] = self

    @abstractmethod
    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer's output, with the tiled backward pass."""

    @abstractmethod
    def gradient_use(self) -> GradientUse:
        """Return how the running backward pass uses the weight's gradient."""

    def is_connected(self) -> bool:
        """Whether the sink still exists."""
        return self._sink() is not None

    def add_product(self, left: Tensor, right: Tensor) -> bool:
        """Add left^T @ right to the compact gradient; False if the optimizer no longer collects it."""
        sink = self._sink()
        return sink is not None and sink.receive_tiles(self._i, left, right)

    def add_product_rows(self, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> bool:
        """`add_product` for a left operand, [tokens, rows], that is never materialized whole, such as the gradient of
        the logits of a large vocabulary.

        Call it in a backward pass, with the operands of the layer's own backward pass.

        Args:
            parts: (first row, [tokens, rows from it on]), together all rows. First rows are multiples of the mask's
                tile size. A part may be freed when the next one is requested.
            right: [tokens, columns].

        Returns:
            False, without computing any part, if a dense gradient is needed: the optimizer no longer collects it, or
            another hook or `torch.autograd.grad` uses it.
        """
        sink = self._sink()
        if sink is None or _has_others_hooks(self.weight) or self.gradient_use() != "accumulated":
            return False
        return sink.receive_tile_rows(self._i, parts, right)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class OpRoute(Route):
    """A route whose layer computes with the two ops of this module."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _by_op(self, input, weight, bias)

    def gradient_use(self) -> GradientUse:
        if not self.weight.requires_grad:
            return "accumulated"
        # Not kept: the node has the stream that was current when it was made, and a backward pass on another stream,
        # such as a CUDA graph's capture, would have to wait for that one.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            accumulator = torch.autograd.graph.get_gradient_edge(self.weight).node
        try:
            return "accumulated" if torch._C._will_engine_execute_node(accumulator) else "unused"
        except RuntimeError as error:
            if "only be called during the backward pass" in str(error):
                return "accumulated"  # the op was called directly
            if "autograd.grad" in str(error):
                return "returned"
            raise


class NativeRoute(Route):
    """A route whose layer computes in C++ (csrc/optim/tile_linear.h), except under `torch.compile`.

    Args:
        buffer: the native gradient buffer. It receives gradients directly, except those that the sink has to accept.
    """

    def __init__(self, sink: TileSink, i: int, weight: Tensor, *, transposed: bool, buffer: Any) -> None:
        super().__init__(sink, i, weight, transposed=transposed)
        this = weakref.ref(self)

        def add_product(left: Tensor, right: Tensor) -> bool:
            route = this()
            return route is not None and route.add_product(left, right)

        self._native = buffer.route(i, transposed, add_product)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = self._native.linear(input, weight, bias)
        return output

    def gradient_use(self) -> GradientUse:
        use: GradientUse = self._native.gradient_use()
        return use


_routes: weakref.WeakValueDictionary[int, Route] = weakref.WeakValueDictionary()


# It must be named `forward`: pickle looks for a method of that name in the layer.
def forward(self: nn.Module, input: Tensor) -> Tensor:
    """Compute the forward of the layer's class; with grad enabled and a route, with the tiled backward pass."""
    route: Route | None = getattr(self, "_tile_route", None)
    weight = self._parameters["weight"]
    if (
        route is None
        or weight is not route.weight
        or not weight.requires_grad
        or not torch.is_grad_enabled()
        or type(input) is not Tensor
    ):
        return type(self).forward(self, input)
    bias = self._parameters["bias"]
    if torch.compiler.is_compiling():
        return _by_op(route, input, weight, bias)
    if _has_others_hooks(weight) or not route.is_connected():
        return type(self).forward(self, input)
    return route.linear(input, weight, bias)


def _has_others_hooks(weight: Tensor) -> bool:
    """Whether hooks other than the optimizer's use the dense gradient."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks) != 1


def route_of(module: nn.Module) -> Route | None:
    """Return the route of a layer's weight, for code that uses the weight outside of the layer."""
    route: Route | None = getattr(module, "_tile_route", None)
    return route if route is not None and module._parameters["weight"] is route.weight else None


def has_plain_forward(module: nn.Module) -> bool:
    """Whether the layer's forward is its class's or `forward` of this module."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "__func__", None) in (forward, type(module).forward)


def install(module: nn.Module, route: Route) -> None:
    """Set the layer's route, and replace its `forward`."""
    module._tile_route = route  # type: ignore[assignment]
    module.forward = types.MethodType(forward, module)


def remove(module: nn.Module, route: Route) -> None:
    """Undo `install` if the layer still has this route. A `forward` that other code has wrapped stays.

    Without a route, that `forward` computes the same as the class's.
    """
    if vars(module).get("_tile_route") is not route:
        return
    del module._tile_route
    if getattr(vars(module).get("forward"), "__func__", None) is forward:
        del module.forward


# The ops. The route's number is on the host: reading it needs no synchronization. Inductor's own CUDA graphs leave the
# backward op out (`cudagraph_unsafe`): whether a gradient is the first one is decided on the host, so only a graph of
# whole steps (`GraphedStep`) may hold it.

_library = torch.library.Library("sparse_opt", "FRAGMENT")
_library.define(
    "tile_linear(Tensor input, Tensor weight, Tensor? bias, Tensor route, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "tile_linear_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor(a!) route, bool transposed) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)


def _by_op(route: Route, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    device = input.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, weight = _cast(input, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    return torch.ops.sparse_opt.tile_linear(input, weight, bias, route.number, route.transposed)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, route: Tensor, transposed: bool) -> Tensor:
    rows = _rows(input)
    if transposed:
        assert bias is not None
        out = torch.addmm(bias, rows, weight)
    elif input.dim() <= 2:
        return F.linear(input, weight, bias)
    elif bias is None or input.is_contiguous():
        out = F.linear(rows, weight, bias)
    else:  # F.linear would not fuse the bias here
        out = torch.mm(rows, weight.t()).add_(bias)
    # Not a view, so that the result may be modified in place, as that of a linear layer.
    return torch.ops.aten._unsafe_view(out, (*input.shape[:-1], out.shape[-1]))


def _fake_linear(input: Tensor, weight: Tensor, bias: Tensor | None, route: Tensor, transposed: bool) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[1 if transposed else 0]))


def _linear_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, route: Tensor, transposed: bool
) -> Tensor:
    found = _routes.get(int(route))
    use = "accumulated" if found is None else found.gradient_use()
    if use == "returned":
        raise RuntimeError(
            "torch.autograd.grad needs a dense weight gradient, but this layer computes only the active tiles, for its "
            "optimizer; build the optimizer with tile_backward=False"
        )
    grad_rows, input_rows = _rows(grad_output), _rows(input)
    operands = (input_rows, grad_rows) if transposed else (grad_rows, input_rows)
    if found is None or (use == "accumulated" and not found.add_product(*operands)):
        raise RuntimeError(
            "a layer's optimizer was closed or detached, or got another mask, between its forward and backward pass"
        )
    if weight is None:
        return grad_output.new_empty(0)
    matrix = weight.t() if transposed else weight
    # As in autograd's formula for mm, which returns a column-major gradient for a column-major input.
    if input_rows.stride(0) == 1 and input_rows.stride(1) == input_rows.shape[0]:
        grad_input = torch.mm(matrix.t(), grad_rows.t()).t().contiguous()
    else:
        grad_input = torch.mm(grad_rows, matrix)
    return grad_input.view(*grad_output.shape[:-1], input.shape[-1])


def _fake_linear_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, route: Tensor, transposed: bool
) -> Tensor:
    return grad_output.new_empty(0 if weight is None else (*grad_output.shape[:-1], input.shape[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, ctx.route, ctx.transposed = inputs
    ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a linear layer whose weight gradient is computed by tiles can't be differentiated twice (create_graph); "
            "build the optimizer with tile_backward=False"
        )
    input, weight = ctx.saved_tensors
    grad_input = torch.ops.sparse_opt.tile_linear_backward(grad_output, input, weight, ctx.route, ctx.transposed)
    grad_bias = _rows(grad_output).sum(0) if ctx.needs_input_grad[2] else None
    return (grad_input if ctx.needs_input_grad[0] else None), None, grad_bias, None, None


_library.impl("tile_linear", _linear, "CompositeExplicitAutograd")
_library.impl("tile_linear_backward", _linear_backward, "CompositeExplicitAutograd")
torch.library.register_fake("sparse_opt::tile_linear", _fake_linear, lib=_library)
torch.library.register_fake("sparse_opt::tile_linear_backward", _fake_linear_backward, lib=_library)
torch.library.register_autograd("sparse_opt::tile_linear", _gradients, setup_context=_save, lib=_library)
