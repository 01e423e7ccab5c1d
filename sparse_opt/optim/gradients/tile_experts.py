"""Mixtures of experts whose backward pass computes only the active tiles of the experts' weight gradients.

The experts of a layer are modules of transformers with stacked weights, [experts, rows, columns]. Their forward here is
that of transformers' implementation "grouped_mm", to the bit if torch's products repeat their bits (on some CPUs MKL's
need MKL_CBWR): the tokens are sorted by expert, and there is one grouped product for each weight. Nothing waits for the
device: where each expert's tokens are is read there. The backward passes of the sorting and of the weighted sum are
gathers in place of torch's scatters, and give the same bits every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collector import Receiver
from .gradient_buffer import Product
from .tile_backward import LOST_OPTIMIZER, Route, has_others_hooks, library, route_of_number, use_in_compiled

# Other implementations have kernels of their own, which may round differently.
IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm")
# torch's grouped products on a GPU need rows of whole 16-byte chunks.
_CHUNK = 16
# A copy of the rows of all tokens would be the largest buffer of a step: 56 MiB less for 2048 tokens of Qwen3-30B-A3B.
_TOKENS_AT_ONCE = 256


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
        return receiver is not None and receiver.receive_tiles([Product(self.i, left, right, token_offsets)])


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
    place = place.view_as(top_k_index)

    x = _linear(module, up, hidden_states, token_offsets, expert, token=order // top_k, place=place)
    x = module._apply_gate(x) if getattr(module, "has_gate", True) else module.act_fn(x)
    if module.has_bias or getattr(module, "has_post_expert_norm", False):
        x = _linear(module, down, x, token_offsets, expert)
        if getattr(module, "has_post_expert_norm", False):
            x = module.post_expert_norm(x)
        x = _Combine.apply(x, top_k_weights, order, place)
    else:  # no output of an expert is kept for the backward pass
        x = _linear(module, down, x, token_offsets, expert, place=place, order=order, factors=top_k_weights)
    return x.to(hidden_states.dtype)


def _linear(
    module: Any,
    name: str,
    x: Tensor,
    token_offsets: Tensor,
    expert: Tensor,
    *,
    token: Tensor | None = None,
    place: Tensor | None = None,
    order: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    weight = getattr(module, name)
    route: ExpertsRoute | None = getattr(module, _attribute(name), None)
    if route is not None and (weight is not route.weight or not weight.requires_grad or not torch.is_grad_enabled()):
        route = None
    if route is not None and not torch.compiler.is_compiling():
        if has_others_hooks(weight) or route.receiver() is None:
            route = None
    number = None if route is None else route.number
    x = x.to(weight.dtype)
    sorting = token, place, order, factors
    x = torch.ops.sparse_opt.tile_grouped_mm(x, weight, token_offsets, number, module.is_transposed, *sorting)
    return x.add_(getattr(module, f"{name}_bias")[expert.long()]) if module.has_bias else x


class _Combine(torch.autograd.Function):
    """The weighted sum over the experts of each token: [T * k, hidden] and [T, k] to [T, hidden].

    Products are written in place of their operands: each is as large as the outputs of all experts.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, weights, order, place)
        return _combined(outputs, place, weights, fused=torch.compiler.is_compiling())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        outputs, weights, order, place = ctx.saved_tensors
        grad_rows = grad[order // weights.shape[1]]
        grad_outputs = grad_weights = None
        if ctx.needs_input_grad[1]:
            products = _row_products(grad_rows, outputs, fused=torch.compiler.is_compiling())
            grad_weights = products[place].to(weights.dtype)
        if ctx.needs_input_grad[0]:
            grad_outputs = _times(grad_rows, weights.reshape(-1)[order][:, None]).to(outputs.dtype)
        return grad_outputs, grad_weights, None, None


def _row_products(left: Tensor, right: Tensor, *, fused: bool) -> Tensor:
    """The products of each row of [N, n] and the same row of another matrix: [N]."""
    if fused:  # in the kernel that reads the rows; a product would copy one operand
        return (left.float() * right.float()).sum(1)
    return torch.bmm(left[:, None], right[:, :, None].to(left.dtype)).view(-1)


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    """rows * factors, in the memory of the rows if the two have one dtype."""
    return rows.mul_(factors) if rows.dtype == factors.dtype else rows * factors


def _fused_sum(rows: Tensor, place: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of the rows of each token, times their weights: of [T * k, hidden] and [T, k], [T, hidden].

    torch.compile makes one kernel of the k additions, in a fourth of the time of its kernel for a reduction: 11 us in
    place of 49 for 1024 tokens, 8 experts and hidden size 2048 on an H200.
    """
    total: Tensor | None = None
    for j, of_expert in enumerate(place.unbind(1)):
        row = rows[of_expert].float()
        if weights is not None:
            row = row * weights[:, j, None].float()
        total = row if total is None else total + row
    assert total is not None  # k > 0
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    # Dynamo of torch 2.11 gives zeros as the gradients of a function whose output is that of a `to` with nothing to do.
    return total if total.dtype == dtype else total.to(dtype)


# The ops. Compiled code calls `grouped_mm` in place of torch's, which only takes bf16 there.

# `place`, [T, k], says where the rows of each token are in the order of experts. With `token` the input is [T, in] and
# its rows `token` are multiplied; the input is kept, which has 1/k of their size. With `order`, the inverse of `place`,
# and `factors`, [T, k], the result is the sum of each token's rows times their factors: [T, out]. The factors' gradient
# then is the product of the input with its own gradient, as in SonicMoE (https://arxiv.org/abs/2512.14080), and needs
# no output.
library.define(
    "tile_grouped_mm(Tensor input, Tensor weight, Tensor token_offsets, Tensor? route, bool transposed, "
    "Tensor? token, Tensor? place, Tensor? order, Tensor? factors) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What writes to `after` comes first.
library.define(
    "grouped_mm(Tensor input, Tensor weight, Tensor token_offsets, bool transposed, Tensor? after=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "tile_grouped_product(Tensor left, Tensor right, Tensor token_offsets, Tensor(a!) route) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)


def _rows(input: Tensor, token: Tensor | None) -> Tensor:
    return input if token is None else input[token]


def _combined(rows: Tensor, place: Tensor, factors: Tensor, *, fused: bool) -> Tensor:
    if fused:
        return _fused_sum(rows, place, factors)
    parts = zip(place.split(_TOKENS_AT_ONCE), factors.split(_TOKENS_AT_ONCE), strict=True)
    return torch.cat([_times(rows[places], of_places[..., None]).sum(1) for places, of_places in parts])


def _product(
    input: Tensor, weight: Tensor, token_offsets: Tensor, transposed: bool, after: Tensor | None = None
) -> Tensor:
    """Multiply each expert's rows of [T, in] by its matrix, [in, out] if transposed, else [out, in]."""
    return F.grouped_mm(input, weight if transposed else weight.transpose(1, 2), offs=token_offsets)


def _fake_product(
    input: Tensor, weight: Tensor, token_offsets: Tensor, transposed: bool, after: Tensor | None = None
) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2 if transposed else 1])


