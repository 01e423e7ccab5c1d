"""Finds the layers whose weight gradients can be computed tile by tile, and installs their backward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter

from ...masks.patterns import PATTERNS, aligned_runs, most_specific_pattern
from ...ops.tiles import TILE_SIZES
from ..buckets import Bucket
from ..segments import ActiveWeight, Segments, Tiles
from . import tile_backward, tile_embedding, tile_experts
from .collector import Receiver
from .tile_backward import LinearRoute, Route
from .tile_embedding import EmbeddingRoute
from .tile_experts import ExpertsRoute

# Layers of weights of a higher density have a dense gradient unless tile_backward=True.
#
# Linear layers: on an H200 (bf16) the dense weight gradients of a Llama-3.2-3B's layers took 64 ms for 8192 tokens and
# 8.6 ms for 1024. The CUDA kernel, one call per layer, took at density 25 and 50 %: with tiles of 64, 51 and 102 ms for
# 8192 tokens and 6.9 and 13.8 ms for 1024; with tiles of 128, 34 and 68 ms and 5.3 and 10.2 ms.
MAX_TILED_DENSITY = {64: 0.3, 128: 0.4}
# Embeddings, by bytes, not timed: a dense bf16 gradient is filled with zeros, 2 bytes an element, and its active
# elements are gathered, 6 bytes each; by tiles, the active elements are read or written about 7 times in fp32.
MAX_TILED_EMBEDDING_DENSITY = 0.09


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that can compute its part of a weight's gradient by tiles."""

    module: nn.Module
    name: str  # of the weight in the module

    @property
    def kind(self) -> type:
        return _layer_type(self.module)

    def is_worthwhile(self, density: float, tile_size: int) -> bool:
        """Whether tiles are expected to be faster than the dense gradient of a weight of this density.

        Those of experts always are: the dense gradient is as large as all experts, few tokens as each of them has.
        """
        if self.name in tile_experts.weight_names(self.module):
            return True
        return density < (MAX_TILED_EMBEDDING_DENSITY if self.kind is nn.Embedding else MAX_TILED_DENSITY[tile_size])

    def route(self, receiver: Receiver, i: int) -> Route:
        if self.name in tile_experts.weight_names(self.module):
            return ExpertsRoute(receiver, i, self.name)
        if self.kind is nn.Embedding:
            return EmbeddingRoute(receiver, i)
        return LinearRoute(receiver, i, transposed=self.kind is not nn.Linear)


