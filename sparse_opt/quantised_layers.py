"""Linear layers whose weights bitsandbytes has quantised: `Linear4bit` and `Linear8bitLt`.

The names and shapes of their weights are those of the dequantised weight everywhere in this package: a mask of the
model before it was quantised fits it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED = "bitsandbytes Linear4bit and Linear8bitLt"


@dataclass(frozen=True, eq=False)
class QuantisedLinear:
    """A linear layer with a quantised weight.

    Attributes:
        name: of its weight in the model.
        dtype: of the dequantised weight, in which the layer computes.
        whole: [out, in] of `dtype` on the meta device; for code that needs the weight's shape and dtype alone.
    """

    module: Any
    name: str
    dtype: torch.dtype
    whole: Tensor

    @property
    def weight(self) -> Tensor:
        """The quantised weight."""
        weight: Tensor = self.module._parameters["weight"]
        return weight

    def dequantise_(self, out: Tensor) -> Tensor:
        """Write the weight to `out`, contiguous [out, in] of `dtype`, and return it."""
        bitsandbytes = sys.modules["bitsandbytes"]
        data = self.weight.detach()
        if self.is_4bit:
            state = self._state()
            # bitsandbytes writes to a given tensor on GPUs alone.
            if state.dtype == out.dtype and out.is_cuda:
                bitsandbytes.functional.dequantize_4bit(data, state, out=out)
            else:
                out.copy_(bitsandbytes.functional.dequantize_4bit(data, state))
            return out
        return torch.mul(data, self._scales().view(-1, 1) * (1 / 127), out=out)  # multiplied in fp32, rounded once

    def _state(self) -> Any:
        state = self.weight.quant_state  # type: ignore[attr-defined]
        if getattr(state, "packing_format_for_cpu", False):
            raise RuntimeError(
                f"{self.name!r} is packed for inference on this CPU, by a forward in evaluation mode: build the "
                "optimizer, or apply the delta, before it"
            )
        return state

    def _scales(self) -> Tensor:
        weight: Any = self.weight
        scales: Tensor = weight.SCB if weight.SCB is not None else self.module.state.SCB
        return scales

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint of bitsandbytes has for the weight, by their names within the layer."""
        data = {"weight": self.weight.detach()}
        if not self.is_4bit:
            return data | {"SCB": self._scales()}
        return data | {f"weight.{key}": tensor for key, tensor in self._state().as_dict(packed=True).items()}

    @property
    def is_4bit(self) -> bool:
        """Whether the layer is a `Linear4bit`."""
        return isinstance(self.module, sys.modules["bitsandbytes"].nn.Linear4bit)

    def dequantised(self) -> Tensor:
        """Return the weight: [out, in] of `dtype`."""
        return self.dequantise_(torch.empty_like(self.whole, device=self.weight.device))


def find(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers by the names of their weights, every name of a layer that has several.

    Raises:
        ValueError: a layer is not quantised yet, or is sharded.
    """
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return {}
    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    made: dict[nn.Module, QuantisedLinear] = {}
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds):
            name = f"{path}.weight" if path else "weight"
            if module not in made and (layer := _layer(model, module, name)) is not None:
                made[module] = layer
            if module in made:
                found[name] = made[module]
    return found


def _layer(model: nn.Module, module: Any, name: str) -> QuantisedLinear | None:
    weight = module._parameters["weight"]
    if hasattr(type(weight), "__tensor_flatten__"):
        raise ValueError(f"{name!r} is a {type(weight).__name__}: a quantised base can't be sharded by fully_shard")
    dtype: torch.dtype | None = None
    if hasattr(module, "compute_dtype"):
        if (state := getattr(weight, "quant_state", None)) is not None:
            dtype = module.compute_dtype or state.dtype
    elif module.state.has_fp16_weights:  # it quantises a weight that it trains in 16 bits
        return None
    elif weight.dtype == torch.int8:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.bfloat16)
    if dtype is None:
        raise ValueError(f"{name!r} is not quantised yet: move the model to its device first, as bitsandbytes requires")
    shape = (module.out_features, module.in_features)
    return QuantisedLinear(module, name, dtype, torch.empty(shape, dtype=dtype, device="meta"))


def require_supported(model: nn.Module) -> None:
    """Raise a ValueError that names the method by which transformers has quantised a model, if it is another one."""
    method = getattr(model, "quantization_method", None)
    method = getattr(method, "value", method)
    if getattr(model, "is_quantized", False) and method not in (None, "bitsandbytes"):
        raise ValueError(
            f"the model is quantised by {method!r}, expected {SUPPORTED}: load it with "
            "quantization_config=BitsAndBytesConfig(...), or dequantised"
        )
