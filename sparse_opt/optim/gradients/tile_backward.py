"""Layers whose backward pass computes only the active tiles of the weight gradient.

Embeddings are in tile_embedding.py, mixtures of experts in tile_experts.py.

Such a layer has an instance attribute `forward`: the same output as its class's, with another backward pass. That of a
linear layer is C++ (csrc/autograd/tile_linear.h), or the two ops of this module: under `torch.compile`, and without a
native buffer. They identify the layer by a number in a tensor that the second op declares as mutated, because a
compiler would otherwise drop or merge its calls.
"""

from __future__ import annotations

import itertools
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gradient_buffer import Product
from .python_collection import NotifierHook

if TYPE_CHECKING:
    from .collector import Receiver

_numbers = itertools.count()
# How a backward pass uses a weight's gradient: "hooked": other code's hooks get it dense before it is accumulated;
# "returned" by `torch.autograd.grad`, which does not accumulate it; "unused", also of a weight that has been frozen.
GradientUse = Literal["accumulated", "hooked", "returned", "unused"]


class Route:
    """Connects a layer's weight gradient to parameter i of a receiver, which it does not keep alive.

    In copies of a module, and in modules loaded from a file, it is None; they are ordinary modules.

    Attributes:
        attribute: the attribute of the layer that holds the route.
    """

    attribute = "_tile_route"

    @staticmethod
    def layer_forward() -> Callable[..., Tensor]:
        """Return the function that `install` makes the layer's `forward`."""
        return forward

    def __init__(self, receiver: Receiver, i: int, *, transposed: bool = False) -> None:
        self.weight = receiver.buffer.params[i]
        self.transposed = transposed
        self.number = torch.tensor([next(_numbers)], dtype=torch.int64, device="cpu")
        self.i, self._receiver = i, weakref.ref(receiver)
        route_of_number[int(self.number)] = self

    def gradient_use(self) -> GradientUse:
        """Return how the running backward pass uses the weight's gradient."""
        if not self.weight.requires_grad:
            return "hooked" if self.is_hooked() else "unused"
        accumulator = self._accumulator()
        try:
            if not torch._C._will_engine_execute_node(accumulator):
                return "unused"
        except RuntimeError as error:
            if "autograd.grad" in str(error):
                return "returned"
            if "only be called during the backward pass" not in str(error):  # an op was called directly
                raise
        return "hooked" if self.is_hooked(accumulator) else "accumulated"

    def is_hooked(self, accumulator: Any = None) -> bool:
        """Return whether the weight, or the node that accumulates its gradient, has hooks of others."""
        if self.weight._backward_hooks or len(self.weight._post_accumulate_grad_hooks or ()) > 1:
            return True
        if not self.weight.requires_grad:  # torch does not give access to its node then
            return False
        node = accumulator or self._accumulator()
        for register in (node.register_prehook, node.register_hook):
            handle = register(_no_hook)  # only a hook's handle gives access to the others
            hooks = handle.hooks_dict_ref()
            handle.remove()
            if any(not isinstance(hook, NotifierHook) for hook in hooks.values()):
                return True
        return False

    def _accumulator(self) -> Any:
        # Not kept: the node has the stream that was current when it was made, and a backward pass on another stream,
        # such as a CUDA graph's capture, would have to wait for that one.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            return torch.autograd.graph.get_gradient_edge(self.weight).node

    def receiver(self) -> Receiver | None:
        """Return what receives the gradient; None if it no longer exists."""
        return self._receiver()

    def add_product(self, left: Tensor, right: Tensor) -> bool:
        """Add left^T @ right to the compact gradient; False if the optimizer no longer collects it."""
        receiver = self._receiver()
        return receiver is not None and receiver.receive_tiles([Product(self.i, left, right)])

    # For code that computes the weight's gradient in a backward pass of its own. These return False, without computing
    # anything, if a dense gradient is needed: the optimizer no longer collects it, or another hook or
    # `torch.autograd.grad` uses it; or if none is: the weight was frozen after the forward pass.

    def add_whole_product(self, left: Tensor, right: Tensor) -> bool:
        """Add left^T @ right, the gradient of the weight: [tokens, rows] and [tokens, columns]."""
        return self.gradient_use() == "accumulated" and self.add_product(left, right)

    def add_product_rows(self, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> bool:
        """`add_whole_product` for a left operand that is never materialized whole, such as the gradient of the logits
        of a large vocabulary.

        Args:
            parts: (first row, [tokens, rows from it on]), together all rows. First rows are multiples of the mask's
                tile size. A part may be freed when the next one is requested.
            right: [tokens, columns].
        """
        receiver = self._receiver()
        if receiver is None:
            return False
        buffer = receiver.buffer
        return self.add_values(lambda: buffer.tile_rows(self.i, parts, right.detach()))

    def add_values(self, compute: Callable[[], Tensor]) -> bool:
        """Add the result of `compute`, the gradient's active elements, fp32, to the compact gradient."""
        receiver = self._receiver()
        if receiver is None or self.gradient_use() != "accumulated":
            return False
        return receiver.receive_values(self.i, compute)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class LayerRoute(Route, ABC):
    """A route of a layer of one weight."""

    @abstractmethod
    def output(self, layer: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
        """Compute the output of the layer with this weight, with the tiled backward pass."""


class LinearRoute(LayerRoute):
    """A route of a linear layer."""

    def __init__(self, receiver: Receiver, i: int, *, transposed: bool) -> None:
        super().__init__(receiver, i, transposed=transposed)
        this = weakref.ref(self)

        def add_product(left: Tensor, right: Tensor) -> bool:
            route = this()
            return route is not None and route.add_product(left, right)

        def is_hooked() -> bool:
            route = this()
            return route is not None and route.is_hooked()

        self._native = receiver.buffer.linear_route(i, transposed, add_product, is_hooked)

    def output(self, layer: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
        bias = layer._parameters["bias"]
        if torch.compiler.is_compiling() or self._native is None:
            return _by_op(self, input, weight, bias)
        output: Tensor = self._native.linear(input, weight, bias)
        return output

    def gradient_use(self) -> GradientUse:
        use: GradientUse = super().gradient_use() if self._native is None else self._native.gradient_use()
        return use


route_of_number: weakref.WeakValueDictionary[int, Route] = weakref.WeakValueDictionary()


# It must be named `forward`: pickle looks for a method of that name in the layer.
def forward(self: nn.Module, input: Tensor) -> Tensor:
    """Compute the forward of the layer's class; with grad enabled and a route, with the tiled backward pass."""
    route: LayerRoute | None = getattr(self, "_tile_route", None)
    weight = self._parameters["weight"]
    if (
        route is None
        or weight is not route.weight
        or not weight.requires_grad
        or not torch.is_grad_enabled()
        or type(input) is not Tensor
    ):
        return type(self).forward(self, input)
    if not torch.compiler.is_compiling() and (has_others_hooks(weight) or route.receiver() is None):
        return type(self).forward(self, input)
    return route.output(self, input, weight)


def _no_hook(*gradients: Any) -> None:
    """Do nothing."""


def has_others_hooks(weight: Tensor) -> bool:
    """Whether hooks other than the optimizer's use the dense gradient."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks) != 1


def route_of(module: nn.Module) -> Route | None:
    """Return the route of a layer's weight, for code that uses the weight outside of the layer."""
    route: Route | None = getattr(module, "_tile_route", None)
    return route if route is not None and module._parameters["weight"] is route.weight else None


def has_plain_forward(module: nn.Module, tiled: Callable[..., Tensor] = forward) -> bool:
    """Whether the layer's forward is its class's or `tiled`, the one that `install` sets."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "__func__", None) in (tiled, type(module).forward)


def install(module: nn.Module, route: Route) -> None:
    """Set the layer's route, and replace its `forward`."""
    setattr(module, route.attribute, route)
    module.forward = types.MethodType(route.layer_forward(), module)


def remove(module: nn.Module, route: Route) -> None:
    """Undo `install` if the layer still has this route. A `forward` that other code has wrapped stays.

    Without a route, that `forward` computes the same as the class's.
    """
    if vars(module).get(route.attribute) is not route:
        return
    delattr(module, route.attribute)
    if getattr(vars(module).get("forward"), "__func__", None) is route.layer_forward():
        del module.forward


# The ops. The route's number is on the host: reading it needs no synchronization. Inductor's own CUDA graphs leave the
# backward op out (`cudagraph_unsafe`): whether a gradient is the first one is decided on the host, so only a graph of
# whole steps (`GraphedStep`) may hold it.

library = torch.library.Library("sparse_opt", "FRAGMENT")
library.define(
    "tile_linear(Tensor input, Tensor weight, Tensor? bias, Tensor route, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "tile_linear_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor(a!) route, bool transposed) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
# What `tile_compiler` leaves of the latter, for several layers.
library.define(
    "tile_products(Tensor[] grad_outputs, Tensor[] inputs, Tensor(a!)[] routes, bool[] transposed) -> ()",
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


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, route: Tensor | None, transposed: bool) -> Tensor:
    """The op `tile_linear` without its gradients."""
    rows = _rows(input)
    if transposed:
        assert bias is not None
        out = torch.addmm(bias, rows, weight)
    elif input.dim() <= 2:
        return F.linear(input, weight, bias)
    elif bias is None or input.is_contiguous():
        out = F.linear(rows, weight, bias)
    else:  # F.linear would not fuse the bias here
        out = torch.mm(rows, weight.t()) + bias
    # Not a view, so that the result may be modified in place, as that of a linear layer.
    return torch.ops.aten._unsafe_view(out, (*input.shape[:-1], out.shape[-1]))


def _fake_linear(input: Tensor, weight: Tensor, bias: Tensor | None, route: Tensor, transposed: bool) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[1 if transposed else 0]))


def _linear_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, route: Tensor, transposed: bool
) -> Tensor:
    _add_products([grad_output], [input], [route], [transposed])
    return grad_output.new_empty(0) if weight is None else _input_gradient(grad_output, input, weight, transposed)


