"""Other packages: 8-bit AdamW and GaLore, full training with less memory; QLoRA and SHiRA, adapters."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparse_opt.trainers.models import add_lora

# The packages of each mode, and the extra of this package that installs them.
_PACKAGES = {
    "adamw8bit": {"bitsandbytes": "peers"},
    "galore": {"galore_torch": "peers", "bitsandbytes": "peers"},  # galore_torch imports bitsandbytes
    "lora": {"peft": "bench"},
    "qlora": {"peft": "bench", "bitsandbytes": "peers"},
    "shira": {"peft": "bench"},
    "trl": {"trl": "integrations"},  # which is no mode, but an algorithm
}
# The example of GaLore's README (https://github.com/jiaweizzhao/GaLore). Its scripts pre-train 1 B weights with rank
# 512, and 7 B with rank 1024.
GALORE_RANK = 128
_GALORE = {"rank": GALORE_RANK, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}


def missing_package(modes: Sequence[str]) -> str:
    """The error of the first of these modes whose package is not installed; empty if there is none."""
    for mode in modes:
        for package, extra in _PACKAGES.get(mode, {}).items():
            if importlib.util.find_spec(package) is None:
                return f"{mode} needs {package}, which is not installed: pip install 'sparse-opt[{extra}]'"
    return ""


def adamw8bit(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW: two moments of 8 bits per weight, also of the embedding, and fp32 scales of their blocks."""
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=learning_rate)


def galore(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """GaLore's AdamW (https://arxiv.org/abs/2403.03507): moments of gradients that are projected to a low rank.

    As in its scripts, the gradients of the linear layers of attention and MLP are projected, with new projections every
    200 steps; the other weights have full moments. Moments and projections are bf16, as the gradients are.
    """
    from galore_torch import GaLoreAdamW

    layers = [module for name, module in model.named_modules() if "attn" in name or "mlp" in name]
    projected = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    ids = {id(weight) for weight in projected}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    groups = [{"params": others}, {"params": projected, **_GALORE}]
    return GaLoreAdamW(groups, lr=learning_rate, no_deprecation_warning=True)


def quantize_linear_layers(model: nn.Module, output: nn.Module | None = None) -> None:
    """Replace the linear layers, except `output`, by bitsandbytes' 4-bit layers: NF4, double quantization.

    They multiply in the dtype of the model. Other weights stay as they are: norms are not cast to fp32, as
    `peft.prepare_model_for_kbit_training` would do.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if not isinstance(layer, nn.Linear) or layer is output:
                continue
            weight = layer.weight
            quantized = Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=weight.dtype, device="meta"
            )
            quantized.bias = layer.bias
            quantized.weight = Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=quantized)
            setattr(parent, name, quantized.to(weight.device))  # here it is quantized
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the bf16 weights are not part of the reserved memory that is measured


def add_lora_to_quantized(model: Any, rank: int) -> Any:
    """QLoRA (https://arxiv.org/abs/2305.14314): add bf16 adapters to a model that `quantize_linear_layers` has
    quantized."""
    dtype = model.dtype
    model.is_loaded_in_4bit = True  # where peft looks to choose its layer
    adapted = add_lora(model, rank)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def add_shira(model: Any, rank: int, seed: int) -> Any:
    """Sparse high-rank adapters (SHiRA, https://arxiv.org/abs/2406.13175) on the layers of `add_lora`.

    Each adapted weight of m x n has rank * (m + n) bf16 values at random positions, drawn by PEFT on the CPU with the
    same seed for every layer. They are added to `model` itself, and initially change nothing.

    Returns:
        The model in a PEFT wrapper, whose `disable_adapter()` restores the initial weights.
    """
    from peft import ShiraConfig, get_peft_model

    config = ShiraConfig(r=rank, target_modules="all-linear", random_seed=seed, task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)