def _tile_grouped_mm(
    input: Tensor,
    weight: Tensor,
    token_offsets: Tensor,
    route: Tensor | None,
    transposed: bool,
    token: Tensor | None,
    place: Tensor | None,
    order: Tensor | None,
    factors: Tensor | None,
) -> Tensor:
    """The op without gradients, also of fake tensors."""
    rows: Tensor = torch.ops.sparse_opt.grouped_mm(_rows(input, token), weight, token_offsets, transposed)
    if factors is None:
        return rows
    assert place is not None
    return _combined(rows, place, factors, fused=type(input) is not Tensor)


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
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        token_offsets: Tensor,
        route: Tensor | None,
        transposed: bool,
        *sorting: Tensor | None,
    ) -> Tensor:
        token, place, _order, factors = sorting
        ctx.route, ctx.transposed, ctx.dtype = route, transposed, input.dtype
        ctx.traced = type(input) is not Tensor  # by torch.compile
        needed = ctx.needs_input_grad
        ctx.save_for_backward(
            input if needed[1] or needed[8] else None,
            weight if needed[0] or needed[8] else None,
            token_offsets,
            *sorting,
        )
        product = torch.ops.sparse_opt.grouped_mm if ctx.traced else _product
        output: Tensor = product(_rows(input, token), weight, token_offsets, transposed)
        if factors is not None:
            assert place is not None
            output = _combined(output, place, factors, fused=ctx.traced)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "experts whose weight gradients are computed by tiles can't be differentiated twice (create_graph); "
                "build the optimizer with tile_backward=False"
            )
        input, weight, token_offsets, token, place, order, factors = ctx.saved_tensors
        factor = None  # of each row
        if factors is not None:
            factor = factors.reshape(-1)[order][:, None]
            grad_output = grad_output.to(ctx.dtype)[order // factors.shape[1]]
        grad_output = grad_output.contiguous()
        grad_input = grad_weight = grad_factors = None
        after = None
        if ctx.needs_input_grad[1]:
            rows = _rows(input, token)
            if factor is not None:
                rows = (rows * factor).to(rows.dtype)
            left, right = (rows, grad_output) if ctx.transposed else (grad_output, rows)
            if ctx.traced and ctx.route is not None:
                torch.ops.sparse_opt.tile_grouped_product(left, right, token_offsets, ctx.route)
                after = ctx.route  # the other product's result is as large as an operand of this one
            else:
                grad_weight = _dense_gradient(ctx.route, left, right, token_offsets)
            del rows, left, right  # before the other product, which is as large
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[8]:
            if ctx.traced:
                of_rows = torch.ops.sparse_opt.grouped_mm(grad_output, weight, token_offsets, not ctx.transposed, after)
            else:
                of_rows = _product(grad_output, weight, token_offsets, not ctx.transposed)
            if ctx.needs_input_grad[8]:
                grad_factors = _row_products(of_rows, input, fused=ctx.traced)[place].to(factors.dtype)
            if factor is not None:
                grad_input = _times(of_rows, factor).to(ctx.dtype)
            elif token is not None:
                grad_input = _fused_sum(of_rows, place) if ctx.traced else of_rows[place].sum(1)
            else:
                grad_input = of_rows
        return grad_input, grad_weight, None, None, None, None, None, None, grad_factors


def _dense_gradient(number: Tensor | None, left: Tensor, right: Tensor, token_offsets: Tensor) -> Tensor | None:
    """Compute the weight's dense gradient, unless it is unused or the optimizer takes it by tiles."""
    route = None if number is None else route_of_number.get(int(number))
    if isinstance(route, ExpertsRoute):
        use = route.gradient_use()
        if use == "unused" or (use == "accumulated" and route.add_grouped_product(left, right, token_offsets)):
            return None
    return F.grouped_mm(left.t(), right, offs=token_offsets)


library.impl("tile_grouped_mm", lambda *operands: _TileGroupedMM.apply(*operands), "Autograd")
library.impl("tile_grouped_mm", _tile_grouped_mm, "CompositeExplicitAutograd")
library.impl("grouped_mm", _product, "CompositeExplicitAutograd")
library.impl("tile_grouped_product", _add_grouped_product, "CompositeExplicitAutograd")
torch.library.register_fake("sparse_opt::tile_grouped_mm", _tile_grouped_mm, lib=library)
torch.library.register_fake("sparse_opt::grouped_mm", _fake_product, lib=library)
torch.library.register_fake("sparse_opt::tile_grouped_product", lambda *operands: None, lib=library)
