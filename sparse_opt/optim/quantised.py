"""Active weights in full precision over a quantised base.

The optimizer's groups hold an `ActiveWeight` [nnz] in place of each quantised weight with active elements, so that the
buckets, the step and the gradient buffers treat it as a small parameter whose elements are all active. The layer keeps
its quantised weight as it is. An `Overlay` gives it a forward of its own: the weight that it multiplies with is
dequantised into memory that all layers share, and the active elements are written over it; the backward pass does the
same again, so that nothing of the weight's size is kept.

The overlay stays on the layer when the optimizer is detached or freed: there is no other copy of the trained weights.
"""

from __future__ import annotations

import copy
import functools
import json
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Never
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from .. import backends, quantised_layers
from ..files import written_aside
from ..masks.mask_set import MaskSet
from ..masks.patterns import PATTERNS
from ..ops import bind as bind_ops
from ..ops import tile_table
from ..ops.tiles import TILE_SIZES
from ..quantised_layers import QuantisedWeight
from ..tensor_file import open_tensors
from ..tensors import canonical_names, holds_base_weights, saved_tensors
from .gradients import tile_backward
from .gradients.collector import Receiver
from .gradients.gradient_buffer import write_tiles
from .gradients.tile_backward import Route
from .gradients.tile_layers import MAX_TILED_DENSITY
from .ranks.sharding import Shard
from .segments import ActiveWeight, Segments, compact, fits_uint16, packed, run_length_of

_ATTRIBUTE = "_sparse_opt_overlay"
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 * 10**9  # of a file that `save_merged` writes
# Of each model: what its overlays use. They alone keep it alive.
_SCRATCHES: WeakKeyDictionary[nn.Module, WeakValueDictionary[Any, Scratch]] = WeakKeyDictionary()


class Scratch:
    """The memory into which the layers of one device and dtype make their weights, one at a time.

    Experts make two weights at a time, each in memory of its own.

    Work on it is queued on the current stream: layers that share it must run on one stream.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.lock = threading.Lock()  # on a CPU, two threads may run layers at the same time
        self._memory = torch.empty(numel, dtype=dtype, device=device)

    def view(self, layer: QuantisedWeight) -> Tensor:
        """Return the part of the memory that the layer's weight takes, in its shape."""
        return self._memory[: layer.whole.numel()].view(layer.whole.shape)


