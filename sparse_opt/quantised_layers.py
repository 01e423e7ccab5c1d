"""Weights that a library has quantised, and how each format is recognised and dequantised: `FORMATS`.

The names and shapes of the weights are those of the dequantised weight everywhere in this package: a mask of the model
before it was quantised fits it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED = (
    "bitsandbytes, torchao (Int8WeightOnlyConfig, Float8WeightOnlyConfig, IntxWeightOnlyConfig) and transformers' fp8"
)
_METHODS = (None, "bitsandbytes", "torchao", "fp8")  # of transformers


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight that is quantised, of a linear layer or of a module with 3-D weights of several experts.

    Attributes:
        parameter: its name in the module.
        name: its name in the model.
        dtype: of the dequantised weight, in which the layer computes.
        whole: [out, in] or [experts, ...] of `dtype` on the meta device; for code that needs shape and dtype alone.
    """

    module: Any
    parameter: str
    name: str
    dtype: torch.dtype
    whole: Tensor
    format: Format

    @property
    def weight(self) -> Tensor:
        """The quantised weight."""
        path, _, name = self.format.stored_name(self.parameter).rpartition(".")
        weight: Tensor = self.module.get_submodule(path)._parameters[name]
        return weight

    @property
    def is_linear(self) -> bool:
        """Whether the module computes `input @ weight.T + bias`."""
        return isinstance(self.module, nn.Linear)

    def dequantise_(self, out: Tensor) -> Tensor:
        """Write the weight to `out`, contiguous and of `whole`'s shape and dtype, and return it."""
        self.format.dequantise_(self, out)
        return out

    def dequantised(self) -> Tensor:
        """Return the weight in new memory."""
        return self.dequantise_(torch.empty_like(self.whole, device=self.weight.device))

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint has for the weight, by their names within the module."""
        return self.format.stored(self)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute the output of a module with 3-D weights, of which dequantised ones are `shown`."""
        return self.format.forward(self.module)(self.module, *inputs)

    def shown(self, weight: Tensor) -> AbstractContextManager[None]:
        """Context manager inside which the module's code finds this tensor in place of the quantised weight."""
        return self.format.shown(self, weight)


# Formats


class Format:
    """How a library stores weights. A format is added here, and to `FORMATS`.

    Attributes:
        library: a module of the library; none of its weights exists before that is imported.
    """

    library: str

    def weights(self, module: nn.Module, path: str) -> dict[str, tuple[int, ...]]:
        """Return the name within the module, and the shape, of each weight that the module has in this format.

        Raises:
            ValueError: the module has a weight in a form of this format that can't be dequantised; names it.
        """
        raise NotImplementedError

    def dtype(self, module: Any, parameter: str, default: torch.dtype) -> torch.dtype:
        """Return the dtype in which the layer computes; `default` is the model's."""
        return default

    def stored_name(self, parameter: str) -> str:
        """Return the name of the quantised parameter within the module."""
        return parameter

    def dequantise_(self, layer: QuantisedWeight, out: Tensor) -> None:
        """See `QuantisedWeight`."""
        raise NotImplementedError

    @contextmanager
    def shown(self, layer: QuantisedWeight, weight: Tensor) -> Iterator[None]:
        """See `QuantisedWeight`."""
        vars(layer.module)[layer.parameter] = weight  # found before `_parameters`
        try:
            yield
        finally:
            del vars(layer.module)[layer.parameter]

    def forward(self, module: Any) -> Callable[..., Tensor]:
        """Return the function that a module with 3-D weights computes, if they are dequantised; it takes the module."""
        raise NotImplementedError

    def stored(self, layer: QuantisedWeight) -> dict[str, Tensor]:
        """See `QuantisedWeight`."""
        raise NotImplementedError

    def scales(self, module: nn.Module) -> list[str]:
        """Return the names of those of the module's parameters that are scales of its quantised weights."""
        return []