def find(
    model: nn.Module, unsharded: Mapping[Parameter, Parameter]
) -> tuple[dict[Parameter, list[Layer]], dict[Parameter, str]]:
    """Return the layers that support tiles, by their weight, and the reason why other parameters have none.

    The layers are exactly `torch.nn.Linear`, transformers' `Conv1D` and `torch.nn.Embedding`, not subclasses, and
    transformers' experts (tile_experts.py), with the forward of their class. A weight may have any number of
    embeddings, and one other layer. Its embeddings without support have a dense gradient, which is added.

    Args:
        unsharded: of each sharded parameter, the one that the layer has in its forward pass; the results name these.
    """
    owners: dict[Parameter, list[tuple[str, nn.Module]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(unsharded.get(param, param), []).append((name, module))
    layers, why = {}, {}
    for param, found in owners.items():
        embeddings = [owner for owner in found if _is_strided_embedding(owner[1])]
        others = [owner for owner in found if owner not in embeddings]
        reasons = [_why_not(name, module, param) for name, module in others + embeddings]
        if len(others) > 1:
            why[param] = "it is tied: more than one layer has it"
        elif reasons[0] and (others or all(reasons)):
            why[param] = reasons[0]
        else:
            supported = zip(others + embeddings, reasons, strict=True)
            layers[param] = [Layer(module, name) for (name, module), reason in supported if not reason]
    return layers, why


def _is_strided_embedding(module: nn.Module) -> bool:
    return _layer_type(module) is nn.Embedding and not module.sparse


def _layer_type(module: nn.Module) -> type:
    """Return the layer's class before `fully_shard`, which replaces it by a subclass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    return kind.__bases__[1] if fsdp is not None and kind.__bases__[0] is fsdp.FSDPModule else kind


def _why_not(name: str, module: nn.Module, param: Parameter) -> str:
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    kind = _layer_type(module)
    forward: Callable[..., Tensor] = tile_backward.forward
    if name in tile_experts.weight_names(module):
        forward = tile_experts.forward
        if reason := tile_experts.why_not(module, param):
            return reason
    elif name != "weight" or (kind not in (nn.Linear, nn.Embedding) and (conv1d is None or kind is not conv1d)):
        return (
            f"it is {name!r} of a {type(module).__name__}, not the weight of a torch.nn.Linear, Conv1D or "
            "torch.nn.Embedding, or one of transformers' experts"
        )
    if isinstance(module, nn.Embedding) and (option := tile_embedding.unsupported_option(module)):
        return f"its embedding has the option {option}"
    if type(param) is not Parameter:
        return f"it is a {type(param).__name__}, not a plain Parameter"
    if not tile_backward.has_plain_forward(module, forward):
        return "its layer has a forward that is not its class's"
    if getattr(param, "_backward_hooks", None):
        return "it has hooks of others (Tensor.register_hook), which get the dense gradient"
    return ""


def choose(
    buckets: Sequence[Bucket], model: nn.Module | None, pattern: str, *, grads: str, tile_backward: bool | None
) -> list[Tiles | None]:
    """Return the tiles of every bucket's tiled parameters, None for a bucket without any.

    Args:
        tile_backward: False: none; True: all that support it; None: those of them with a layer for which
            `is_worthwhile`.

    Raises:
        ValueError: `tile_backward` is True and no parameter supports it; names the reasons.
    """
    if tile_backward is False:
        return [None] * len(buckets)
    size_of_mask = PATTERNS[pattern][0]
    in_tiles = size_of_mask in TILE_SIZES
    everywhere = tile_backward is True
    possible = grads == "compact" and model is not None
    layers, why = find(model, _unsharded(buckets)) if grads == "compact" and model is not None else ({}, {})
    refused: dict[str, str] = {}
    tiles: list[Tiles | None] = []
    for bucket in buckets:
        found: dict[int, int] = {}  # size of the tiles of each parameter that may have some
        for i, shard in enumerate(bucket.shards) if possible else ():
            param = shard.unsharded
            if isinstance(param, ActiveWeight):  # its layer's own forward has its tiles
                continue
            if not (size := size_of_mask if in_tiles else _size_of_whole_tiles(bucket.unsharded, i, pattern)):
                continue
            if param not in layers:
                refused[bucket.names[i]] = why.get(param, "it is not in the model")
            elif _tiled(layers[param], bucket, i, size, everywhere):
                found[i] = size
        size = min(found.values(), default=0)  # larger tiles consist of whole smaller ones
        chosen = [i for i in found if _tiled(layers[bucket.shards[i].unsharded], bucket, i, size, everywhere)]
        tiles.append(Tiles.of(bucket.unsharded, chosen, size) if chosen else None)
    has_some = any(of_bucket is not None for of_bucket in tiles)
    if tile_backward and not has_some and not (possible and (in_tiles or refused)):
        raise ValueError(
            "tile_backward=True needs grads='compact', a model (params or model=) and a mask of whole tiles (tile64, "
            f"tile128); grads is {grads!r}, the model {'given' if model is not None else 'missing'}, and the mask's "
            f"pattern {pattern!r}"
        )
    if tile_backward and refused and not has_some:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in list(refused.items())[:3])
        raise ValueError(f"tile_backward=True, but none of {len(refused)} active parameters supports it: {reasons}")
    return tiles


def _size_of_whole_tiles(segments: Segments, i: int, pattern: str) -> int:
    """Return the size of tiles, all of them whole, that parameter i's active elements are; 0 if there is none.

    Looked for in masks of other patterns than tiles: whole matrices of a stack, such as experts, in all of them, and
    any tiles in masks of runs. Runs are what the biases of the same experts have.
    """
    shape, nnz = segments.params[i].shape, segments.ends[i] - segments.starts[i]
    matrix = shape[-1] * shape[-2] if len(shape) == 3 else 0
    if nnz and matrix and nnz % matrix == 0 and aligned_runs(segments.positions(i), matrix) is not None:
        return TILE_SIZES[-1]
    if pattern == "element" or len(shape) < 2 or not nnz:
        return 0
    row = segments.positions(i, TILE_SIZES[0])  # of the first tile, before all positions are expanded
    first, column = int(row[0]), int(row[0]) % shape[-1]
    width = min(TILE_SIZES[0], shape[-1] - column)
    if column % TILE_SIZES[0] or row.numel() < width or int(row[width - 1]) != first + width - 1:
        return 0
    size = PATTERNS[most_specific_pattern([(segments.positions(i).cpu(), shape)])][0]
    return size if size in TILE_SIZES else 0


def _unsharded(buckets: Iterable[Bucket]) -> dict[Parameter, Parameter]:
    return {shard.param: shard.unsharded for bucket in buckets for shard in bucket.shards}


def _tiled(layers: list[Layer], bucket: Bucket, i: int, tile_size: int, everywhere: bool) -> list[Layer]:
    """Return the layers of parameter i that are to compute tiles."""
    density = bucket.nnz_of_param(i) / bucket.shards[i].unsharded.numel()
    return [layer for layer in layers if everywhere or layer.is_worthwhile(density, tile_size)]


def install(model: nn.Module, bucket: Bucket, receiver: Receiver, *, everywhere: bool) -> list[tuple[nn.Module, Route]]:
    """Route the gradients of the bucket's tiled parameters to its receiver; return the changed layers.

    Args:
        everywhere: `tile_backward` of `choose` is True.
    """
    tiles = bucket.gradient.tiles
    if tiles is None:
        return []
    layers, _ = find(model, _unsharded([bucket]))
    changed: list[tuple[nn.Module, Route]] = []
    for i, shard in enumerate(bucket.shards):
        if not tiles.has(i):
            continue
        for layer in _tiled(layers.get(shard.unsharded, []), bucket, i, tiles.tile_size, everywhere):
            route = layer.route(receiver, i)
            tile_backward.install(layer.module, route)
            changed.append((layer.module, route))
    return changed


def restore(changed: list[tuple[nn.Module, Route]]) -> None:
    """Undo `install`, and clear the list of changed layers."""
    for module, route in changed:
        tile_backward.remove(module, route)
    changed.clear()
