"""Parameter names against the models that give them, made from configurations."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.pytorch_utils import Conv1D

from sparse_opt.masks.parameters import Component, component_of, layer_of

ATTENTION = {"attention_q", "attention_k", "attention_v", "attention_o"}
FUSED_ATTENTION = {"attention_qkv", "attention_o"}
GATED_MLP = {"mlp_gate", "mlp_up", "mlp_down"}
FUSED_MLP = {"mlp_gate_up", "mlp_down"}
PLAIN_MLP = {"mlp_up", "mlp_down"}


def model_of(config_class: type) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    more = {"num_local_experts": 2} if config_class in (MixtralConfig, GptOssConfig) else {}
    config = config_class(vocab_size=32, pad_token_id=0, **sizes, **more)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def gpt2() -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=8))


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize(
    ("config_class", "expected"),
    [
        (LlamaConfig, ATTENTION | GATED_MLP),
        (MistralConfig, ATTENTION | GATED_MLP),
        (Qwen2Config, ATTENTION | GATED_MLP),
        (Qwen3Config, ATTENTION | GATED_MLP),
        (Gemma2Config, ATTENTION | GATED_MLP),
        (Gemma3TextConfig, ATTENTION | GATED_MLP),
        (Phi3Config, FUSED_ATTENTION | FUSED_MLP),
        (MixtralConfig, ATTENTION | FUSED_MLP | {"other"}),  # other: the router
        (GptOssConfig, ATTENTION | FUSED_MLP | {"other"}),  # and the attention sinks
        (GPTNeoXConfig, FUSED_ATTENTION | PLAIN_MLP),
        (OPTConfig, ATTENTION | PLAIN_MLP),
    ],
)
def test_every_layer_has_the_parts_of_its_architecture(config_class, expected):
    model = model_of(config_class)
    found = {name: component_of(name) for name in names_of(model)}
    assert {c.layer for c in found.values()} == {None, 0, 1, 2}
    for layer in range(3):
        assert {c.part for c in found.values() if c.layer == layer} == expected | {"norms"}
    assert {c.part for c in found.values() if c.layer is None} == {"embeddings", "norms", "lm_head"}
    assert not any(c.conv1d for c in found.values())
    # What torch and transformers call the module agrees.
    modules = dict(model.named_modules())
    for name, component in found.items():
        module = modules[name.rpartition(".")[0]]
        assert (component.part == "norms") == ("Norm" in type(module).__name__), name
        assert (component.part == "embeddings") == isinstance(module, nn.Embedding), name
        if component.part == "other":
            assert "Router" in type(module).__name__ or name.endswith("sinks"), name


def test_gpt2_and_its_transposed_weights():
    model = gpt2()
    modules = dict(model.named_modules())
    for name in names_of(model):
        module, _, leaf = name.rpartition(".")
        component = component_of(name)
        assert component.conv1d == (isinstance(modules[module], Conv1D) and leaf == "weight"), name
        assert component.part != "other", name
    parts = {name: component_of(f"transformer.h.1.{name}") for name in ("attn.c_attn.weight", "attn.c_proj.weight")}
    assert [c.part for c in parts.values()] == ["attention_qkv", "attention_o"]
    assert component_of("transformer.h.1.mlp.c_fc.bias") == Component(1, "mlp_up")
    assert component_of("transformer.h.1.mlp.c_proj.weight") == Component(1, "mlp_down", conv1d=True)
    assert component_of("transformer.wpe.weight").part == "embeddings"


@pytest.mark.parametrize(
    ("name", "layer", "part"),
    [
        ("model.layers.31.block_sparse_moe.experts.7.w1.weight", 31, "mlp_gate"),
        ("model.layers.31.block_sparse_moe.gate.weight", 31, "other"),
        ("model.layers.2.mlp.experts.down_proj_bias", 2, "mlp_down"),
        ("model.language_model.layers.5.self_attn.q_norm.weight", 5, "norms"),
        ("base_model.model.model.layers.4.self_attn.q_proj.lora_A.default.weight", 4, "attention_q"),
        ("transformer.h.9.attn.out_proj.weight", 9, "attention_o"),
        ("transformer.word_embeddings_layernorm.weight", None, "norms"),
        ("score.weight", None, "other"),
        ("", None, "other"),
        ("0", 0, "other"),
    ],
)
def test_single_names(name, layer, part):
    assert component_of(name) == Component(layer, part)
    assert layer_of(name) == layer