class Overlay:
    """What a quantised layer computes with: its base, and over it the active elements, if there are any.

    Args:
        positions: [nnz] of the active elements in the flattened weight, ascending, on the CPU.
        run_length: all of them are in aligned runs of this many.
        tile_size: of whole tiles whose gradients are computed without a dense one; None: the dense gradient is.
        values: [nnz] of the active elements, which are not trained then; None: those of the base.
    """

    def __init__(
        self,
        layer: QuantisedWeight,
        scratch: Scratch,
        positions: Tensor,
        run_length: int,
        *,
        tile_size: int | None = None,
        backend: str | None = None,
        values: Tensor | None = None,
    ) -> None:
        self.layer, self.weight, self._scratch = layer, layer.weight, scratch
        self._view = scratch.view(layer)
        self.active: ActiveWeight | None = None
        self.route: Route | None = None  # to the compact gradient of the active weight
        self.shows_base = False
        self._tiles: Tensor | None = None
        self._refusal: RemovableHandle | None = None
        if not positions.numel():
            return
        narrow = fits_uint16(layer.whole, positions, run_length)
        indices, index_bases, starts, ends = packed([positions], run_length, narrow)
        device = self.weight.device
        index_bases = None if index_bases is None else index_bases.to(device)
        elements = Segments([self._view], indices.to(device), index_bases, starts, ends, run_length)
        self._bound = bind_ops([self._view], elements.indices, starts, ends, **elements.layout(), backend=backend)
        self.active = ActiveWeight(self._base_values(elements) if values is None else values, elements, layer.whole)
        self.active.requires_grad_(values is None)
        if tile_size is not None:
            self._tile_size, self._ops = tile_size, backends.functions(device, backend)
            self._tiles = tile_table(elements.positions(0), tuple(layer.whole.shape), tile_size)

    def _base_values(self, elements: Segments) -> Tensor:
        with self._scratch.lock:
            self.layer.dequantise_(self._view)
            return compact(elements)

    def is_trained(self) -> bool:
        """Whether an active weight differs from the base."""
        return self.active is not None and not torch.equal(self.active, self._base_values(self.active.elements))

    @contextmanager
    def merged(self) -> Iterator[Tensor]:
        """Context manager with the weight that the layer multiplies with, valid inside only."""
        with self._scratch.lock:
            self.layer.dequantise_(self._view)
            if self.active is not None and not self.shows_base:
                self._bound.indexed_swap_(self.active.detach().clone())
            yield self._view

    # The layer

    def install(self) -> None:
        """Give the layer this overlay and its forward, in place of another optimizer's, which is untrained."""
        if self.is_installed:
            return
        module = self.layer.module
        if (previous := overlay_of(self.layer)) is not None:
            previous.remove()
        self._refusal = module.register_state_dict_pre_hook(_refuse_state_dict)
        vars(module).setdefault(_ATTRIBUTE, {})[self.layer.parameter] = self
        module.forward = types.MethodType(_eager_forward(is_linear=self.layer.is_linear), module)

    def remove(self) -> None:
        """Undo `install`."""
        assert self._refusal is not None
        self._refusal.remove()
        self._refusal = None
        module = self.layer.module
        overlays = vars(module)[_ATTRIBUTE]
        del overlays[self.layer.parameter]
        if not overlays:
            delattr(module, _ATTRIBUTE)
            del module.forward

    @property
    def is_installed(self) -> bool:
        """Whether the layer computes with this overlay."""
        return self._refusal is not None

    @property
    def was_moved(self) -> bool:
        """Whether the layer has another weight now, or on another device."""
        return self.layer.weight is not self.weight or self.weight.device != self._view.device

    @property
    def nbytes(self) -> int:
        """Bytes of the active elements' values and indices."""
        return 0 if self.active is None else self.active.nbytes + self.active.elements.index_bytes

    def require_intact(self) -> None:
        """Raise a RuntimeError if the layer no longer has the weight and the overlay that the optimizer trains."""
        if self.was_moved:
            raise RuntimeError(f"{self.layer.name!r} was moved or replaced after the optimizer was built")
        if overlay_of(self.layer) is not self:
            raise RuntimeError(f"{self.layer.name!r} is trained by another optimizer, which was built after this one")

    def output(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer's output, in the dtype of its input, as bitsandbytes' layers do."""
        self.require_intact()
        dtype = self.layer.dtype
        with _without_autocast(input.device.type):
            bias = None if bias is None else bias.to(dtype)
            output: Tensor = _QuantisedLinear.apply(input.to(dtype), self.active, bias, self)
            return output.to(input.dtype)

    def active_gradient(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Return the active elements of left^T @ right, the weight's gradient; None if the optimizer has taken them.

        Args:
            left, right: [tokens, out] and [tokens, in].
        """
        assert self.active is not None
        if self._tiles is None:
            return self.gathered(left.t() @ right)
        if self.route is not None:
            use = self.route.gradient_use()
            if use == "unused" or self.route.add_values(lambda: self._tile_values(left, right)):
                return None
        return self._tile_values(left, right).to(self.active.dtype)

    def gathered(self, dense: Tensor) -> Tensor | None:
        """Return the active elements of the weight's gradient; None if they have been taken."""
        assert self.active is not None
        values = dense.new_empty(self.active.numel())
        self._bound.masked_grad_gather_(values, [dense.contiguous()])
        return values

    def _tile_values(self, left: Tensor, right: Tensor) -> Tensor:
        assert self._tiles is not None and self.active is not None
        values = torch.zeros(self.active.numel(), dtype=torch.float32, device=left.device)
        write_tiles(self._ops, values, left, right, self._tiles, self._tile_size)
        return values

    @property
    def is_tiled(self) -> bool:
        """Whether the gradient is computed tile by tile."""
        return self._tiles is not None

    def __reduce__(self) -> Never:
        raise TypeError(
            f"{self.layer.name!r} has trained weights over a quantised base, and can't be copied or pickled; use "
            "sparse_opt.optim.save_merged"
        )


class GradientProbe(Overlay):
    """Passes the dense gradient of a quantised weight to `receive`, after each backward pass through its layer."""

    def __init__(self, layer: QuantisedWeight, scratch: Scratch, receive: Callable[[Tensor], None] | None) -> None:
        super().__init__(layer, scratch, torch.empty(0, dtype=torch.int32, device="cpu"), run_length=1)
        self.shows_base, self._receive = True, receive
        if receive is not None:  # autograd reaches the layer through a parameter without elements
            none = torch.empty(0, dtype=torch.int32, device="cpu")
            elements = Segments([self._view], none, None, [0], [0], 1)
            self.active = ActiveWeight(self._view.new_empty(0), elements, layer.whole)

    def gathered(self, dense: Tensor) -> Tensor | None:
        """Pass the gradient on."""
        assert self._receive is not None
        self._receive(dense)
        return None


@contextmanager
def probed(model: nn.Module, receive: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """Context manager inside which each weight's dense gradient is passed to its function in `receive`.

    Args:
        receive: by the names of quantised weights; the gradients of others are not computed.
    """
    layers = {id(layer.weight): layer for layer in quantised_layers.find(model).values()}
    scratches = scratches_of(model)
    probes = []
    for layer in layers.values():
        if overlay_of(layer) is not None:
            raise ValueError(f"{layer.name!r} is trained by an optimizer or has a delta: find masks before")
        probe = GradientProbe(layer, scratches[layer.name], receive.get(layer.name))
        probes.append(probe)
    try:
        for probe in probes:
            probe.install()
        yield
    finally:
        for probe in probes:
            if overlay_of(probe.layer) is probe:
                probe.remove()


class _QuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, active: Tensor | None, bias: Tensor | None, weight: Any) -> Tensor:
        # `active` is saved for its version counter: a backward pass after a step, or through base weights, raises.
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, active)
        ctx.weight = weight
        with weight.merged() as merged:
            return tile_backward.linear(input, merged, bias, None, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        input, _ = ctx.saved_tensors
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = grad_active = grad_bias = None
        with _without_autocast(grad_output.device.type):
            if ctx.needs_input_grad[0]:
                with ctx.weight.merged() as merged:
                    grad_input = (rows @ merged).view(*grad_output.shape[:-1], merged.shape[1])
            if ctx.needs_input_grad[1]:
                grad_active = ctx.weight.active_gradient(rows, input.reshape(-1, input.shape[-1]))
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0)
        return grad_input, grad_active, grad_bias, None


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _QuantisedExperts(torch.autograd.Function):
    """A module's own code with the merged weights, which the backward pass runs again."""

    @staticmethod
    def forward(ctx: Any, overlays: list[Overlay], biases: list[Tensor], *inputs: Any) -> Tensor:
        # Of `inputs`, the first ones are the active weights and the biases: for autograd, and their version counters.
        ctx.save_for_backward(*inputs)
        ctx.overlays, ctx.biases = overlays, biases
        with _merged(overlays):
            return overlays[0].layer.forward(*inputs[len(overlays) + len(biases) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        overlays, needed = ctx.overlays, ctx.needs_input_grad[2:]
        first = len(overlays) + len(ctx.biases)
        again = [tensor.detach() for tensor in ctx.saved_tensors[first:]]
        with _without_autocast(grad_output.device.type), _merged(overlays) as weights, torch.enable_grad():
            sources = [*weights, *ctx.biases, *again]
            inputs_with_grad = [tensor.requires_grad_() for tensor, need in zip(sources, needed, strict=True) if need]
            output = overlays[0].layer.forward(*again)
            found = iter(torch.autograd.grad(output, inputs_with_grad, grad_output, allow_unused=True))
        grads = [next(found) if need else None for need in needed]
        for i, overlay in enumerate(overlays):
            grads[i] = None if grads[i] is None else overlay.gathered(grads[i])
        return None, None, *grads


@contextmanager
def _merged(overlays: list[Overlay]) -> Iterator[list[Tensor]]:
    """Context manager inside which a module's code finds the merged weights in place of the quantised ones."""
    with ExitStack() as stack:
        weights = [stack.enter_context(overlay.merged()).detach() for overlay in overlays]
        for overlay, weight in zip(overlays, weights, strict=True):
            stack.enter_context(overlay.layer.shown(weight))
        yield weights


@functools.cache
def _eager_forward(*, is_linear: bool) -> Callable[..., Tensor]:
    """Return the forward of a layer with overlays, which `torch.compile` leaves to Python: its graphs break there."""

    def linear(self: nn.Module, input: Tensor) -> Tensor:
        overlay: Overlay = vars(self)[_ATTRIBUTE]["weight"]
        return overlay.output(input, self._parameters["bias"])

    def experts(self: nn.Module, tokens: Tensor, *routes: Tensor) -> Tensor:
        overlays: list[Overlay] = list(vars(self)[_ATTRIBUTE].values())
        for overlay in overlays:
            overlay.require_intact()
        biases = [param for param in self.parameters(recurse=False) if param.requires_grad]
        inputs = *(overlay.active for overlay in overlays), *biases, tokens.to(overlays[0].layer.dtype), *routes
        with _without_autocast(tokens.device.type):
            output: Tensor = _QuantisedExperts.apply(overlays, biases, *inputs)
            return output.to(tokens.dtype)

    compiled: Callable[..., Tensor] = torch.compiler.disable(linear if is_linear else experts)
    return compiled


def overlay_of(layer: QuantisedWeight) -> Overlay | None:
    """Return the weight's overlay, None if it has none."""
    found: dict[str, Overlay] = vars(layer.module).get(_ATTRIBUTE, {})
    return found.get(layer.parameter)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> Never:
    name = next(iter(vars(module)[_ATTRIBUTE]))
    raise RuntimeError(
        f"state_dict() has no place for the trained weights of {prefix + name!r}, over its quantised base: use "
        "sparse_opt.optim.save_merged(model, folder), or the state_dict of the optimizer"
    )


# Binding


def make_overlays(
    model: nn.Module | None,
    groups: list[dict[str, Any]],
    mask: MaskSet,
    *,
    grads: str,
    tile_backward: bool | None,
    backend: str | None,
) -> list[Overlay]:
    """Return an overlay of every quantised layer, and put their active weights into the parameter groups.

    Layers without active elements have one, too: a forward pass must not depend on whether grad is enabled, as that of
    bitsandbytes does.

    Raises:
        MaskError: the mask does not fit.
        ValueError: the model's quantisation is not supported; a layer is already trained, or another has its weight;
            or it has a forward that is not its class's.
    """
    if model is None:
        return []
    quantised_layers.require_supported(model)
    found = quantised_layers.find(model).values()
    layers = {id(layer.weight): layer for layer in found}
    if not layers:
        return []
    for layer in found:
        if (other := layers[id(layer.weight)]).module is not layer.module:
            raise ValueError(f"{layer.name!r} and {other.name!r} are one quantised weight of two layers")
    named = {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}
    mask = mask.resolve(whole(named, model))
    names = {id(p): name for name, p in named.items()}
    scratches = scratches_of(model)
    overlays: dict[int, Overlay] = {}
    for key, layer in layers.items():
        _require_free(layer)
        positions = mask.indices.get(names.get(key, ""), torch.empty(0, dtype=torch.int32, device="cpu"))
        size = _tile_size(mask.pattern, positions.numel() / layer.whole.numel(), grads, tile_backward)
        size = size if layer.is_linear else None
        scratch = scratches[layer.name]
        run_length = run_length_of(layer.whole.shape, mask.pattern)
        overlays[key] = Overlay(layer, scratch, positions, run_length, tile_size=size, backend=backend)
    for group in groups:
        for i, param in enumerate(group["params"]):
            if id(param) in overlays and (active := overlays[id(param)].active) is not None:
                group["params"][i] = active
    return list(overlays.values())


def whole(named: Mapping[str, Tensor], model: nn.Module | None) -> dict[str, Tensor]:
    """Return the parameters, with a tensor of the whole shape, on the meta device, for each with a quantised base."""
    layers = [] if model is None else quantised_layers.find(model).values()
    tensors = {id(layer.weight): layer.whole for layer in layers}
    return {name: p.whole if isinstance(p, ActiveWeight) else tensors.get(id(p), p) for name, p in named.items()}


def scratches_of(model: nn.Module) -> dict[str, Scratch]:
    """Return the memory for each of the model's quantised weights, by name: that of its overlays if it has some."""
    layers = quantised_layers.find(model).values()
    keys = {layer.name: _scratch_key(layer) for layer in layers}
    largest: dict[Any, int] = {}
    for layer in layers:
        largest[keys[layer.name]] = max(largest.get(keys[layer.name], 0), layer.whole.numel())
    used = _SCRATCHES.setdefault(model, WeakValueDictionary())
    made = {key: used.get(key) or Scratch(numel, key[1], key[0]) for key, numel in largest.items()}
    used.update(made)
    return {name: made[key] for name, key in keys.items()}


def _scratch_key(layer: QuantisedWeight) -> tuple[torch.device, torch.dtype, str]:
    return layer.weight.device, layer.dtype, "" if layer.is_linear else layer.parameter  # experts need all at a time


def _require_free(layer: QuantisedWeight) -> None:
    require_own_forward(layer)
    if (overlay := overlay_of(layer)) is not None and overlay.is_trained():
        raise ValueError(
            f"{layer.name!r} has been trained by another optimizer over the same quantised base, or a delta is applied "
            "to it: load the model again, or remove the delta"
        )


def require_own_forward(layer: QuantisedWeight) -> None:
    """Raise a ValueError if the layer has a forward that is neither its class's nor an overlay's."""
    if _ATTRIBUTE not in vars(layer.module) and "forward" in vars(layer.module):
        raise ValueError(
            f"the layer of {layer.name!r} has a forward that is not its class's, as device_map gives it over several "
            "devices: load the model on one device"
        )


def _tile_size(pattern: str, density: float, grads: str, tile_backward: bool | None) -> int | None:
    size = PATTERNS[pattern][0]
    if size not in TILE_SIZES or grads != "compact" or tile_backward is False:
        return None
    return size if tile_backward or density < MAX_TILED_DENSITY[size] else None


def connect(overlays: list[Overlay], receivers: list[Receiver]) -> None:
    """Install the overlays, and let the receivers of their active weights take the gradients of tiles."""
    places = {id(p): (receiver, i) for receiver in receivers for i, p in enumerate(receiver.buffer.params)}
    for overlay in overlays:
        overlay.install()
        if overlay.is_tiled:
            overlay.route = Route(*places[id(overlay.active)])


def disconnect(overlays: list[Overlay]) -> None:
    """Leave the gradients to autograd; the layers keep their overlays."""
    for overlay in overlays:
        overlay.route = None


class ShownBase:
    """The base weights of quantised layers: what is there without the active elements. It needs no memory."""

    def __init__(self, overlays: list[Overlay], shards: Mapping[Parameter, Shard]) -> None:
        self._overlays = overlays
        self.shards = [shards[overlay.active] for overlay in overlays if overlay.active is not None]

    def enter_(self) -> None:
        for overlay in self._overlays:
            overlay.shows_base = True

    def leave_(self) -> None:
        for overlay in self._overlays:
            overlay.shows_base = False


# Saving


def save_merged(model: nn.Module, folder: str | Path) -> None:
    """Write the model's weights as safetensors, each quantised layer's dequantised with its trained active weights.

    transformers and vLLM load the folder like any checkpoint that is not quantised. The names are those of the model's
    parameters, and layers' weights have the dtype in which they compute. One weight at a time is made; the host holds
    one file's tensors, at most 5 GB. The model's config and generation config are written, too, the tokenizer is not.
    Other weights in files `model*.safetensors` of the folder are removed.

    Raises:
        RuntimeError: the model holds its base weights.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)
    layers = quantised_layers.find(model)
    if shows_base(model):
        raise RuntimeError("save_merged: the model holds its base weights; leave base_weights() first")
    tensors = dict(saved_tensors(model))
    firsts = canonical_names(tensors)
    sizes = {
        name: (layers[name].whole if name in layers else tensor).nbytes
        for name, tensor in tensors.items()
        if firsts[name] == name
    }
    files = _files(sizes)
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        content = {name: _on_host(layers[name]) if name in layers else tensors[name].detach().cpu() for name in names}
        with written_aside(folder / file) as aside:
            save_file({n: t.contiguous() for n, t in content.items()}, aside, metadata={"format": "pt"})
        del content
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        with written_aside(folder / _INDEX) as aside:
            aside.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for path in folder.glob("model*.safetensors*"):  # transformers would load them
        if path.name not in files and not (len(files) > 1 and path.name == _INDEX):
            path.unlink()
    if (config := getattr(model, "config", None)) is not None:
        config = copy.deepcopy(config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.save_pretrained(folder)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(folder)


@torch.no_grad()
def load_plain_(model: nn.Module, folder: str | Path) -> None:
    """Copy the weights of a folder that `save_merged` wrote into the model, except those that are quantised in it."""
    layers = quantised_layers.find(model)
    tensors = {name: tensor for name, tensor in saved_tensors(model) if name not in layers}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        with open_tensors(path) as file:
            for name in file.names:
                if name in tensors:
                    tensors[name].copy_(file.read(name))


def _files(sizes: dict[str, int]) -> dict[str, list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


def shows_base(model: nn.Module) -> bool:
    """Whether the model, quantised or not, is inside of `base_weights()`."""
    overlays = (overlay_of(layer) for layer in quantised_layers.find(model).values())
    shown = any(overlay is not None and overlay.shows_base for overlay in overlays)
    return shown or holds_base_weights(model.parameters())


@torch.no_grad()
def current_weight(layer: QuantisedWeight) -> Tensor:
    """Return the weight that the layer multiplies with: [out, in], in new memory."""
    overlay = overlay_of(layer)
    if overlay is None:
        return layer.dequantised()
    with overlay.merged() as merged:
        weight: Tensor = merged.clone()
        return weight


@torch.no_grad()
def _on_host(layer: QuantisedWeight) -> Tensor:
    overlay = overlay_of(layer)
    if overlay is None:
        return layer.dequantised().cpu()
    with overlay.merged() as merged:
        return merged.to("cpu", copy=True)
