"""Sampling by transformers: what is sampled, its log-probabilities, and a model left as it was."""

import pytest
import torch
from small_models import EPS, plain_table, small, with_lora
from transformers import GenerationConfig, GPT2Config, LlamaConfig, Qwen3Config

from sparse_opt.errors import ConfigError
from sparse_opt.trainers.logprobs import token_logprobs
from sparse_opt.trainers.models import make_masks_skippable
from sparse_opt.trainers.sampling import Rollout, Sampling, generate, rollout, stop_ids

CONFIGS = {"gpt2": GPT2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}
PROMPTS = [[5, 6, 7], [8], [9] * 11 + [10]]
NEVER = [210]  # an EOS that the tests' greedy completions do not hold


def greedy_by_hand(model, prompt, n=6):
    """The `n` most likely tokens one after the other, each from a whole forward pass."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(plain_table(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def sampled(model, prompts=PROMPTS, n=1, eos_ids=NEVER, share_prompts=False, pad_id=0, **sampling):
    settings = Sampling(**{"max_new_tokens": 6, "temperature": 0.0, **sampling})
    return generate(model, prompts, settings, pad_id=pad_id, eos_ids=eos_ids, n=n, share_prompts=share_prompts)


def snapshot(model):
    """Weights, what is trained, modes, hooks, configuration and attributes, to compare with ==."""
    own = {
        name: (module.training, list(module._forward_hooks), sorted(vars(module)))
        for name, module in model.named_modules()
    }
    tensors = {
        name: (tensor.dtype, tensor.requires_grad, tensor.data_ptr(), tensor.detach().tolist())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    return own, tensors, model.config.to_dict(), model.config._attn_implementation, id(model.generation_config)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_completions_do_not_depend_on_the_batch_or_the_cache(name, share_prompts):
    model = small(CONFIGS[name])
    expected = [greedy_by_hand(model, prompt) for prompt in PROMPTS]
    assert sampled(model, share_prompts=share_prompts) == expected  # short prompts in a batch with one of 12 tokens
    assert sampled(model, [PROMPTS[1]], share_prompts=share_prompts) == [expected[1]]
    backwards = sampled(model, PROMPTS[::-1], n=2, share_prompts=share_prompts)
    assert backwards == [completion for completion in expected[::-1] for _ in range(2)]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_completions_end_with_the_first_of_several_eos(share_prompts):
    model = small(LlamaConfig)
    whole = sampled(model)
    eos_ids = [whole[0][2], whole[1][1]]
    expected = []
    for completion in whole:
        ends = [place for place, token in enumerate(completion) if token in eos_ids]
        expected.append(completion[: ends[0] + 1] if ends else completion)
    assert len(expected[0]) < 6 and len(expected[1]) < 6 and len(expected[2]) == 6
    for pad_id in (0, eos_ids[0]):  # padding that is an EOS is no completion token
        options = {"n_generations": 1, "pad_id": pad_id, "eos_ids": eos_ids, "share_prompts": share_prompts}
        found = rollout(model, PROMPTS, Sampling(6, temperature=0.0), **options)
        assert found.completions == expected
        assert found.mask.sum(dim=1).tolist() == [len(completion) for completion in expected]
        assert (found.logprobs[~found.mask] == 0).all()


@pytest.mark.parametrize("share_prompts", [False, True])
def test_eos_is_held_back(share_prompts):
    model = small(LlamaConfig)
    eos_ids = [completion[0] for completion in sampled(model)]
    held = sampled(model, eos_ids=eos_ids, min_new_tokens=4, share_prompts=share_prompts)
    assert all(len(completion) >= 4 and not set(completion[:4]) & set(eos_ids) for completion in held)


LEAKS = {
    "temperature": 0.01,
    "top_k": 1,
    "repetition_penalty": 9.0,
    "min_length": 60,
    "suppress_tokens": list(range(2, 100)),
    "forced_eos_token_id": 1,
    "num_beams": 3,
    "max_new_tokens": 2,
}


def test_the_models_generation_settings_have_no_effect():
    model = small(LlamaConfig)

    def draw():
        torch.manual_seed(3)
        return sampled(model, temperature=1.0), sampled(model)

    clean = draw()
    model.generation_config = own = GenerationConfig(**LEAKS)
    settings = own.to_dict()
    assert draw() == clean
    assert model.generation_config is own and own.to_dict() == settings


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_left_as_it_was(fails):
    model = small(LlamaConfig).train()
    assert make_masks_skippable(model)
    model.model.layers[0].eval()
    model.model.embed_tokens.requires_grad_(False)
    calls = []

    def hook(*_):
        calls.append(None)
        if fails and len(calls) == 3:
            raise RuntimeError("no more memory")

    model.model.layers[1].register_forward_hook(hook)
    before = snapshot(model)
    if fails:
        with pytest.raises(RuntimeError, match="no more memory"):
            sampled(model)
    else:
        sampled(model, temperature=1.0, share_prompts=True)
    assert snapshot(model) == before


def test_an_adapter_is_part_of_the_policy():
    base = small(LlamaConfig)
    plain = [greedy_by_hand(base, prompt) for prompt in PROMPTS]
    model = with_lora(base).train()
    expected = [greedy_by_hand(model, prompt) for prompt in PROMPTS]
    assert expected != plain
    assert sampled(model) == expected
    with model.disable_adapter():
        assert sampled(model) == plain


def make_rollout(**options) -> Rollout:
    torch.manual_seed(0)
    model = small(LlamaConfig)
    return rollout(model, PROMPTS, Sampling(7, 0.7), n_generations=3, pad_id=0, eos_ids=list(range(1, 60)), **options)


@pytest.mark.parametrize("rows_per_pass", [None, 1, 4])
def test_log_probabilities_are_those_of_a_plain_forward_pass_of_each_row(rows_per_pass):
    model, found = small(LlamaConfig), make_rollout(rows_per_pass=rows_per_pass)
    assert len(found) == 9
    for row in range(9):
        prompt, completion = PROMPTS[row // 3], found.completions[row]
        ids = prompt + completion
        assert found.batch.input_ids[row].tolist() == ids + [0] * (found.batch.input_ids.shape[1] - len(ids))
        table = plain_table(model, ids, temperature=0.7)
        expected = torch.zeros_like(found.logprobs[row])
        for position, token in enumerate(completion, len(prompt)):
            expected[position - found.batch.first_trained] = table[position - 1, token]
        # Logits of up to 30 in fp32, whose sums another batch shape orders differently.
        torch.testing.assert_close(found.logprobs[row], expected, rtol=0, atol=8 * 30 * EPS[torch.float32])
        assert torch.equal(found.mask[row], expected != 0)


@pytest.mark.parametrize("rows", [slice(3, 6), slice(8, 9), slice(1, 9)])
def test_selected_rows_are_trimmed_to_their_own(rows):
    found = make_rollout()
    assert len({len(completion) for completion in found.completions}) > 2
    part = found.select(rows)
    index = range(9)[rows]
    assert part.completions == [found.completions[row] for row in index]
    assert part.batch.input_ids.shape[1] == max(len(found.sequences[row].ids) for row in index)
    assert part.batch.first_trained == min(found.sequences[row].prompt_length for row in index)
    assert part.batch.n_trained == part.mask.sum() == sum(map(len, part.completions))
    for i, row in enumerate(index):
        assert part.batch.input_ids[i][part.batch.attention_mask[i].bool()].tolist() == found.sequences[row].ids
        assert torch.equal(part.logprobs[i][part.mask[i]], found.logprobs[row][found.mask[row]])
    assert torch.equal(found.cut(found.logprobs, rows), part.logprobs)


def test_training_on_the_rows_of_a_pass_starts_at_a_ratio_of_one():
    found, model = make_rollout(rows_per_pass=4), small(LlamaConfig)
    parts = list(found.minibatches(4))
    assert [completion for _, part in parts for completion in part.completions] == found.completions
    for _, part in parts:
        assert torch.equal(token_logprobs(model, part.batch, 0.7).detach(), part.logprobs)


def test_stop_ids_are_the_tokenizers_and_the_models(tokenizer):
    model = small(LlamaConfig)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7, 9]
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id, 7, 9)
    assert stop_ids(with_lora(model), tokenizer) == (tokenizer.eos_token_id, 7, 9)
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"min_new_tokens": 9}, "min_new_tokens is 9, expected 0 to max_new_tokens 8"),
    ],
)
def test_wrong_sampling(values, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**{"max_new_tokens": 8, **values})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], []], r"2 prompts, of lengths \[2, 0\]: expected none empty"),
        ([[3] * 11], "a prompt of 11 tokens and max_new_tokens 6 make 17, more than .* 16"),
    ],
)
def test_wrong_prompts(prompts, message):
    with pytest.raises(ConfigError, match=message):
        sampled(small(LlamaConfig, max_position_embeddings=16), prompts)
