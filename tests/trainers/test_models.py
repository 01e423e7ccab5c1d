"""Attention without masks, and adapters."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from sparse_opt.trainers.encoding import TokenSequence, collate
from sparse_opt.trainers.logprobs import token_logprobs
from sparse_opt.trainers.models import add_lora, padding_masks, skip_padding_masks

FP32_EPS = 2**-23
BATCH = collate([TokenSequence(list(range(3, 40)), 2), TokenSequence(list(range(50, 60)), 4)], pad_id=0)


def small(config_class, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = config_class(vocab_size=211, num_key_value_heads=2, **sizes, **changes)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig])
def test_right_padding_needs_no_mask(config_class):
    model = small(config_class, **({"sliding_window": None} if config_class is MistralConfig else {}))
    with torch.no_grad():
        masked = token_logprobs(model, BATCH)
        assert skip_padding_masks(model)
        unmasked = token_logprobs(model, BATCH)
        # Two attention kernels, whose sums over up to 37 tokens are ordered differently, and log-probabilities near 6.
        torch.testing.assert_close(unmasked, masked, rtol=0, atol=37 * 6 * FP32_EPS)
        with padding_masks(model):
            assert torch.equal(token_logprobs(model, BATCH), masked)
        assert torch.equal(token_logprobs(model, BATCH), unmasked)


def test_no_mask_is_made(monkeypatch):
    model = small(LlamaConfig)
    made = []
    forward = model.model.layers[0].self_attn.forward
    monkeypatch.setattr(
        model.model.layers[0].self_attn,
        "forward",
        lambda *args, **kwargs: made.append(kwargs["attention_mask"]) or forward(*args, **kwargs),
    )
    token_logprobs(model, BATCH)
    skip_padding_masks(model)
    token_logprobs(model, BATCH)
    with padding_masks(model):
        token_logprobs(model, BATCH)
    assert [mask is None for mask in made] == [False, True, False]


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (MistralConfig, {"sliding_window": 8}),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        (Gemma2Config, {"head_dim": 8}),
    ],
    ids=["window", "window in some layers", "another model"],
)
def test_other_attention_keeps_its_masks(config_class, changes):
    model = small(config_class, **changes)
    before = model.config._attn_implementation
    assert not skip_padding_masks(model)
    assert model.config._attn_implementation == before


def test_a_saved_model_knows_nothing_of_it(tmp_path):
    model = small(LlamaConfig)
    skip_padding_masks(model)
    model.save_pretrained(tmp_path)
    assert "unmasked" not in (tmp_path / "config.json").read_text()


def test_adapters_start_as_no_change_and_train_alone():
    pytest.importorskip("peft", reason="needs peft: pip install 'sparse-opt[bench]'")
    model = small(LlamaConfig, tie_word_embeddings=True).bfloat16()
    with torch.no_grad():
        before = token_logprobs(model, BATCH)
    adapted = add_lora(model, rank=4)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    # q, k, v, o: 32 x (32, 16, 16, 32); gate, up, down: 32 x 48
    per_layer = 4 * ((32 + 32) * 2 + (32 + 16) * 2 + 3 * (32 + 48))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * per_layer
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, BATCH), before)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        assert not torch.equal(token_logprobs(model, BATCH), before)
        with adapted.disable_adapter():
            assert torch.equal(token_logprobs(model, BATCH), before)
