"""torch.compile's default backend for layers whose weight gradients are computed by tiles.

With another backend, compiled code calls an op of tile_backward.py for each layer's backward pass. Here the gradient of
a layer's input is torch's own product, as its output is everywhere: Inductor plans it with the other work and launches
it without a call to Python; only the tiles are left to an op.

Few active tiles leave a GPU idle. Compiled code would compute those of each layer by a call of its own, because the
compiler may reuse the memory of their operands after the call. Here the calls of a backward graph become one, at the
place of the last: the operands of the others stay until then.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Operands that wait for a call: 2048 tokens of Qwen2.5-32B's feed-forward layers are 128 MiB for one of them.
_MAX_WAITING_BYTES = 256 * 2**20


def inductor(graph: fx.GraphModule, inputs: list[Tensor], *, recompute: bool = False) -> Any:
    """A backend of torch.compile: Inductor, with torch's products and one call for the tiles of several layers.

    Args:
        recompute: keep only the graph's inputs for the backward pass, which computes the other activations again.

    Raises:
        RuntimeError: the graph has a random operation, such as dropout, and `recompute` would draw other numbers.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    changes: dict[str, Any] = {}
    nodes = [node for module in graph.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes]
    if any(node.target is torch.ops.sparse_opt.tile_linear for node in nodes):
        # torch's cache of whole compilations does not know that `_compile` changes the graphs; Inductor's sees them.
        changes["enable_autograd_cache"] = False
    if recompute:
        for node in nodes:
            if _is_random(node):
                raise RuntimeError(f"activations are recomputed, but {node.name!r} would draw other random numbers")
        # torch.autograd.graph has a function for it only from torch 2.13 on
        changes["activation_memory_budget"] = 0.0
    with config.patch(changes):
        return compile_fx(graph, inputs, inner_compile=_compile)


def _is_random(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    if "dropout" in name:
        p, training = ([*node.args[1:], *([None] * 3)])[:2]
        p, training = node.kwargs.get("p", p), node.kwargs.get("training", training)
        return bool(p != 0.0 and training is not False)
    if name == "scaled_dot_product_attention":
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    return name in ("rand", "randn", "rand_like", "randn_like", "bernoulli", "multinomial", "normal")


def _compile(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.lowering import add_needs_realized_inputs

    # Inductor knows this of an op from the second graph on. Until then each call gets a copy of its operands.
    ops = torch.ops.sparse_opt
    add_needs_realized_inputs([ops.grouped_mm, ops.tile_grouped_product, ops.tile_products])
    if options.get("is_backward"):
        merge_products(graph)
    return compile_fx_inner(graph, inputs, **options)


def merge_products(module: fx.GraphModule) -> None:
    """Replace the calls of `tile_linear_backward` in a backward graph by torch's products and calls for all tiles."""
    graph, ops = module.graph, torch.ops.sparse_opt
    functional = torch.ops.higher_order.auto_functionalized_v2
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=functional)
        if node.args[0] is ops.tile_linear_backward.default
    ]
    if not found:
        return
    waiting: list[fx.Node] = []
    n_bytes = 0
    for node in found:
        more = sum(_nbytes(node.kwargs[name]) for name in ("grad_output", "input"))
        if waiting and n_bytes + more > _MAX_WAITING_BYTES:
            _merge(graph, waiting)
            waiting, n_bytes = [], 0
        waiting.append(node)
        n_bytes += more
    _merge(graph, waiting)
    graph.lint()
    module.recompile()


def _merge(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    ops = torch.ops.sparse_opt
    routes: list[fx.Node] = []
    origin: dict[fx.Node, fx.Node] = {}  # of a route as it is after a call, which has changed nothing in it
    for node in nodes:
        base: Any = node.kwargs["_all_bases"][node.kwargs["_route_base_index"]]  # type: ignore[index]
        routes.append(origin.get(base, base))
        origin |= {user: routes[-1] for user in node.users if user.args[1] == 1}
    operands = [[node.kwargs[name] for node in nodes] for name in ("grad_output", "input", "transposed")]
    with graph.inserting_after(nodes[-1]):
        products = graph.call_function(ops.tile_products.default, (*operands[:2], routes, operands[2]))
        products.meta["val"] = None
    for node in nodes:
        for user in list(node.users):
            assert user.target is operator.getitem
            if user in origin:
                for copy in list(user.users):
                    if copy.target is torch.ops.aten.copy_.default and copy.args == (origin[user], user):
                        graph.erase_node(copy)
                user.replace_all_uses_with(origin[user])
                graph.erase_node(user)
            else:
                _replace_by_input_gradient(graph, node, user)
        graph.erase_node(node)


def _replace_by_input_gradient(graph: fx.Graph, node: fx.Node, output: fx.Node) -> None:
    """Replace the first output of `tile_linear_backward`, which is empty if the layer's input needs no gradient.

    As `tile_backward._input_gradient`, but for the order of its elements in memory, which is Inductor's choice.
    """
    if (weight := node.kwargs["weight"]) is not None:
        grad_output: Any = node.kwargs["grad_output"]
        with graph.inserting_before(node):
            rows = _call(graph, aten.reshape.default, grad_output, [-1, grad_output.meta["val"].shape[-1]])
            matrix = _call(graph, aten.permute.default, weight, [1, 0]) if node.kwargs["transposed"] else weight
            gradient = _call(graph, aten.mm.default, rows, matrix)
            sizes = [*_sizes(graph, grad_output)[:-1], output.meta["val"].shape[-1]]
            gradient = _call(graph, aten.reshape.default, gradient, sizes)
        output.replace_all_uses_with(gradient)
    graph.erase_node(output)


def _call(graph: fx.Graph, op: Any, *arguments: Any) -> fx.Node:
    """A node of the graph that calls an op, with the value that Inductor needs to know."""
    node = graph.call_function(op, arguments)
    node.meta["val"] = op(*fx.map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


def _sizes(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """The sizes of a node's tensor: nodes of those that vary, numbers of the others."""
    return [
        _call(graph, aten.sym_size.int, node, i) if isinstance(size, torch.SymInt) else size
        for i, size in enumerate(node.meta["val"].shape)
    ]


def _nbytes(node: Any) -> int:
    """The bytes of a node's tensor. A size that varies counts as when it was traced; asking for it would fix it."""
    value = node.meta["val"]
    n = value.element_size()
    for size in value.shape:
        hint = size.node.hint if isinstance(size, torch.SymInt) else size
        n *= 1 if hint is None else int(hint)
    return int(n)
