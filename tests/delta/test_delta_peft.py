"""Deltas and PEFT's adapters: equal to what PEFT computes itself, bit for bit."""

import copy

import pytest
import torch
from tiny_llama import make_llama
from torch import nn

from sparse_opt import SparseDelta
from sparse_opt.errors import DeltaError

peft = pytest.importorskip("peft")


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def base(request):
    torch.manual_seed(0)  # of the adapters
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_llama(dtype=request.param, **sizes, tie_word_embeddings=True, attention_bias=True)


def adapted(base, config):
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "shira_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return model


def bits(model) -> dict[str, bytes]:
    return {n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in model.state_dict().items()}


CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]),
    "lora of the embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    "shira": lambda: peft.ShiraConfig(r=2, target_modules=["q_proj", "down_proj"], random_seed=1),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_an_adapter_as_a_delta(base, config, recwarn):
    model = adapted(base, CONFIGS[config]())
    before = bits(model)
    delta = SparseDelta.from_peft(model)
    assert bits(model) == before
    delta.apply_(base)
    assert bits(base) == bits(model.merge_and_unload())


def test_adapters_that_are_refused(base):
    model = adapted(base, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(DeltaError, match=r"lm_head is saved whole by the adapter"):
        SparseDelta.from_peft(model)
    model = adapted(base, CONFIGS["lora"]())
    model.merge_adapter()
    with pytest.raises(DeltaError, match=r"the adapter of model\.layers\.0\.self_attn\.q_proj is merged already"):
        SparseDelta.from_peft(model)


def moved(base, *names):
    """A copy in which the first elements of the named tensors moved, a different number of each."""
    model = copy.deepcopy(base)
    with torch.no_grad():
        for i, name in enumerate(names, start=1):
            model.get_parameter(name).view(-1)[: 7 * i] *= 1.25  # an exact fp32 difference in both dtypes
    return model


def test_a_delta_as_a_shira_adapter(base, tmp_path):
    tuned = moved(base, "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight")
    delta = SparseDelta.from_models(base, tuned)
    delta.to_peft(copy.deepcopy(base)).save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, tuned(tokens).logits)
    again = SparseDelta.from_peft(loaded)
    assert (again.result_digest, again.counts) == (delta.result_digest, delta.counts)
    assert bits(loaded.merge_and_unload()) == bits(tuned)


def test_what_shira_cannot_express(base):
    def refused(name, said, change=None):
        tuned = moved(base, name)
        if change is not None:
            with torch.no_grad():
                change(tuned.get_parameter(name))
        model = copy.deepcopy(base)
        with pytest.raises(DeltaError, match=said):
            SparseDelta.from_models(base, tuned).to_peft(model)
        assert bits(model) == bits(base)

    weight = "model.layers.0.self_attn.q_proj.weight"
    refused("model.norm.weight", r"model\.norm\.weight changed: a SHiRA adapter has weights of nn\.Linear alone")
    refused("model.layers.0.self_attn.q_proj.bias", r"q_proj\.bias changed", lambda bias: bias.fill_(1))
    refused(weight, rf"{weight}: the change at 5 is not an fp32", lambda w: w.view(-1)[5:6].fill_(float("nan")))
    wide = "model.layers.0.mlp.up_proj.weight"
    refused(wide, rf"{wide}: rank 10, which the change needs, has more values than the weight", lambda w: w.mul_(1.25))
    with pytest.raises(DeltaError, match="nothing changed"):
        SparseDelta.from_models(base, base).to_peft(base)
    other = nn.Linear(3, 3)
    with pytest.raises(DeltaError, match="the model has no tensor"):
        SparseDelta.from_models(base, moved(base, weight)).to_peft(other)
