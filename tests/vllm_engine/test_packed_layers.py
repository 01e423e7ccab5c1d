"""Layers whose weights vLLM packs for the CPU compute with the updated weights."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm_lab import make_model, write_slices

from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.loader_trace import trace_destinations
from sparse_opt.integrations.vllm.packed_layers import PackedLayers
from sparse_opt.weight_sync import Destination


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LinearBase | VocabParallelEmbedding)}


def outputs(layer: nn.Module) -> torch.Tensor:
    """What a layer computes for some input, by vLLM's own kernels."""
    width = layer.input_size if isinstance(layer, LinearBase) else layer.embedding_dim
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    return layer.quant_method.apply(layer, x, layer.bias if isinstance(layer, LinearBase) else None)


def kept_slices(model: nn.Module, source: nn.Module, names: list[str]) -> tuple[PackedLayers, dict]:
    packed = PackedLayers(model)
    weights = {n: (p.shape, p.dtype) for n, p in source.named_parameters() if n in names}
    with packed.as_loaded():
        slices = trace_destinations(model, weights)
    return packed, packed.keep(slices, model.lab_config)


def require_packed(model: nn.Module) -> None:
    """Skip on processors for which vLLM computes with the plain weights of these small layers."""
    if layers_of(model)["model.layers.0.self_attn.qkv_proj"].weight.shape == (256, 128):
        pytest.skip("needs a processor for which vLLM replaces the weights of linear layers by packed ones")


def changed_copy(source: nn.Module, names: list[str]) -> nn.Module:
    changed = copy.deepcopy(source)
    with torch.no_grad():
        for name in names:
            changed.get_parameter(name).mul_(1.5).add_(0.25)
    return changed


CASES = {
    "one projection of a fused layer": ("Llama", False, ["model.layers.1.self_attn.k_proj.weight"], {"qkv_proj"}),
    "row parallel": ("Llama", False, ["model.layers.0.mlp.down_proj.weight"], {"down_proj"}),
    "output layer": ("Llama", False, ["lm_head.weight"], {"lm_head"}),
    "tied output layer": ("Llama", True, ["model.embed_tokens.weight"], {"embed_tokens", "lm_head"}),
    "bias": ("Qwen2", False, ["model.layers.0.self_attn.q_proj.bias"], {"qkv_proj"}),
    "norm": ("Qwen3", False, ["model.layers.0.self_attn.q_norm.weight"], set()),
    "weight and bias": (
        "Qwen2",
        False,
        ["model.layers.1.self_attn.v_proj.bias", "model.layers.1.self_attn.v_proj.weight"],
        {"qkv_proj"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_updated_layers_compute_as_in_a_fresh_model(case, vllm_model):
    kind, tied, names, affected = CASES[case]
    source = make_model(kind, tie_word_embeddings=tied)
    changed = changed_copy(source, names)
    model, fresh = vllm_model(source), vllm_model(changed)
    before = {name: outputs(layer) for name, layer in layers_of(model).items()}
    functions = {name: layer.cpu_linear for name, layer in layers_of(model).items()}

    packed, slices = kept_slices(model, source, names)
    for name, layer in layers_of(model).items():  # reading the plain weights has changed nothing
        assert torch.equal(outputs(layer), before[name]) and layer.cpu_linear is functions[name], name
    write_slices(slices, changed)
    with set_current_vllm_config(model.lab_config):
        packed.repack({layer: None for pieces in slices.values() for layer in packed.holding(pieces)})

    different = set()
    for name, layer in layers_of(model).items():
        assert torch.equal(outputs(layer), outputs(layers_of(fresh)[name])), name
        if not torch.equal(outputs(layer), before[name]):
            different.add(name.split(".")[-1])
        elif layer.cpu_linear is not functions[name]:
            pytest.fail(f"{name} was packed again without a change")
    assert different == affected
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fresh.get_parameter(name)), name
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}


def test_packed_layers_are_kept_only_where_the_mask_needs_them(vllm_model):
    source = make_model("Llama", tie_word_embeddings=False)
    model = vllm_model(source)
    require_packed(model)
    norms, _ = kept_slices(model, source, ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
    assert not norms.kept()  # these are whole in the model
    packed, _ = kept_slices(model, source, ["model.layers.0.self_attn.q_proj.weight"])
    assert sum(plain.nbytes for plain in packed.kept()) == 2 * (128 + 64 + 64) * 128


def test_a_second_mask_does_not_read_updated_weights_again(vllm_model):
    name = "model.layers.0.self_attn.q_proj.weight"
    source = make_model("Llama")
    changed = changed_copy(source, [name])
    model = vllm_model(source)
    packed, slices = kept_slices(model, source, [name])
    write_slices(slices, changed)
    with packed.as_loaded():
        again = trace_destinations(model, {name: ((128, 128), torch.bfloat16)})
    (piece,) = packed.keep(again, model.lab_config)[name]
    assert torch.equal(piece.tensor, changed.get_parameter(name))


def test_compiled_models_are_refused_if_they_are_packed(vllm_model):
    source = make_model("Llama")
    model = vllm_model(source)
    model.lab_config.compilation_config.mode = 3
    with pytest.raises(WeightSyncError, match="start vLLM with enforce_eager=True"):
        kept_slices(model, source, ["model.layers.0.self_attn.q_proj.weight"])
    kept_slices(model, source, ["model.norm.weight"])


def test_weights_without_a_checkpoint_are_refused(vllm_model):
    source = make_model("Llama")
    model = vllm_model(source)
    require_packed(model)
    model.lab_config.load_config.load_format = "dummy"
    name = "model.layers.0.self_attn.q_proj.weight"
    packed = PackedLayers(model)
    with packed.as_loaded():
        slices = trace_destinations(model, {name: ((128, 128), torch.bfloat16)})
    for _ in range(2):  # the refusal leaves no empty weights behind
        with pytest.raises(WeightSyncError, match="load_format is dummy, expected a checkpoint"):
            packed.keep(slices, model.lab_config)
    assert not packed.kept()


class OtherMethod:
    pass


@pytest.mark.parametrize(
    ("method", "shape", "message"),
    [
        (OtherMethod, (4, 4), "weight w belongs to layer 0 with OtherMethod"),
        (UnquantizedLinearMethod, (4, 1, 4), "weight w belongs to layer 0, whose parameters vLLM has rearranged"),
        (UnquantizedLinearMethod, (4, 4), None),
    ],
)
def test_layers_of_other_layouts_are_refused(worker, method, shape, message):
    model = nn.Sequential(nn.Module())
    model[0].weight = nn.Parameter(torch.zeros(shape))
    model[0].quant_method = method()
    piece = Destination(model[0].weight.detach().view(4, 4), (0, 4), (0, 4))
    with pytest.raises(WeightSyncError, match=message) if message else nullcontext():
        PackedLayers(model).require_known_layout("w", [piece])
