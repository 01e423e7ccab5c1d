"""PEFT's adapters and deltas: the change that adapters make when PEFT merges them, and a change as a SHiRA adapter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DeltaError, DeltaLogError
from ..tensors import as_bits
from .state import StateLayout, TensorSpec, read_state

_SHORT = (torch.bfloat16, torch.float16)


def merged_tensors(adapted: Any) -> tuple[StateLayout, Callable[[TensorSpec], tuple[Tensor, Tensor]], dict[str, str]]:
    """Return the base's layout, a function that returns (base, merged) of one of its tensors, and metadata.

    The function merges the active adapters of one layer, and restores the bits of the layer.

    Raises:
        DeltaError: an adapter is merged already, or saves whole modules; names the layer.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    model = adapted.get_base_model()
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise DeltaError(f"{name} is saved whole by the adapter (modules_to_save): merge it by PEFT, and compare")
        if isinstance(module, BaseTunerLayer):
            layers[name] = module
            if module.merged:
                raise DeltaError(f"the adapter of {name} is merged already: call unmerge_adapter first")
    tensors: dict[str, Tensor] = {}
    owners: dict[str, list[Any]] = {}  # the adapted layers around a tensor, innermost first
    for key, tensor in model.state_dict(keep_vars=True).items():
        words = key.split(".")
        around = [i for i in range(1, len(words)) if ".".join(words[:i]) in layers]
        if all(words[i] == "base_layer" for i in around):  # others are the adapter's own
            plain = ".".join(word for i, word in enumerate(words) if i not in around)
            tensors[plain] = tensor
            owners[plain] = [layers[".".join(words[:i])] for i in reversed(around)]

    def read(spec: TensorSpec) -> tuple[Tensor, Tensor]:
        tensor, around = tensors[spec.name], owners[spec.name]
        if not around:
            return tensor, tensor
        held = {p: p.detach().clone() for p in around[0].get_base_layer().parameters()}
        try:
            for layer in around:
                layer.merge()
            return held[tensor], tensor.detach().clone()
        finally:
            for layer in reversed(around):
                layer.unmerge()
            for p, old in held.items():
                p.data.copy_(old)

    try:
        layout, _ = read_state(tensors)
    except DeltaLogError as error:
        raise DeltaError(f"the base of the adapter: {error}") from error
    config = adapted.peft_config[adapted.active_adapter]
    metadata = {"base_model": config.base_model_name_or_path, "base_revision": config.revision}
    return layout, read, {key: str(value) for key, value in metadata.items() if value}


@torch.no_grad()
def shira_of(changed: Iterable[tuple[str, Tensor, Tensor]], model: nn.Module, adapter_name: str) -> Any:
    """Return `model` with the changes, (name, base, trained), as a SHiRA adapter.

    All layers of a SHiRA adapter have one rank r and r (in + out) values: a layer that changed less gets additional
    positions whose change is 0.

    Raises:
        DeltaError: SHiRA cannot express a change; names the tensor.
    """
    from peft import ShiraConfig, get_peft_model

    modules = dict(model.named_modules())
    values: dict[nn.Linear, tuple[Tensor, Tensor]] = {}  # positions, and what is added there
    names: list[str] = []
    for name, old, new in changed:
        module_name, _, kind = name.rpartition(".")
        layer = modules[module_name]
        if not isinstance(layer, nn.Linear) or kind != "weight":
            raise DeltaError(f"{name} changed: a SHiRA adapter has weights of nn.Linear alone")
        positions = (as_bits(old) != as_bits(new)).nonzero().view(-1)
        before, after = (tensor.view(-1)[positions] for tensor in (old, new))
        change = after.float() - before.float()
        merged = (before.float() + change).to(new.dtype)
        exact = merged == after if new.dtype in _SHORT else merged.isfinite() & (new.dtype == torch.float32)
        if not bool(exact.all()):
            place = int(positions[~exact][0])
            raise DeltaError(f"{name}: the change at {place} is not an fp32 difference, as SHiRA's are")
        values[layer] = positions, change
        names.append(module_name)
    if not values:
        raise DeltaError("nothing changed, and a SHiRA adapter has one layer or more")
    rank = max(-(-len(positions) // sum(layer.weight.shape)) for layer, (positions, _) in values.items())
    for name, layer in zip(names, values, strict=True):
        if rank * sum(layer.weight.shape) > layer.weight.numel():
            raise DeltaError(f"{name}.weight: rank {rank}, which the change needs, has more values than the weight")

    def mask(layer: nn.Linear, r: int, **_: object) -> Tensor:
        chosen = torch.zeros(layer.weight.numel(), dtype=torch.bool, device=layer.weight.device)
        chosen[values[layer][0]] = True
        more = r * sum(layer.weight.shape) - int(chosen.sum())
        chosen[(~chosen).nonzero().view(-1)[:more]] = True
        return chosen.view(layer.weight.shape)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*mask")  # its name is not one of PEFT's own masks
        options: dict[str, Any] = {"mask_type": "sparse-opt", "target_modules": "|".join(map(re.escape, names))}
        config = ShiraConfig(r=rank, **options)
        config.mask_fn = mask
        any_model: Any = model  # PEFT takes any module, and declares a PreTrainedModel
        adapted: Any = get_peft_model(any_model, config, adapter_name=adapter_name)
    for layer in adapted.modules():
        if adapter_name in getattr(layer, "shira_indices", {}):
            base = layer.get_base_layer()
            positions, change = values[base]
            dense = torch.zeros(base.weight.numel(), dtype=torch.float32, device=base.weight.device)
            dense[positions] = change
            rows, columns = layer.shira_indices[adapter_name].long()
            layer.shira_weight[adapter_name].copy_(dense[rows * base.in_features + columns])
    return adapted