class _Linear8bit(Format):
    """`Linear8bitLt` of bitsandbytes: int8, and the largest magnitude of each row."""

    library = "bitsandbytes"

    def weights(self, module: Any, path: str) -> dict[str, tuple[int, ...]]:
        if not isinstance(module, sys.modules[self.library].nn.Linear8bitLt):
            return {}
        if module.state.has_fp16_weights:  # it quantises a weight that it trains in 16 bits
            return {}
        _require_whole(module.weight, path)
        if module.weight.dtype != torch.int8:
            raise _not_quantised_yet(path)
        return {"weight": (module.out_features, module.in_features)}

    def dequantise_(self, layer: QuantisedWeight, out: Tensor) -> None:
        scales = self._scales(layer).view(-1, 1) * (1 / 127)
        torch.mul(layer.weight.detach(), scales, out=out)  # multiplied in fp32, rounded once

    def stored(self, layer: QuantisedWeight) -> dict[str, Tensor]:
        return {"weight": layer.weight.detach(), "SCB": self._scales(layer)}

    @staticmethod
    def _scales(layer: QuantisedWeight) -> Tensor:
        weight: Any = layer.weight
        scales: Tensor = weight.SCB if weight.SCB is not None else layer.module.state.SCB
        return scales


class _Linear4bit(Format):
    """`Linear4bit` of bitsandbytes: NF4 or FP4 in blocks, with scales that may be quantised too."""

    library = "bitsandbytes"

    def weights(self, module: Any, path: str) -> dict[str, tuple[int, ...]]:
        if not isinstance(module, sys.modules[self.library].nn.Linear4bit):
            return {}
        _require_whole(module.weight, path)
        if getattr(module.weight, "quant_state", None) is None:
            raise _not_quantised_yet(path)
        return {"weight": (module.out_features, module.in_features)}

    def dtype(self, module: Any, parameter: str, default: torch.dtype) -> torch.dtype:
        dtype: torch.dtype = module.compute_dtype or module.weight.quant_state.dtype
        return dtype

    def state(self, module: Any, parameter: str) -> Any:
        """Return bitsandbytes' `QuantState` of the weight."""
        return module.weight.quant_state

    def dequantise_(self, layer: QuantisedWeight, out: Tensor) -> None:
        dequantize = sys.modules["bitsandbytes"].functional.dequantize_4bit
        data, state = layer.weight.detach(), self._unpacked_state(layer)
        if state.dtype == out.dtype and out.is_cuda:  # bitsandbytes writes to a given tensor on GPUs alone
            dequantize(data, state, out=out)
        else:
            out.copy_(dequantize(data, state))

    def stored(self, layer: QuantisedWeight) -> dict[str, Tensor]:
        tensors = self._unpacked_state(layer).as_dict(packed=True)
        data = {layer.parameter: layer.weight.detach()}
        return data | {f"{layer.parameter}.{key}": tensor for key, tensor in tensors.items()}

    def _unpacked_state(self, layer: QuantisedWeight) -> Any:
        state = self.state(layer.module, layer.parameter)
        if getattr(state, "packing_format_for_cpu", False):
            raise RuntimeError(
                f"{layer.name!r} is packed for inference on this CPU, by a forward in evaluation mode: build the "
                "optimizer, or apply the delta, before it"
            )
        return state


class _Parameter4bit(_Linear4bit):
    """3-D weights of experts that bitsandbytes' `replace_parameter_4bit` has quantised, as parametrizations."""

    library = "bitsandbytes.nn.parametrize"

    def weights(self, module: Any, path: str) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, made in getattr(module, "parametrizations", {}).items():
            if not isinstance(made[0], sys.modules[self.library].Bnb4bitParametrization):
                continue
            _require_whole(made.original, path, name)
            shape: tuple[int, ...] = tuple(made[0].quant_state.shape)
            if len(made) > 1 or len(shape) != 3:
                raise ValueError(
                    f"{_join(path, name)!r} has the shape {list(shape)} and {len(made)} parametrizations, expected the "
                    "3-D weight of several experts with one: replace_parameter_4bit is not for other weights"
                )
            found[name] = shape
        return found

    def dtype(self, module: Any, parameter: str, default: torch.dtype) -> torch.dtype:
        dtype: torch.dtype = self.state(module, parameter).dtype
        return dtype

    def state(self, module: Any, parameter: str) -> Any:
        return module.parametrizations[parameter][0].quant_state

    def stored_name(self, parameter: str) -> str:
        return f"parametrizations.{parameter}.original"

    @contextmanager
    def shown(self, layer: QuantisedWeight, weight: Tensor) -> Iterator[None]:
        made = layer.module.parametrizations[layer.parameter]
        made.forward = lambda: weight
        try:
            yield
        finally:
            del made.forward

    def forward(self, module: Any) -> Callable[..., Tensor]:
        forward: Callable[..., Tensor] = type(module).forward
        return forward