def _input_gradient(grad_output: Tensor, input: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    grad_rows, input_rows = _rows(grad_output), _rows(input)
    matrix = weight.t() if transposed else weight
    # As in autograd's formula for mm, which returns a column-major gradient for a column-major input.
    if input_rows.stride(0) == 1 and input_rows.stride(1) == input_rows.shape[0]:
        grad_input = torch.mm(matrix.t(), grad_rows.t()).t().contiguous()
    else:
        grad_input = torch.mm(grad_rows, matrix)
    return grad_input.view(*grad_output.shape[:-1], input.shape[-1])


LOST_OPTIMIZER = (
    "a layer's optimizer was closed or detached, or got another mask, between its forward and backward pass"
)


def use_in_compiled(route: Route | None) -> GradientUse:
    """Return how the weight's gradient is used; raise a RuntimeError if it must be dense, which compiled code lacks."""
    use = "accumulated" if route is None else route.gradient_use()
    if use in ("hooked", "returned"):
        needs = "torch.autograd.grad" if use == "returned" else "another hook on the weight"
        raise RuntimeError(
            f"{needs} needs a dense weight gradient, but this compiled layer computes only the active tiles, for "
            "its optimizer; build the optimizer with tile_backward=False"
        )
    return use


def _add_products(
    grad_outputs: Sequence[Tensor], inputs: Sequence[Tensor], routes: Sequence[Tensor], transposed: Sequence[bool]
) -> None:
    products: dict[int, tuple[Receiver | None, list[Product]]] = {}
    for grad_output, input, number, swapped in zip(grad_outputs, inputs, routes, transposed, strict=True):
        route = route_of_number.get(int(number))
        use = use_in_compiled(route)
        receiver = None if route is None else route.receiver()
        _, its = products.setdefault(id(receiver), (receiver, []))
        if route is not None and use == "accumulated":
            operands = _rows(grad_output), _rows(input)
            its.append(Product(route.i, *(operands[::-1] if swapped else operands)))
    for receiver, its in products.values():
        if receiver is None or (its and not receiver.receive_tiles(its)):
            raise RuntimeError(LOST_OPTIMIZER)


def _fake_linear_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, route: Tensor, transposed: bool
) -> Tensor:
    return grad_output.new_empty(0 if weight is None else (*grad_output.shape[:-1], input.shape[-1]))


