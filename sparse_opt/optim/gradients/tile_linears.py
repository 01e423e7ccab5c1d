"""Finds the linear layers whose weight gradients can be computed tile by tile, and installs their backward pass."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn import Parameter

from ...masks.patterns import PATTERNS
from ...ops.tiles import TILE_SIZES
from ..buckets import Bucket
from . import tile_backward
from .tile_backward import Route, TileSink
from .tiles import Tiles

# Weights of a higher density use the dense gradient unless tile_backward=True. On an H200 (bf16) the dense weight
# gradients of a Llama-3.2-3B's layers took 64 ms for 8192 tokens and 8.6 ms for 1024. The CUDA kernel, one call per
# layer, took at density 25 and 50 %: with tiles of 64, 51 and 102 ms for 8192 tokens and 6.9 and 13.8 ms for 1024; with
# tiles of 128, 34 and 68 ms and 5.3 and 10.2 ms.
MAX_TILED_DENSITY = {64: 0.3, 128: 0.4}


@dataclass(eq=False)
class Linear:
    """The only linear layer that has its weight."""

    module: nn.Module
    transposed: bool  # the weight is [in, out]


def find(
    model: nn.Module, unsharded: Mapping[Parameter, Parameter]
) -> tuple[dict[Parameter, Linear], dict[Parameter, str]]:
    """Return the weights of linear layers that support tiles, and the reason why other parameters do not.

    The layers are exactly `torch.nn.Linear` and transformers' `Conv1D`, not subclasses, with the forward of their
    class. A weight may be tied to embeddings, whose part of the gradient stays dense and is added.

    Args:
        unsharded: of each sharded parameter, the one that the layer has in its forward pass; the results name these.
    """
    owners: dict[Parameter, list[tuple[str, nn.Module]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(unsharded.get(param, param), []).append((name, module))
    linears, why = {}, {}
    for param, found in owners.items():
        layers = [(name, module) for name, module in found if not _is_dense_embedding(module)] or found
        name, module = layers[0]
        reason = "it is tied: more than one layer has it" if len(layers) > 1 else _why_not(name, param, module)
        if reason:
            why[param] = reason
        else:
            linears[param] = Linear(module, _layer_type(module) is not nn.Linear)
    return linears, why


def _is_dense_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and not module.sparse


def _layer_type(module: nn.Module) -> type:
    """Return the layer's class before `fully_shard`, which replaces it by a subclass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    return kind.__bases__[1] if fsdp is not None and kind.__bases__[0] is fsdp.FSDPModule else kind


def _why_not(name: str, param: Parameter, module: nn.Module) -> str:
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    kind = _layer_type(module)
    if name != "weight" or (kind is not nn.Linear and (conv1d is None or kind is not conv1d)):
        return f"it is {name!r} of a {type(module).__name__}, not the weight of a torch.nn.Linear or Conv1D"
    if type(param) is not Parameter:
        return f"it is a {type(param).__name__}, not a plain Parameter"
    if not tile_backward.has_plain_forward(module):
        return "its layer has a forward that is not its class's"
    if getattr(param, "_backward_hooks", None):
        return "it has hooks of others (Tensor.register_hook), which get the dense gradient"
    return ""


def choose(
    buckets: Sequence[Bucket], model: nn.Module | None, pattern: str, *, grads: str, tile_backward: bool | None
) -> list[Tiles | None]:
    """Return the tiles of every bucket's tiled parameters, None for a bucket without any.

    Args:
        tile_backward: False: none; True: all that support it; None: those of them with a density under
            `MAX_TILED_DENSITY`.

    Raises:
        ValueError: `tile_backward` is True and no parameter supports it; names the reasons.
    """
    tile_size = PATTERNS[pattern][0]
    if tile_backward is False:
        return [None] * len(buckets)
    if tile_size not in TILE_SIZES or grads != "compact" or model is None:
        if tile_backward:
            raise ValueError(
                "tile_backward=True needs grads='compact', a model (params or model=) and a mask of pattern tile64 or "
                f"tile128; grads is {grads!r}, the model {'given' if model is not None else 'missing'}, and the mask's "
                f"pattern {pattern!r}"
            )
        return [None] * len(buckets)
    linears, why = find(model, _unsharded(buckets))
    refused: dict[str, str] = {}
    chosen: list[list[int]] = []
    for bucket in buckets:
        chosen.append([])
        for i, shard in enumerate(bucket.shards):
            param = shard.unsharded
            if param not in linears:
                refused[bucket.names[i]] = why.get(param, "it is not in the model")
            elif tile_backward or bucket.nnz_of_param(i) / param.numel() < MAX_TILED_DENSITY[tile_size]:
                chosen[-1].append(i)
    if tile_backward and not any(chosen):
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in list(refused.items())[:3])
        raise ValueError(f"tile_backward=True, but none of {len(refused)} active parameters supports it: {reasons}")
    return [
        Tiles.of(bucket.unsharded, which, tile_size) if which else None
        for bucket, which in zip(buckets, chosen, strict=True)
    ]


def _unsharded(buckets: Iterable[Bucket]) -> dict[Parameter, Parameter]:
    return {shard.param: shard.unsharded for bucket in buckets for shard in bucket.shards}


def install(model: nn.Module, bucket: Bucket, sink: TileSink) -> list[tuple[nn.Module, Route]]:
    """Route the gradients of the bucket's tiled parameters to `sink`; return the changed layers."""
    buffer = bucket.gradient
    tiles = buffer.tiles
    if tiles is None:
        return []
    linears, _ = find(model, _unsharded([bucket]))
    changed = []
    for i, shard in enumerate(bucket.shards):
        if tiles.has(i) and shard.unsharded in linears:
            linear = linears[shard.unsharded]
            route = buffer.route(i, sink, transposed=linear.transposed)
            tile_backward.install(linear.module, route)
            changed.append((linear.module, route))
    return changed


def restore(changed: list[tuple[nn.Module, Route]]) -> None:
    """Undo `install`, and clear the list of changed layers."""
    for module, route in changed:
        tile_backward.remove(module, route)
    changed.clear()
