"""Mixtures of experts: updates of a trainer, whose experts are one parameter, reach the experts of a real vLLM."""

import copy

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm_lab import EXPERTS, engine, make_model, write_slices
from vllm_updates import Trainer, save, tokens_of

from sparse_opt import MaskSet, SparseDelta
from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.loader_trace import trace_destinations
from sparse_opt.integrations.vllm import VLLMDeltas, VLLMWeightSync
from sparse_opt.integrations.vllm.packed_layers import PackedLayers
from sparse_opt.weight_sync import Destination, WeightSender


def moe(kind: str, **sizes: int) -> nn.Module:
    name, overrides = EXPERTS[kind]
    return make_model(name, **{**overrides, **sizes})


def traced(model: nn.Module, source: nn.Module, part: str) -> tuple[PackedLayers, dict[str, list[Destination]]]:
    """The places of the weights of `source` whose names have a part, before they are kept."""
    packed = PackedLayers(model)
    weights = {n: (tuple(p.shape), p.dtype) for n, p in source.named_parameters() if part in n}
    with packed.as_loaded():
        slices = trace_destinations(model, weights, config=model.lab_config.model_config.hf_config)
        for name, pieces in slices.items():
            packed.require_known_layout(name, pieces)
    return packed, slices


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_updated_experts_are_packed_as_in_a_fresh_model(kind, vllm_model):
    source = moe(kind, moe_intermediate_size=48) if kind == "qwen3-moe" else moe(kind)  # vLLM pads 48 to 64
    changed = copy.deepcopy(source)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            if "layers.1.mlp.experts" in name:
                weight.mul_(1.5).add_(0.25)
    model, fresh = vllm_model(source), vllm_model(changed)
    packed, slices = traced(model, source, "layers.1.mlp.experts")
    slices = packed.keep(slices, model.lab_config)
    write_slices(slices, changed)
    layers = {layer for pieces in slices.values() for layer in packed.holding(pieces)}
    assert len(layers) == 1
    with set_current_vllm_config(model.lab_config):
        packed.repack(layers)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fresh.get_parameter(name)), name


def test_experts_that_vllm_rearranges_or_moves_are_refused(vllm_model, monkeypatch):
    source = moe("qwen3-moe")
    model = vllm_model(source)
    experts = model.get_submodule("model.layers.1.mlp.experts.routed_experts")
    where = r"weight model\.layers\.1\.mlp\.experts\.\w+ belongs to the experts of .*layers\.1.*"
    with monkeypatch.context() as patch:
        patch.setattr(experts.quant_method, "unquantized_backend", UnquantizedMoeBackend.FLASHINFER_TRTLLM)
        with pytest.raises(WeightSyncError, match=where + 'FlashInfer TRTLLM: start it with moe_backend="triton"'):
            traced(model, source, "layers.1.mlp.experts")
    with monkeypatch.context() as patch:
        patch.setattr(experts.moe_config.moe_parallel_config, "enable_eplb", True)
        with pytest.raises(WeightSyncError, match=where + "start it without enable_eplb"):
            traced(model, source, "layers.1.mlp.experts")
    traced(model, source, "layers.1.mlp.experts")


def test_weights_that_attention_has_copied_are_refused(vllm_model):
    source = moe("deepseek-v3")
    model = vllm_model(source)
    traced(model, source, "mlp")
    with pytest.raises(WeightSyncError, match=r"kv_b_proj\.weight belongs to .*: exclude it from the mask"):
        traced(model, source, "kv_b_proj")


def test_updates_under_tiles_and_whole_experts_and_a_delta(tmp_path):
    model = moe("qwen3-moe", max_position_embeddings=512)
    base = copy.deepcopy(model)
    folders = [save(tmp_path / "base", base)]
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    masks = [
        MaskSet.random(experts, density=0.3, pattern="tile64", seed=1),
        MaskSet.experts(model, {0: [1, 2], 1: [3]}),
    ]
    found = []
    with engine(folders[0]) as llm:
        of_base = tokens_of(llm)
        for mask in masks:  # each has a sender of its own, which goes on with the weights of the one before
            trainer = Trainer(model, mask)
            sync = VLLMWeightSync(WeightSender(model, mask), llm)
            sync.connect()
            for _ in range(6):
                trainer.step()
                sync.update()
            found.append(tokens_of(llm))
            folders.append(save(tmp_path / str(len(folders)), model))
    assert of_base not in found and found[0] != found[1]

    files = [load_file(folder / "model.safetensors") for folder in folders]
    delta = SparseDelta.from_models(files[0], files[2])  # as `delta diff` of the two checkpoints
    with engine(folders[1]) as fresh:
        assert tokens_of(fresh) == found[0]
    with engine(folders[0]) as llm:
        served = VLLMDeltas(llm, {"trained": delta})
        assert tokens_of(llm) == of_base
        for name, tokens in (("trained", found[1]), (None, of_base)):
            served.switch(name)
            assert tokens_of(llm) == tokens
        with pytest.raises(WeightSyncError, match=r"has no tensor model\.layers\.0\.mlp\.experts\.\w+_proj"):
            served.register("of models", SparseDelta.from_models(base, model))
