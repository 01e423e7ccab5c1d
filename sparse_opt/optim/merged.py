"""Writes a model with a quantised base and trained active weights as an ordinary checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import quantised_layers
from ..files import written_aside
from ..tensor_file import open_tensors
from ..tensors import canonical_names, holds_base_weights
from .quantised import overlay_of

_SHARD_BYTES = 5 * 10**9


def save_merged(model: nn.Module, folder: str | Path) -> None:
    """Write the model's weights as safetensors, each quantised layer's dequantised with its trained active weights.

    transformers and vLLM load the folder like any checkpoint that is not quantised. The names are those of the model's
    parameters, and layers' weights have the dtype in which they compute. One weight at a time is made; the host holds
    one file's tensors, at most 5 GB. The model's config and generation config are written, too, the tokenizer is not.

    Raises:
        RuntimeError: the model holds its base weights.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)
    layers = quantised_layers.find(model)
    shown = [overlay for layer in layers.values() if (overlay := overlay_of(layer.module)) is not None]
    if any(overlay.shows_base for overlay in shown) or holds_base_weights(model.parameters()):
        raise RuntimeError("save_merged: the model holds its base weights; leave base_weights() first")
    tensors = dict(_tensors(model))
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
        with written_aside(folder / "model.safetensors.index.json") as aside:
            aside.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
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
    tensors = {name: tensor for name, tensor in _tensors(model) if name not in layers}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        with open_tensors(path) as file:
            for name in file.names:
                if name in tensors:
                    tensors[name].copy_(file.read(name))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the persistent buffers, under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


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


@torch.no_grad()
def _on_host(layer: quantised_layers.QuantisedLinear) -> Tensor:
    overlay = overlay_of(layer.module)
    if overlay is None:
        return layer.dequantised().cpu()
    with overlay.merged() as merged:
        return merged.to("cpu", copy=True)
