"""Mixtures of experts whose backward pass computes only the active tiles of the experts' weight gradients.

The experts of a layer are modules of transformers with stacked weights, [experts, rows, columns]. Their forward here is
that of transformers' implementation "grouped_mm", to the bit: the tokens are sorted by expert, and there is one grouped
product for each weight. Nothing waits for the device: where each expert's tokens are is read there. The backward passes
of the sorting and of the weighted sum are gathers in place of torch's scatters, and give the same bits every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collector import Receiver
from .tile_backward import LOST_OPTIMIZER, Route, has_others_hooks, library, route_of_number, use_in_compiled

# Other implementations have kernels of their own, which may round differently.
IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm")
# torch's grouped products on a GPU need rows of whole 16-byte chunks.
_CHUNK = 16


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the experts' weights; empty if the module is none of transformers' experts."""
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None or getattr(type(module).forward, "__globals__", None) is not vars(moe):
        return ()  # the decorator use_experts_implementation replaces the forward of its classes
    return ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"), "down_proj"


def why_not(module: nn.Module, weight: Tensor) -> str:
    """Return the reason why an expert weight's gradient cannot be computed by tiles; empty if it can."""
    implementation = module.config._experts_implementation  # type: ignore[union-attr]
    if implementation not in IMPLEMENTATIONS:
        return f"its experts_implementation is {implementation!r}, not 'eager', 'grouped_mm' or 'batched_mm'"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are distributed over ranks"
    if weight.is_cuda and any(size * weight.element_size() % _CHUNK for size in weight.shape[1:]):
        return f"its experts are {list(weight.shape[1:])}, and torch's grouped products need rows of whole 16 bytes"
    return ""


class ExpertsRoute(Route):
    """A route of one of the weights of a module of experts."""

    def __init__(self, receiver: Receiver, i: int, name: str) -> None:
        super().__init__(receiver, i)
        self.attribute = _attribute(name)

    @staticmethod
    def layer_forward() -> Callable[..., Tensor]:
        return forward

    def add_grouped_product(self, left: Tensor, right: Tensor, token_offsets: Tensor) -> bool:
        """Add the product of each expert's rows of left^T and right to the compact gradient, as `add_product`."""
        receiver = self.receiver()
        if receiver is None:
            return False
        buffer = receiver.buffer
        return receiver.receive_values(self.i, lambda: buffer.tiles_of_experts(self.i, left, right, token_offsets))


def _attribute(name: str) -> str:
    return f"_tile_route_of_{name}"