class _Torchao(Format):
    """Weights of `nn.Linear` that are tensors of torchao: int8 and fp8, and 1 to 8 bits unpacked to int8.

    Of its other tensors, those of packed 4 bits, torchao has no function that dequantises.
    """

    library = "torchao.utils"
    _TYPES = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")

    def weights(self, module: nn.Module, path: str) -> dict[str, tuple[int, ...]]:
        base, found = sys.modules[self.library].TorchAOBaseTensor, {}
        for name, param in module._parameters.items():
            if param is None or not isinstance(getattr(param, "_local_tensor", param), base):
                continue
            _require_whole(param, path, name)
            kind = type(param).__name__
            if kind not in self._TYPES or not isinstance(module, nn.Linear) or name != "weight":
                raise ValueError(
                    f"{_join(path, name)!r} of a {type(module).__name__} is a torchao {kind}, expected "
                    f"{', '.join(self._TYPES)} of an nn.Linear: quantise the linear layers alone, with "
                    "Int8WeightOnlyConfig, Float8WeightOnlyConfig or IntxWeightOnlyConfig"
                )
            if getattr(param, "act_pre_scale", None) is not None:
                raise ValueError(f"{_join(path, name)!r} has act_pre_scale, expected none: quantise it without AWQ")
            found[name] = tuple(param.shape)
        return found

    def dtype(self, module: Any, parameter: str, default: torch.dtype) -> torch.dtype:
        dtype: torch.dtype = module.weight.dtype
        return dtype

    def dequantise_(self, layer: QuantisedWeight, out: Tensor) -> None:
        out.copy_(layer.weight.dequantize())

    def stored(self, layer: QuantisedWeight) -> dict[str, Tensor]:
        weight: Any = layer.weight
        return {f"_weight_{name}": getattr(weight, name).detach() for name in weight.__tensor_flatten__()[0]}


