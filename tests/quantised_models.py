"""Models in the formats that a base may be quantised in, and the library's own dequantisation of their weights."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

_4BIT = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
_BITSANDBYTES = {
    "nf4": {**_4BIT, "bnb_4bit_quant_type": "nf4"},
    "nf4_double": {**_4BIT, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4_bf16_storage": {**_4BIT, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "fp4": {**_4BIT, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
_TORCHAO = {
    "torchao_int8": ("Int8WeightOnlyConfig", {}),
    "torchao_fp8": ("Float8WeightOnlyConfig", {}),
    "torchao_int4": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),  # in groups of a row
}
BASES = (*_BITSANDBYTES, *_TORCHAO, "fp8")


def config_of(base):
    """The config of transformers that makes a base."""
    if base in _BITSANDBYTES:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'sparse-opt[test]'")
        return transformers.BitsAndBytesConfig(**_BITSANDBYTES[base])
    if base == "fp8":  # blocks that divide the layers' shapes, as transformers' quantiser requires
        return transformers.FineGrainedFP8Config(weight_block_size=(8, 8), modules_to_not_convert=["lm_head", "gate"])
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install 'sparse-opt[test]'")
    name, options = _TORCHAO[base]
    if base == "torchao_int4":
        options = {**options, "granularity": quantization.PerGroup(8)}
    return transformers.TorchAoConfig(getattr(quantization, name)(**options))


def load(folder, base, device, config=None):
    """The checkpoint as transformers quantises it, in bf16 and in training mode; base None: not quantised."""
    plain = {"pretrained_model_name_or_path": folder, "dtype": torch.bfloat16}
    if base is None:
        return transformers.AutoModelForCausalLM.from_pretrained(**plain).to(device).train()
    config = config or config_of(base)
    if base == "fp8" and device.type == "cpu":
        return _with_fp8(transformers.AutoModelForCausalLM.from_pretrained(**plain), config).train()
    device_map = {"": 0 if device.type == "cuda" else "cpu"}
    options = {"quantization_config": config, "device_map": device_map}
    return transformers.AutoModelForCausalLM.from_pretrained(**plain, **options).train()


def _with_fp8(model, config):
    """What `from_pretrained` makes on a GPU; without one it would dequantise."""
    from transformers.integrations import finegrained_fp8
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    if isinstance(config, dict):
        config = transformers.FineGrainedFP8Config(**{k: v for k, v in config.items() if k != "quant_method"})
    quantize = finegrained_fp8.Fp8Quantize(FineGrainedFP8HfQuantizer(config, pre_quantized=False))
    weights = dict(model.named_parameters())
    finegrained_fp8.replace_with_fp8_linear(model, config.modules_to_not_convert, config)
    for path, module in model.named_modules():
        if isinstance(module, (finegrained_fp8.FP8Linear, finegrained_fp8.FP8Experts)):
            for name in [name for name in module._parameters if f"{path}.{name}" in weights]:
                made = quantize.convert({name: weights[f"{path}.{name}"].detach()})
                module._parameters.update({key: nn.Parameter(t, requires_grad=False) for key, t in made.items()})
    model.is_quantized, model.quantization_method = True, "fp8"
    model.config.quantization_config = config
    return model


def batch(device, seed=0, vocabulary=97):
    return torch.randint(vocabulary, (2, 24), generator=torch.Generator().manual_seed(seed)).to(device)


def quantised(model):
    """Name -> module, of the layers that are quantised in all bases."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def stored(model):
    """Name -> tensor, as `save_pretrained` writes them."""
    state = model.state_dict()
    if any(hasattr(tensor, "qdata") for tensor in state.values()):
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        state, _ = flatten_tensor_state_dict(state)
    return {name: tensor.clone() for name, tensor in state.items()}


def experts(folder, base, device):
    """A mixture of experts whose 3-D weights are quantised: by bitsandbytes (nf4), or by transformers (fp8)."""
    if base == "fp8":
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return _with_fp8(plain, config_of(base)).to(device).train()
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize", reason="needs bitsandbytes")
    model = load(folder, base, torch.device("cpu"))
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            if param.ndim == 3:  # a layer at a time is on the device in 16 bits
                module.to(device)
                parametrize.replace_parameter_4bit(module, name, quant_type="nf4", compress_statistics=True)
    return model.to(device)


@torch.no_grad()
def dequantised(module, name="weight"):
    """The definition: the library's own function; in 8 bits of bitsandbytes, a row's largest magnitude is 127."""
    weight = module._parameters[name]
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)
    if hasattr(weight, "SCB"):
        return (weight.data * (weight.SCB.view(-1, 1) * (1 / 127))).bfloat16()
    if hasattr(weight, "dequantize") and hasattr(weight, "qdata"):
        return weight.dequantize()
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(weight, module._parameters[f"{name}_scale_inv"], torch.bfloat16)