# It must be named `forward`: pickle looks for a method of that name in the layer.
def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the forward of transformers' "grouped_mm"; the class's own without a route.

    Args:
        hidden_states: [T, hidden].
        top_k_index, top_k_weights: [T, k], the experts of each token and their weights.
    """
    module: Any = self
    up, down = weight_names(self)
    if (
        not any(getattr(self, _attribute(name), None) for name in (up, down))
        or type(hidden_states) is not Tensor
        or (not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active())
    ):
        output: Tensor = type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        return output
    experts, top_k = module.num_experts, top_k_index.shape[1]
    # Sorting 16-bit integers takes a fourth of the passes.
    expert = top_k_index.reshape(-1).to(torch.int16 if experts < 2**15 else torch.int64)
    expert, order = torch.sort(expert, stable=True)
    upper = torch.arange(1, experts + 1, dtype=expert.dtype, device=expert.device)
    token_offsets = torch.searchsorted(expert, upper, out_int32=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)

    x = _Dispatch.apply(hidden_states, order // top_k, place, top_k)
    x = _linear(module, up, x, token_offsets, expert)
    x = module._apply_gate(x) if getattr(module, "has_gate", True) else module.act_fn(x)
    x = _linear(module, down, x, token_offsets, expert)
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    combined: Tensor = _Combine.apply(x, top_k_weights, order, place)
    return combined.to(hidden_states.dtype)


def _linear(module: Any, name: str, x: Tensor, token_offsets: Tensor, expert: Tensor) -> Tensor:
    weight = getattr(module, name)
    route: ExpertsRoute | None = getattr(module, _attribute(name), None)
    if route is not None and (weight is not route.weight or not weight.requires_grad or not torch.is_grad_enabled()):
        route = None
    if route is not None and not torch.compiler.is_compiling():
        if has_others_hooks(weight) or route.receiver() is None:
            route = None
    number = None if route is None else route.number
    x = torch.ops.sparse_opt.tile_grouped_mm(x.to(weight.dtype), weight, token_offsets, number, module.is_transposed)
    return x.add_(getattr(module, f"{name}_bias")[expert.long()]) if module.has_bias else x


class _Dispatch(torch.autograd.Function):
    """The rows of the tokens, sorted by expert: [T, hidden] to [T * k, hidden]."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, token: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return hidden_states[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return grad[place].view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum over the experts of each token: [T * k, hidden] and [T, k] to [T, hidden]."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, weights, order, place)
        return (outputs[place].view(*weights.shape, outputs.shape[1]) * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        outputs, weights, order, place = ctx.saved_tensors
        grad_rows = grad[order // weights.shape[1]]
        grad_outputs = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_outputs = (grad_rows * weights.reshape(-1)[order][:, None]).to(outputs.dtype)
        if ctx.needs_input_grad[1]:
            grad_weights = (grad_rows * outputs).sum(1)[place].view(weights.shape).to(weights.dtype)
        return grad_outputs, grad_weights, None, None


# The ops. Compiled code calls `grouped_mm` in place of torch's, which only takes bf16 there.

library.define(
    "tile_grouped_mm(Tensor input, Tensor weight, Tensor token_offsets, Tensor? route, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "grouped_mm(Tensor input, Tensor weight, Tensor token_offsets, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "tile_grouped_product(Tensor left, Tensor right, Tensor token_offsets, Tensor(a!) route) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)


def _product(input: Tensor, weight: Tensor, token_offsets: Tensor, transposed: bool) -> Tensor:
    """Multiply each expert's rows of [T, in] by its matrix, [in, out] if transposed, else [out, in]."""
    return F.grouped_mm(input, weight if transposed else weight.transpose(1, 2), offs=token_offsets)


def _fake_product(input: Tensor, weight: Tensor, token_offsets: Tensor, transposed: bool) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2 if transposed else 1])


def _add_grouped_product(left: Tensor, right: Tensor, token_offsets: Tensor, number: Tensor) -> None:
    route = route_of_number.get(int(number))
    if use_in_compiled(route) == "unused":
        return
    if not isinstance(route, ExpertsRoute) or not route.add_grouped_product(left, right, token_offsets):
        raise RuntimeError(LOST_OPTIMIZER)


class _TileGroupedMM(torch.autograd.Function):
    """Autograd's kernel of `tile_grouped_mm`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, token_offsets: Tensor, route: Tensor | None, transposed: bool
    ) -> Tensor:
        ctx.route, ctx.transposed = route, transposed
        ctx.traced = type(input) is not Tensor  # by torch.compile
        needed = ctx.needs_input_grad
        ctx.save_for_backward(input if needed[1] else None, weight if needed[0] else None, token_offsets)
        product = torch.ops.sparse_opt.grouped_mm if ctx.traced else _product
        output: Tensor = product(input, weight, token_offsets, transposed)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "experts whose weight gradients are computed by tiles can't be differentiated twice (create_graph); "
                "build the optimizer with tile_backward=False"
            )
        input, weight, token_offsets = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            product = torch.ops.sparse_opt.grouped_mm if ctx.traced else _product
            grad_input = product(grad_output, weight, token_offsets, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            left, right = (input, grad_output) if ctx.transposed else (grad_output, input)
            if ctx.traced and ctx.route is not None:
                torch.ops.sparse_opt.tile_grouped_product(left, right, token_offsets, ctx.route)
            else:
                grad_weight = _dense_gradient(ctx.route, left, right, token_offsets)
        return grad_input, grad_weight, None, None, None


def _dense_gradient(number: Tensor | None, left: Tensor, right: Tensor, token_offsets: Tensor) -> Tensor | None:
    """Compute the weight's dense gradient, unless it is unused or the optimizer takes it by tiles."""
    route = None if number is None else route_of_number.get(int(number))
    if isinstance(route, ExpertsRoute):
        use = route.gradient_use()
        if use == "unused" or (use == "accumulated" and route.add_grouped_product(left, right, token_offsets)):
            return None
    return F.grouped_mm(left.t(), right, offs=token_offsets)


library.impl("tile_grouped_mm", lambda *operands: _TileGroupedMM.apply(*operands), "Autograd")
library.impl(
    "tile_grouped_mm",
    lambda input, weight, token_offsets, route, transposed: _product(input, weight, token_offsets, transposed),
    "CompositeExplicitAutograd",
)
library.impl("grouped_mm", _product, "CompositeExplicitAutograd")
library.impl("tile_grouped_product", _add_grouped_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "sparse_opt::tile_grouped_mm",
    lambda input, weight, token_offsets, route, transposed: _fake_product(input, weight, token_offsets, transposed),
    lib=library,
)
torch.library.register_fake("sparse_opt::grouped_mm", _fake_product, lib=library)
torch.library.register_fake("sparse_opt::tile_grouped_product", lambda *operands: None, lib=library)