class _Fp8(Format):
    """`FP8Linear` and `FP8Experts` of transformers: blocks of float8, with one scale in fp32 or a power of two each."""

    library = "transformers.integrations.finegrained_fp8"

    def weights(self, module: Any, path: str) -> dict[str, tuple[int, ...]]:
        if (kind := type(module).__name__) in ("FP8GroupedLinear", "FP8Embedding"):
            raise ValueError(
                f"{_join(path, 'weight')!r} is of a {kind}, expected an FP8Linear: load the model with "
                "FineGrainedFP8Config(dequantize=True)"
            )
        fp8 = sys.modules[self.library]
        if isinstance(module, fp8.FP8Linear):
            names = ["weight"]
        elif isinstance(module, fp8.FP8Experts):
            names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
        else:
            return {}
        found = {}
        for name in names:
            param = module._parameters[name]
            _require_whole(param, path, name)
            if param.dtype == torch.int8:
                raise ValueError(
                    f"{_join(path, name)!r} has experts of 4 bits, expected float8: load the model with "
                    "FineGrainedFP8Config(dequantize=True)"
                )
            if param.element_size() == 1:  # 2 where a shape is no multiple of the block's
                found[name] = tuple(param.shape)
        return found

    def scales(self, module: nn.Module) -> list[str]:
        fp8 = sys.modules[self.library]
        if not isinstance(module, (fp8.FP8Linear, fp8.FP8Experts)):
            return []
        return [name for name in module._parameters if name.endswith(("_scale_inv", "activation_scale"))]

    def forward(self, module: Any) -> Callable[..., Tensor]:
        experts = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
        name = module.config._experts_implementation
        name = name if name in ("eager", "batched_mm") else "grouped_mm"  # others have no backward pass, or need float8
        forward: Callable[..., Tensor] = experts.get_interface(name, inspect.unwrap(type(module).forward))
        return forward

    def stored(self, layer: QuantisedWeight) -> dict[str, Tensor]:
        names = layer.parameter, f"{layer.parameter}_scale_inv"
        return {name: layer.module._parameters[name].detach() for name in names}

    def dequantise_(self, layer: QuantisedWeight, out: Tensor) -> None:
        scales = layer.module._parameters[f"{layer.parameter}_scale_inv"].detach().float()
        scales = scales.view(1, 1) if scales.ndim == 0 else scales
        n_rows, n_columns = out.shape[-2:]
        rows, columns = layer.module.block_size or (n_rows // scales.shape[-2], n_columns // scales.shape[-1])
        scales = scales.repeat_interleave(rows, dim=-2)[..., :n_rows, :]
        n_blocks = n_columns // columns
        # Without a copy of the weight's size: float8 is exact in `out`, and products are made in fp32 and rounded once.
        out.copy_(layer.weight.detach())
        blocks, rest = out[..., : n_blocks * columns], out[..., n_blocks * columns :]
        blocks.unflatten(-1, (n_blocks, columns)).mul_(scales[..., :n_blocks, None])
        rest.mul_(scales[..., n_blocks : n_blocks + 1])


FORMATS: tuple[Format, ...] = (_Linear4bit(), _Linear8bit(), _Parameter4bit(), _Torchao(), _Fp8())


def _formats() -> list[Format]:
    return [format for format in FORMATS if format.library in sys.modules]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _not_quantised_yet(path: str) -> ValueError:
    name = _join(path, "weight")
    return ValueError(f"{name!r} is not quantised yet: move the model to its device first, as bitsandbytes requires")


def _require_whole(weight: Tensor, path: str, name: str = "weight") -> None:
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(weight, distributed.DTensor):
        raise ValueError(f"{_join(path, name)!r} is a DTensor: a quantised base can't be sharded by fully_shard")


# In a model


def find(model: nn.Module) -> dict[str, QuantisedWeight]:
    """Return the quantised weights by their names, every name of a layer that has several.

    Raises:
        ValueError: a weight is not quantised yet, is sharded, or in a form that can't be dequantised.
    """
    made: dict[nn.Module, list[QuantisedWeight]] = {}
    found: dict[str, QuantisedWeight] = {}
    default: torch.dtype | None = None
    if not (formats := _formats()):
        return found
    for path, module in model.named_modules(remove_duplicate=False):
        if module not in made:
            made[module] = []
            for format in formats:
                for name, shape in format.weights(module, path).items():
                    default = default or _dtype_of(model, formats)
                    dtype = format.dtype(module, name, default)
                    whole = torch.empty(shape, dtype=dtype, device="meta")
                    layer = QuantisedWeight(module, name, _join(path, name), dtype, whole, format)
                    made[module].append(layer)
        found.update({_join(path, layer.parameter): layer for layer in made[module]})
    return found


def _dtype_of(model: nn.Module, formats: list[Format]) -> torch.dtype:
    """Return the dtype of the model's first parameter that is not quantised."""
    for module in model.modules():
        if not any(format.weights(module, "") for format in formats):
            for param in module._parameters.values():
                if param is not None and param.dtype in (torch.bfloat16, torch.float16, torch.float32):
                    return param.dtype
    return torch.bfloat16


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what `model.named_parameters` does, but scales, with the name that a weight had before it was quantised."""
    layers, formats = {id(layer.weight): layer for layer in find(model).values()}, _formats()
    scales = {
        _join(path, name)
        for path, module in (model.named_modules(remove_duplicate=False) if layers else ())
        for format in formats
        for name in format.scales(module)
    }
    for name, param in model.named_parameters(remove_duplicate=remove_duplicate):
        if (layer := layers.get(id(param))) is not None:
            name = name.removesuffix(layer.format.stored_name(layer.parameter)) + layer.parameter
        if name not in scales:
            yield name, param


def require_supported(model: nn.Module) -> None:
    """Raise a ValueError that names the method by which transformers has quantised a model, if it is another one."""
    method = getattr(model, "quantization_method", None)
    method = getattr(method, "value", method)
    if getattr(model, "is_quantized", False) and method not in _METHODS:
        raise ValueError(
            f"the model is quantised by {method!r}, expected {SUPPORTED}: load it with "
            "quantization_config=BitsAndBytesConfig(...), or dequantised"
        )