def _dense_gradient(route: Route | None, left: Tensor, right: Tensor) -> Tensor | None:
    """Compute left^T @ right, the weight's gradient, unless it is unused or the optimizer takes it by tiles."""
    use = "returned" if route is None else route.gradient_use()
    if route is None or use in ("hooked", "returned") or (use == "accumulated" and not route.add_product(left, right)):
        return left.t() @ right
    return None


class _TileLinear(torch.autograd.Function):
    """Autograd's kernel of `tile_linear`: torch's own ops, so that compiled code has these in its place.

    An op that took the route would keep Inductor's CUDA graphs from the forward pass: they return every input that is
    used later, and must not return one on the host.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, route: Tensor, transposed: bool
    ) -> Tensor:
        ctx.route, ctx.transposed = route, transposed
        ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)
        return linear(input, weight, bias, route, transposed)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a linear layer whose weight gradient is computed by tiles can't be differentiated twice "
                "(create_graph); build the optimizer with tile_backward=False"
            )
        input, weight = ctx.saved_tensors
        grad_bias = _rows(grad_output).sum(0) if ctx.needs_input_grad[2] else None
        if type(ctx.route) is not Tensor:  # traced by torch.compile
            operands = grad_output, input, weight, ctx.route, ctx.transposed
            grad_input = torch.ops.sparse_opt.tile_linear_backward(*operands)
            return (grad_input if ctx.needs_input_grad[0] else None), None, grad_bias, None, None
        grad_input = None if weight is None else _input_gradient(grad_output, input, weight, ctx.transposed)
        left, right = (input, grad_output) if ctx.transposed else (grad_output, input)
        grad_weight = _dense_gradient(route_of_number.get(int(ctx.route)), _rows(left), _rows(right))
        return grad_input, grad_weight, grad_bias, None, None


library.impl("tile_linear", lambda *operands: _TileLinear.apply(*operands), "Autograd")
library.impl("tile_linear", linear, "CompositeExplicitAutograd")
library.impl("tile_linear_backward", _linear_backward, "CompositeExplicitAutograd")
library.impl("tile_products", _add_products, "CompositeExplicitAutograd")
torch.library.register_fake("sparse_opt::tile_linear", _fake_linear, lib=library)
torch.library.register_fake("sparse_opt::tile_linear_backward", _fake_linear_backward, lib=library)
torch.library.register_fake("sparse_opt::tile_products", lambda *operands: None, lib=library)
