"""Linear layers whose backward pass makes the active tiles of the weight's gradient, and nothing else of it.

Such a layer has a `forward` of its own beside its class's: the same product, with another backward pass. It is C++
(csrc/optim/tile_linear.h) where the optimizer's backend is; elsewhere, and under `torch.compile`, it is the two ops of
this module. They know the layer by a number, as a tensor that the second one says it changes: without that, a compiler
would drop or merge its calls.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

if TYPE_CHECKING:
    from .buckets import Bucket

_numbers = itertools.count()


class TileSink(Protocol):
    """Takes the weight gradients that routed layers compute."""

    def receive_tiles(self, bucket: Bucket, i: int, left: Tensor, right: Tensor) -> bool:
        """Keep the active tiles of left^T @ right, the gradient of parameter i; False if they are not kept."""

    def receive_tile_rows(self, bucket: Bucket, i: int, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> bool:
        """`receive_tiles` with `left` in parts: (first row, its columns). No part is computed if it returns False."""


class Route:
    """Where a layer's weight gradient goes: to an optimizer's parameter. Keeps neither alive.

    Copies of a module, and those that are loaded from a file, have None in its place: they are ordinary modules.
    """

    def __init__(self, sink: TileSink, bucket: Bucket, i: int, weight: Parameter, *, transposed: bool) -> None:
        self.weight = weight
        self.transposed = transposed
        self.native = None if bucket.native is None else bucket.native.route(i, transposed)
        self._accumulator = None
        if self.native is None and weight.requires_grad:  # which ops can't ask for: autograd does not see into them
            self._accumulator = torch.autograd.graph.get_gradient_edge(weight).node
        self.number = torch.tensor([next(_numbers)], dtype=torch.int64, device="cpu")
        self._sink, self._bucket, self._i = weakref.ref(sink), weakref.ref(bucket), i
        _routes[int(self.number)] = self

    def leads_somewhere(self) -> bool:
        return self._bucket() is not None

    def take(self, left: Tensor, right: Tensor) -> bool:
        """Add left^T @ right to the compact gradient; False where there is none any more."""
        sink, bucket = self._sink(), self._bucket()
        if sink is None or bucket is None:
            return False
        return sink.receive_tiles(bucket, self._i, left, right)

    def wanted(self) -> str:
        """What the backward pass that runs does with the weight's gradient: "accumulated", "returned" or "nothing".

        It is returned by `torch.autograd.grad`, which accumulates nothing anywhere.
        """
        if self.native is not None:
            wanted: str = self.native.wanted()
            return wanted
        if self._accumulator is None:
            return "accumulated"
        try:
            return "accumulated" if torch._C._will_engine_execute_node(self._accumulator) else "nothing"
        except RuntimeError as error:
            if "only be called during the backward pass" in str(error):
                return "accumulated"  # the op was called by itself
            if "autograd.grad" in str(error):
                return "returned"
            raise

    def take_rows(self, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> bool:
        """`take` for a left operand, [tokens, rows], that never stands whole, as a large vocabulary's logits.

        To be called in a backward pass, with what the layer's own would be called with.

        Args:
            parts: (first row, [tokens, rows from it on]), together all rows. First rows are multiples of the mask's
                tile size. A part may be let go when the next one is asked for.
            right: [tokens, columns].

        Returns:
            False, and no part was asked for, where the gradient is to be a dense one: the optimizer does not take it
            any more, others' hooks want it, or `torch.autograd.grad` does.
        """
        sink, bucket = self._sink(), self._bucket()
        if sink is None or bucket is None or _has_others_hooks(self.weight):
            return False
        if self.wanted() != "accumulated":
            return False
        return sink.receive_tile_rows(bucket, self._i, parts, right)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


_routes: weakref.WeakValueDictionary[int, Route] = weakref.WeakValueDictionary()


# Its name is what pickle looks for in the module that it belongs to.
def forward(self: nn.Module, input: Tensor) -> Tensor:
    """The forward of a layer's class; with another backward pass wherever one may come and the layer has a route."""
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
    if _has_others_hooks(weight):
        return type(self).forward(self, input)
    if route.native is not None:
        return route.native.linear(input, weight, bias)
    return _by_op(route, input, weight, bias) if route.leads_somewhere() else type(self).forward(self, input)


def _has_others_hooks(weight: Parameter) -> bool:
    """Whether hooks of others than the optimizer want the dense gradient."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks) != 1


def route_of(module: nn.Module) -> Route | None:
    """Where the gradient of a layer's weight goes tile by tile, for code that takes the weight out of the layer."""
    route: Route | None = getattr(module, "_tile_route", None)
    return route if route is not None and module._parameters["weight"] is route.weight else None


def has_plain_forward(module: nn.Module) -> bool:
    """Whether the module runs its class's forward, or this module's."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "__func__", None) in (forward, type(module).forward)


def install(module: nn.Module, route: Route) -> None:
    """Give the module a route, and the forward that takes it."""
    module._tile_route = route  # type: ignore[assignment]
    module.forward = types.MethodType(forward, module)


def remove(module: nn.Module, route: Route) -> None:
    """Undo `install`, if the route is still the module's. A forward that another one has wrapped stays, and does what
    the class's does."""
    if vars(module).get("_tile_route") is not route:
        return
    del module._tile_route
    if getattr(vars(module).get("forward"), "__func__", None) is forward:
        del module.forward


# The ops. The route is a number on the host: read without waiting, and a reason not to put the graph into a CUDA graph.

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
    else:  # which F.linear does not take at once
        out = torch.mm(rows, weight.t()).add_(bias)
    # No view: it may be changed in place, as a linear layer's result may.
    return torch.ops.aten._unsafe_view(out, (*input.shape[:-1], out.shape[-1]))


def _fake_linear(input: Tensor, weight: Tensor, bias: Tensor | None, route: Tensor, transposed: bool) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[1 if transposed else 0]))


def _linear_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, route: Tensor, transposed: bool
) -> Tensor:
    if grad_output.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph can't hold this backward pass: whether gradients begin or add up is decided outside of it; "
            "build the optimizer with tile_backward=False"
        )
    found = _routes.get(int(route))
    wanted = "accumulated" if found is None else found.wanted()
    if wanted == "returned":
        raise RuntimeError(
            "torch.autograd.grad wants a weight's gradient, of which this layer makes the active tiles alone, for its "
            "optimizer; build the optimizer with tile_backward=False"
        )
    grad_rows, input_rows = _rows(grad_output), _rows(input)
    operands = (input_rows, grad_rows) if transposed else (grad_rows, input_rows)
    if found is None or (wanted == "accumulated" and not found.take(*operands)):
        raise RuntimeError(
            "a layer's optimizer was closed or detached, or got another mask, between its forward and backward pass"
        )
    if weight is None:
        return grad_output.new_empty(0)
    matrix = weight.t() if transposed else weight
    # As autograd's formula of a product, which keeps a matrix of columns one.
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
            "a linear layer whose weight gradient is made by tiles can't be differentiated twice (create_graph); "
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
