"""`completions_per_row`: several completions of a prompt in a row, with the log-probabilities of rows of their own."""

from __future__ import annotations

import json

import pytest
import torch
from small_models import assert_same_gradients, grads_of, small
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import grpo
from sparse_opt.trainers.data.encoding import TokenSequence, collate
from sparse_opt.trainers.data.shared_prompts import branch_offsets, collate_shared_prompts, n_row_tokens
from sparse_opt.trainers.policy.logprobs import token_logprobs
from sparse_opt.trainers.policy.models import make_masks_skippable
from sparse_opt.trainers.rollouts.engine import Rollout
from sparse_opt.trainers.rollouts.grouped import grouped_logprobs

MODELS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "gpt2": GPT2Config}


def group(n_prompt, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 200, (n_prompt + sum(lengths),), generator=generator).tolist()
    prompt, rest = ids[:n_prompt], ids[n_prompt:]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [TokenSequence(prompt + rest[a : a + n], n_prompt) for a, n in zip(starts, lengths, strict=True)]


GROUPS = [group(9, [4, 1, 7, 3], 0), group(1, [2, 5, 1, 2], 1), group(14, [6, 6, 2, 9], 2)]


def test_a_row_of_a_group():
    row = collate_shared_prompts(GROUPS[:1], pad_id=2)
    prompt = GROUPS[0][0].ids[:9]
    own = [sequence.ids[8:] for sequence in GROUPS[0]]  # the prompt's last token, and the completion
    ids = [*prompt[:8], *own[0], *own[1], *own[2], *own[3]]
    assert n_row_tokens(GROUPS[0]) == len(ids) == row.n_tokens == 8 + 5 + 2 + 8 + 4
    assert row.input_ids[0].tolist() == [*ids, *[2] * (32 - len(ids))]
    assert branch_offsets(GROUPS[0]) == [0, 5, 7, 15]
    assert row.branches[0, : len(ids)].tolist() == [0] * 8 + [1] * 5 + [2] * 2 + [3] * 8 + [4] * 4
    assert row.position_ids[0, 8:15].tolist() == [8, 9, 10, 11, 12, 8, 9]
    assert row.completion_mask[0].nonzero()[:, 0].tolist() == [9, 10, 11, 12, 14, *range(16, 23), 24, 25, 26]
    assert (row.first_trained, row.n_trained) == (9, 15)


@pytest.mark.parametrize("per_row", [2, 3, 4, 9])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_and_gradients_are_those_of_separate_rows(name, per_row):
    sequences = [sequence for one in GROUPS for sequence in one]
    batch = collate(sequences, 0)
    factors = torch.randn(batch.completion_mask[:, batch.first_trained :].shape, generator=torch.manual_seed(0))
    alone, grouped = small(MODELS[name]), small(MODELS[name])
    for model in (alone, grouped):
        make_masks_skippable(model)
    expected = token_logprobs(alone, batch, 0.7)
    found = grouped_logprobs(grouped, batch, sequences, per_row, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found != 0).equal(batch.completion_mask[:, batch.first_trained :])
    assert_same_gradients(grads_of(grouped, found * factors), grads_of(alone, expected * factors))


def test_completions_do_not_see_each_other():
    model = small(LlamaConfig)
    changed = [*GROUPS[0][:2], TokenSequence([*GROUPS[0][2].ids[:9], 4, 4, 4, 4, 4, 4, 4], 9), GROUPS[0][3]]
    found = [grouped_logprobs(model, collate(one, 0), one, 4, 1.0) for one in (GROUPS[0], changed)]
    for row in (0, 1, 3):
        assert found[0][row].equal(found[1][row])
    assert not found[0][2].equal(found[1][2])


def test_parts_of_a_rollout_share_rows():
    sequences = [sequence for one in GROUPS for sequence in one]
    batch = collate(sequences, 0)
    zeros = torch.zeros(batch.completion_mask[:, batch.first_trained :].shape)
    rollout = Rollout(batch, zeros, torch.ones(12, dtype=torch.bool), sequences, completions_per_row=4)
    model = small(LlamaConfig)
    whole = rollout.token_logprobs(model, 1.0)
    for rows in (slice(2, 7), slice(0, 12), [11, 3]):
        part = rollout.select(rows)
        assert part.completions_per_row == 4
        torch.testing.assert_close(part.token_logprobs(model, 1.0), rollout.cut(whole, rows), rtol=1e-5, atol=1e-5)


@pytest.fixture
def options(tmp_path, model_folder, mask_file):
    prompts = tmp_path / "prompts.jsonl"
    words = ["one two", "three four five", "six", "seven eight nine ten"]
    prompts.write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in words))

    def make(folder, **changes):
        return grpo.GRPOConfig(
            **{
                "policy_name": str(model_folder),
                "dataset": str(prompts),
                "output_dir": tmp_path / folder,
                "dtype": "fp32",
                "device": "cpu",
                "n_steps": 3,
                "batch_size": 8,
                "gradient_accumulation_steps": 2,
                "n_generations": 4,
                "max_completion_length": 6,
                "learning_rate": 1e-3,
                "beta": 0.1,
                "reward_functions": ["token_rewards:even_tokens"],
                "sample_steps": None,
                "delta_log_dir": None,
                **changes,
            }
        )

    return make


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_runs_of_grpo_are_those_with_separate_rows(options, mode, mask_file, read_metrics):
    changes = {"mode": mode, "mask": mask_file if mode == "sparse" else None}
    alone, grouped = (read_metrics(grpo.train(options(str(n), completions_per_row=n, **changes))) for n in (1, 4))
    assert len(alone) == len(grouped) == 3
    for row, other in zip(grouped, alone, strict=True):
        assert row["n_tokens"] == other["n_tokens"] and row["ratio_error"] == 0  # the old ones come from the same rows
        for name in ("loss", "kl", "grad_norm", "reward"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
    assert grouped[-1]["kl"] > 0


def test_models_that_cannot_are_refused(options, tmp_path, model_folder, tokenizer):
    model = small(MistralConfig, sliding_window=16, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "windowed")
    tokenizer.save_pretrained(tmp_path / "windowed")
    with pytest.raises(ConfigError, match="option 'completions_per_row': MistralForCausalLM attends to a window of 16"):
        grpo.train(options("refused", policy_name=str(tmp_path / "windowed"), completions_per_row=4))
    assert not (tmp_path / "refused").exists()
