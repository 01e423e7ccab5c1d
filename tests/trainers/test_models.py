"""Attention without masks."""

import threading

import pytest
import torch
from small_models import small
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sparse_opt.trainers.batches import TokenSequence, collate
from sparse_opt.trainers.logprobs import token_logprobs
from sparse_opt.trainers.models import load_model, make_masks_skippable, skip_padding_masks

FP32_EPS = 2**-23
BATCH = collate([TokenSequence(list(range(3, 40)), 2), TokenSequence(list(range(50, 60)), 4)], pad_id=0)


class Masks:
    """The masks that a model's first layer is given."""

    def __init__(self, model, monkeypatch):
        self.made: list[torch.Tensor | None] = []
        attention = model.model.layers[0].self_attn
        forward = attention.forward

        def noted(*args, **kwargs):
            self.made.append(kwargs["attention_mask"])
            return forward(*args, **kwargs)

        monkeypatch.setattr(attention, "forward", noted)

    def were_made(self) -> list[bool]:
        made, self.made = self.made, []
        return [mask is not None for mask in made]


@pytest.mark.parametrize(
    "config_class", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, MixtralConfig, Qwen3MoeConfig]
)
def test_right_padding_needs_no_mask(monkeypatch, config_class):
    model = small(config_class, **({"sliding_window": None} if config_class is MistralConfig else {}))
    masks = Masks(model, monkeypatch)
    with torch.no_grad():
        masked = token_logprobs(model, BATCH)
        assert make_masks_skippable(model)
        unmasked = token_logprobs(model, BATCH)
    assert masks.were_made() == [True, False]
    # Two attention kernels, whose sums over up to 37 tokens are ordered differently, and log-probabilities near 6.
    torch.testing.assert_close(unmasked, masked, rtol=0, atol=37 * 6 * FP32_EPS)


@pytest.mark.parametrize("plain", [True, False], ids=["without logits", "with all logits"])
def test_log_probabilities_wait_for_no_number(plain):
    class Numbers(TorchDispatchMode):
        """Counts the times a tensor's element becomes a Python number, for which a GPU has to be waited for."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal read
            read += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = small(LlamaConfig)
    if not plain:
        model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    read = 0
    with Numbers():
        token_logprobs(model, BATCH)
    assert read > 0  # transformers looks whether there is padding
    make_masks_skippable(model)
    read = 0
    with Numbers():
        token_logprobs(model, BATCH).sum().backward()
    assert read == 0


@pytest.mark.parametrize("padded_on", ["left", "right", "both"])
def test_a_loaded_policy_is_like_any_other_model(model_folder, padded_on):
    policy = load_model(model_folder, torch.device("cpu"), "fp32").eval()
    other = AutoModelForCausalLM.from_pretrained(model_folder, dtype=next(policy.parameters()).dtype).eval()
    width, ids = 24, list(range(40, 54))
    before = {"left": width - len(ids), "right": 0, "both": 3}[padded_on]
    input_ids = torch.zeros(2, width, dtype=torch.int64)
    input_ids[0, before : before + len(ids)] = torch.tensor(ids)
    input_ids[1] = torch.arange(60, 60 + width)
    inputs = {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}
    with torch.no_grad():
        token_logprobs(policy, BATCH)  # leaves nothing behind
        found, expected = (model(**inputs).logits for model in (policy, other))
        assert torch.equal(found, expected)
        blind = other(input_ids=input_ids).logits[0, before : before + len(ids)]
    # Without a mask, padding affects the tokens after it, but not those before it.
    assert torch.allclose(found[0, before : before + len(ids)], blind, atol=1e-3) == (padded_on == "right")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found, expected = (
        model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
        for model in (policy, other)
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


def test_masks_are_skipped_where_it_is_asked_for(monkeypatch):
    model = small(LlamaConfig)
    make_masks_skippable(model)
    masks = Masks(model, monkeypatch)
    inputs = {"input_ids": BATCH.input_ids, "attention_mask": BATCH.attention_mask}
    with skip_padding_masks():
        model(**inputs)
        thread = threading.Thread(target=model, kwargs=inputs)
        thread.start()
        thread.join()
        model(**inputs)
    model(**inputs)
    assert masks.were_made() == [False, True, False, True]
    with pytest.raises(ZeroDivisionError), skip_padding_masks():
        raise ZeroDivisionError
    model(**inputs)
    assert masks.were_made() == [True]


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
    assert not make_masks_skippable(model)
    assert model.config._attn_implementation == before
