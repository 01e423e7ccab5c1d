"""Whole runs of ppo.train on a CPU."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_classifiers import BAD, GOOD, PLAIN, save_sentiment_classifier
from small_models import EPS, plain_logprobs
from stopping import assert_same_run, stop_and_resume
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, pipeline

from sparse_opt.cli.main import main
from sparse_opt.config import parse_config
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers import ppo
from sparse_opt.trainers.data import query_prompts
from sparse_opt.trainers.policy.value_head import ValueHead
from sparse_opt.trainers.ppo import PPOConfig
from sparse_opt.trainers.rewards.classifier import RewardModel
from sparse_opt.trainers.run.training_run import TrainingRun

SENTIMENT = Path(__file__).parents[2] / "examples" / "configs" / "ppo_gpt2_sentiment.yaml"


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory, pairs) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": row["prompt"], "answer": row["chosen"].strip()} for row in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def ppo_options(tmp_path, model_folder, prompts_file) -> Callable[..., PPOConfig]:
    """`ppo_options("run", n_steps=3)`: a small run in that folder, with the changes given."""

    def make(folder: str = "run", **changes: object) -> PPOConfig:
        options: dict[str, object] = {
            "policy_name": str(model_folder),
            "dataset": str(prompts_file),
            "output_dir": tmp_path / folder,
            "dtype": "fp32",
            "device": "cpu",
            "n_steps": 3,
            "batch_size": 8,
            "gradient_accumulation_steps": 1,
            "n_minibatches": 2,
            "num_iterations": 2,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "value_head_learning_rate": 1e-2,
            "reward_functions": ["token_rewards:even_tokens"],
            "kl_coefficient": 0.05,
            "seed": 5,
        }
        return PPOConfig(**{**options, **changes})

    return make


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def test_it_learns(ppo_options, read_metrics, prompts_file):
    options = ppo_options(
        n_steps=12,
        batch_size=32,
        n_minibatches=1,
        num_iterations=4,
        learning_rate=5e-3,
        lr_schedule="constant",
        kl_coefficient=0.01,
        eval_dataset=str(prompts_file),
        eval_steps=12,
    )
    summary = ppo.train(options)
    rows = read_metrics(summary)
    assert rows[0]["kl"] == 0.0 and rows[0]["kl_coefficient"] == 0.01
    assert rows[0]["reward"] == pytest.approx(0.5, abs=0.1)  # an untrained model's tokens
    assert rows[-1]["reward"] > 0.75
    assert summary["last_evaluation"]["eval_reward"] > summary["first_evaluation"]["eval_reward"] + 0.2
    assert rows[-1]["kl"] > 1.0 and rows[-1]["entropy"] < rows[0]["entropy"]
    assert all(row["reward_after_kl"] <= row["reward"] for row in rows if row["kl"] > 0)
    # The critic learns the score of a completion.
    assert rows[-1]["value_loss"] < 0.5 * rows[0]["value_loss"]
    samples = [json.loads(line) for line in (options.output_dir / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples} == {1, 12} and samples[0]["prompt"].startswith("<s>What is ")


@pytest.fixture
def captured(monkeypatch):
    """What a run computes in its one optimizer step: its episodes, the scores, the gradients, and the head's."""
    found: dict[str, object] = {}
    update_on, whiten, update = ppo.loop.update_on, ppo.loop.whiten, TrainingRun.update

    def seen_update_on(run, critic, episodes, config):
        found.update(episodes=episodes, head=critic.head)
        return update_on(run, critic, episodes, config)

    def seen_update(run, *others):
        found["grads"] = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        found["head_grads"] = {name: p.grad.clone() for name, p in found["head"].named_parameters()}
        update(run, *others)

    monkeypatch.setattr(ppo.loop, "update_on", seen_update_on)
    monkeypatch.setattr(ppo.loop, "whiten", lambda values, mask: whiten(values, mask))
    monkeypatch.setattr(TrainingRun, "update", seen_update)
    return found


def test_a_step_is_the_plain_formula(ppo_options, captured, model_folder, read_metrics):
    """Rewards, advantages, losses and gradients of a run's first step, from the model's own logits in fp64."""
    options = ppo_options(
        n_steps=1,
        num_iterations=1,
        n_minibatches=1,
        batch_size=6,
        gradient_accumulation_steps=2,
        temperature=0.7,
        max_grad_norm=None,
    )
    row = read_metrics(ppo.train(options))[0]
    episodes = captured["episodes"]
    rollout = episodes.rollout
    model = AutoModelForCausalLM.from_pretrained(model_folder).double().eval()
    head = ValueHead.of(model, options.seed).double()
    logprobs = plain_logprobs(model, rollout.batch, 0.7)
    states = model(
        rollout.batch.input_ids, attention_mask=rollout.batch.attention_mask, output_hidden_states=True
    ).hidden_states[-1][:, rollout.batch.first_trained - 1 : -1]
    values = torch.nn.functional.linear(states, head.summary.weight, head.summary.bias)[..., 0]

    advantages, returns, scores = torch.zeros(logprobs.shape).double(), torch.zeros(logprobs.shape).double(), []
    for i, sequence in enumerate(rollout.sequences):
        completion = sequence.ids[sequence.prompt_length :]
        scores.append(sum(token % 2 == 0 for token in completion) / len(completion))
        start = sequence.prompt_length - rollout.batch.first_trained
        following, value_after = 0.0, 0.0
        for t in reversed(range(start, start + len(completion))):
            # The policy is its own reference in the first step, so only the score is earned.
            reward = scores[-1] if t == start + len(completion) - 1 else 0.0
            following = reward + value_after - values[i, t].item() + 0.95 * following
            advantages[i, t], returns[i, t] = following, following + values[i, t].item()
            value_after = values[i, t].item()
    mask = rollout.mask
    assert row["reward"] == pytest.approx(sum(scores) / len(scores), rel=1e-6)
    inside = advantages[mask]
    whitened = (advantages - inside.mean()) / (inside.var() + 1e-8).sqrt()
    torch.testing.assert_close(episodes.advantages.double()[mask], whitened[mask], rtol=0, atol=1e-4)
    torch.testing.assert_close(episodes.returns.double()[mask], returns[mask], rtol=0, atol=1e-4)
    n_tokens = int(mask.sum())
    for_policy = -(whitened * (logprobs - logprobs.detach()).exp())[mask].sum() / n_tokens
    for_values = 0.5 * (values - returns)[mask].square().sum() / n_tokens
    (for_policy + 0.1 * for_values).backward()
    assert row["value_loss"] == pytest.approx(for_values.item(), rel=1e-4)
    assert row["policy_loss"] == pytest.approx(0.0, abs=1e-5)  # whitened, at ratio 1
    assert row["loss"] == pytest.approx(0.1 * for_values.item(), abs=1e-5)
    for ours, theirs in ((captured["grads"], model), (captured["head_grads"], head)):
        for name, parameter in theirs.named_parameters():
            # Sums over some 70 tokens and 320 words in fp32, of log-probabilities that are off by some roundings.
            tolerance = 1000 * EPS[torch.float32] * parameter.grad.abs().max().item()
            torch.testing.assert_close(ours[name].double(), parameter.grad, rtol=0, atol=tolerance, msg=name)


def test_sparse_with_every_element_active_is_dense(ppo_options, model_folder, tmp_path, read_metrics):
    full = MaskSet.random(AutoModelForCausalLM.from_pretrained(model_folder), density=1.0).save(
        tmp_path / "full.safetensors"
    )
    dense = read_metrics(ppo.train(ppo_options("dense", n_steps=4)))
    sparse = read_metrics(ppo.train(ppo_options("sparse", n_steps=4, mode="sparse", mask=full)))
    for name in ("reward", "kl", "kl_coefficient", "value_loss", "entropy", "explained_variance", "n_tokens"):
        # As for DPO: the same arithmetic in another order. The completions are the same, drawn from probabilities that
        # differ by roundings.
        assert [row[name] for row in sparse] == pytest.approx([row[name] for row in dense], rel=2e-4, abs=1e-5), name


def test_sparse_run_leaves_inactive_weights_as_they_were(ppo_options, mask_file, model_folder):
    mask = MaskSet.load(mask_file)
    start = weights(model_folder)
    end = weights(ppo.train(ppo_options(mode="sparse", mask=mask_file))["checkpoint"])
    changed = 0
    for name, before in start.items():
        active = mask.bool(name) if name in mask else torch.zeros(before.shape, dtype=torch.bool)
        same_bits = before.view(torch.int32) == end[name].view(torch.int32)
        assert same_bits[~active].all(), name
        changed += int((~same_bits).sum())
    assert changed > mask.nnz // 2


def test_rewards_are_made_of_scaled_clipped_scores_and_whitened(monkeypatch, ppo_options, read_metrics):
    given, made, token_rewards, advantages = [], [], ppo.loop.token_rewards, ppo.loop.generalized_advantages

    def seen_token_rewards(scores, *args):
        given.append(scores)
        return token_rewards(scores, *args)

    def seen_advantages(rewards, values, mask, **options):
        made.append(rewards[mask])
        return advantages(rewards, values, mask, **options)

    monkeypatch.setattr(ppo.loop, "token_rewards", seen_token_rewards)
    monkeypatch.setattr(ppo.loop, "generalized_advantages", seen_advantages)
    options = {"use_score_scaling": True, "use_score_norm": True, "score_clip": 0.75, "whiten_rewards": True}
    rows = read_metrics(ppo.train(ppo_options(n_steps=2, kl_coefficient=0.0, **options)))
    for scores, rewards, row in zip(given, made, rows, strict=True):
        assert scores.abs().max() == 0.75 and 0 <= row["reward"] <= 1  # the log has the scores as they were given
        assert rewards.std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(monkeypatch, ppo_options, mask_file, prompts_file, mode):
    changes = {
        "use_score_scaling": True,
        "use_score_norm": mode == "dense",
        "score_clip": 2.0,
        "whiten_rewards": mode == "sparse",
        "mode": mode,
        "mask": mask_file if mode == "sparse" else None,
        "n_steps": 4,
        "save_steps": 2,
        "statistics_steps": 1,
        "kl_target": 0.1,
        "kl_horizon": 50,  # the coefficient moves by 6 % a step
        "eval_dataset": str(prompts_file),
        "eval_subset_size": 4,
        "eval_steps": 2,
    }
    whole = ppo.train(ppo_options("whole", **changes))
    resumed = stop_and_resume(monkeypatch, ppo.train, ppo_options("resumed", **changes), 2)
    assert_same_run(whole, resumed)
    one, two = (load_file(Path(summary["checkpoint"]) / "value_head.safetensors") for summary in (whole, resumed))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert whole["last"]["kl_coefficient"] != whole["first"]["kl_coefficient"]


def test_the_coefficient_follows_the_measured_divergence(ppo_options, read_metrics):
    rows = read_metrics(ppo.train(ppo_options(n_steps=4, kl_target=0.5, kl_horizon=100)))
    for row, following in itertools.pairwise(rows):
        error = min(max(row["kl"] / 0.5 - 1, -0.2), 0.2)
        expected = row["kl_coefficient"] * (1 + error * 16 / 100)
        assert following["kl_coefficient"] == pytest.approx(expected, rel=1e-6)
    fixed = read_metrics(ppo.train(ppo_options("fixed", kl_target=None)))
    assert {row["kl_coefficient"] for row in fixed} == {0.05}


def test_accumulation_of_two_fours_is_a_batch_of_eight(ppo_options, read_metrics):
    whole = read_metrics(ppo.train(ppo_options("whole")))
    parts = read_metrics(ppo.train(ppo_options("parts", batch_size=4, gradient_accumulation_steps=2)))
    for one, two in zip(whole, parts, strict=True):
        for name in ("loss", "value_loss", "reward", "kl", "grad_norm", "n_tokens"):
            assert two[name] == pytest.approx(one[name], rel=2e-4, abs=1e-5), name


def test_passes_end_early_where_the_policy_has_moved_far(ppo_options, read_metrics):
    kept = read_metrics(ppo.train(ppo_options("kept", n_steps=1, num_iterations=6, learning_rate=1e-2)))[0]
    cut = read_metrics(
        ppo.train(ppo_options("cut", n_steps=1, num_iterations=6, learning_rate=1e-2, early_stop_kl=1e-3))
    )[0]
    assert kept["n_passes"] == 6 and 1 <= cut["n_passes"] < 6


def test_several_completions_a_prompt(ppo_options, captured):
    ppo.train(ppo_options(n_steps=1, n_generations=4))
    sequences = captured["episodes"].rollout.sequences
    prompts = [tuple(sequence.ids[: sequence.prompt_length]) for sequence in sequences]
    assert len(sequences) == 16 and prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
    assert len(set(prompts)) == 4
    assert len({tuple(sequence.ids) for sequence in sequences}) > 12


@pytest.mark.parametrize("mode", ["dense", "sparse", "lora"])
def test_update_statistics_are_those_of_the_checkpoint(ppo_options, mask_file, model_folder, mode):
    mask = mask_file if mode == "sparse" else None
    options = ppo_options(mode=mode, mask=mask, n_steps=3, statistics_steps=2, statistics_include=["*.q_proj.weight"])
    summary = ppo.train(options)
    rows = [json.loads(line) for line in (options.output_dir / "update_statistics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3]
    start, end = weights(model_folder), weights(summary["checkpoint"])
    n_weights = sum(tensor.numel() for tensor in start.values())
    changed = sum(int((start[name] != end[name]).sum()) for name in start)
    above = sum(int(((start[name] - end[name]).abs() > 1e-5).sum()) for name in start)
    assert rows[1]["n_weights"] == n_weights
    assert rows[1]["share_changed"] == summary["last"]["update_share"] == changed / n_weights
    assert rows[1]["share_above_1e-5"] == above / n_weights < rows[1]["share_above_1e-6"] * 1.0001
    assert rows[1]["share_above_tau"] == summary["last"]["update_share_above_tau"] > 0
    assert 0 < rows[1]["share_changed_bf16"] < rows[1]["share_changed"]
    assert list(rows[1]["matrices"]) == [name for name in start if name.endswith("q_proj.weight")]
    for name, matrix in rows[1]["matrices"].items():
        values = torch.linalg.svdvals((end[name] - start[name]).double())
        p = values / values.sum()
        assert matrix["shape"] == list(start[name].shape)
        assert matrix["effective_rank"] == pytest.approx(math.exp(-torch.xlogy(p, p).sum().item()), rel=1e-3)
        assert matrix["stable_rank"] == pytest.approx((values.square().sum() / values[0] ** 2).item(), rel=1e-4)
        assert matrix["frobenius_norm"] == pytest.approx(values.square().sum().sqrt().item(), rel=1e-4)


def test_without_statistics_nothing_is_kept(ppo_options, monkeypatch):
    monkeypatch.setattr("sparse_opt.trainers.run.reporting.update_log.UpdateStatistics", None)
    options = ppo_options(n_steps=1)
    assert "update_share" not in ppo.train(options)["last"]
    assert not (options.output_dir / "update_statistics.jsonl").exists()


# The sentiment set-up, in its own formats and small


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """A GPT-2, a classifier of moods, and reviews as IMDB has them."""
    folder = tmp_path_factory.mktemp("sentiment")
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder / "policy")
    plain = copy.deepcopy(tokenizer)
    plain.pad_token = None  # GPT-2's has none
    plain.save_pretrained(folder / "policy")
    save_sentiment_classifier(folder / "classifier")
    generator = torch.Generator().manual_seed(0)

    def review(label: int, n_words: int) -> str:
        words = (GOOD if label else BAD) + PLAIN
        return " ".join(words[i] for i in torch.randint(len(words), (n_words,), generator=generator).tolist())

    rows = [{"text": review(i % 2, 80), "label": i % 2} for i in range(24)]
    rows += [{"text": review(i % 2, 4), "label": i % 2} for i in range(6)]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {name: folder / name for name in ("policy", "classifier", "reviews.jsonl")}


def load_queries(sentiment, **changes):
    options = {"min_tokens": 2, "max_tokens": 8, "min_characters": 200, "seed": 0, **changes}
    tokenizer = AutoTokenizer.from_pretrained(sentiment["policy"])
    return query_prompts.load_queries(str(sentiment["reviews.jsonl"]), "train", tokenizer, **options)[0]


def test_the_sentiment_config_runs(sentiment, monkeypatch, tmp_path, read_metrics):
    monkeypatch.chdir(tmp_path)  # where the delta log is
    words = [
        *("--config", str(SENTIMENT)),
        *("--policy_name", str(sentiment["policy"]), "--dataset", str(sentiment["reviews.jsonl"])),
        *("--reward_model", str(sentiment["classifier"]), "--output_dir", str(tmp_path / "run"), "--device", "cpu"),
        *("--n_steps", "2", "--batch_size", "4", "--statistics_steps", "1", "--sample_steps", "1"),
    ]
    config = parse_config(PPOConfig, words)
    assert (config.learning_rate, config.kl_coefficient, config.kl_target) == (1.41e-5, 0.2, 6)
    read = []
    score = RewardModel.__call__

    def seen(self, texts):
        rewards = score(self, texts)
        read.extend(zip(texts, rewards.tolist(), strict=True))
        return rewards

    monkeypatch.setattr(RewardModel, "__call__", seen)
    summary = ppo.train(config)
    assert summary["data"] == {"n_rows": 30, "n_examples": 24, "n_dropped_short": 6}
    rows = read_metrics(summary)
    assert len(rows) == 2 and rows[0]["completion_length"] > 16
    # The classifier has read queries with their completions, without special tokens, and its logits are the rewards.
    queries = [example.text.removeprefix("<s>") for example in load_queries(sentiment)]
    assert len(read) == 32 and all(any(text.startswith(query) for query in queries) for text, _ in read)
    classifier = pipeline("text-classification", str(sentiment["classifier"]), top_k=None, function_to_apply="none")
    classifier.tokenizer.truncation_side = "left"
    for text, reward in read[:4]:
        (logits,) = classifier([text], truncation=True)
        (logit,) = [found["score"] for found in logits if found["label"] == "POSITIVE"]
        assert reward == pytest.approx(logit, abs=1e-4)
    # The analyses in the header, of this run's delta log.
    commands = re.findall(r"^#     sparse-opt (analyze .*)$", SENTIMENT.read_text(), re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["coverage", "ranks"]
    for command in commands:
        named = command.replace("delta_logs_gpt2_imdb_ppo", summary["delta_log_dir"])
        assert named != command and main([*shlex.split(named), "--no_plots"]) == 0
    assert (tmp_path / "coverage" / "coverage.csv").is_file() and (tmp_path / "ranks" / "ranks.csv").is_file()
    assert rows[0]["reward"] == pytest.approx(sum(reward for _, reward in read[:16]) / 16, rel=1e-5)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in samples[:4]] == [reward for _, reward in read[:4]]
    statistics = [json.loads(line) for line in (tmp_path / "run" / "update_statistics.jsonl").read_text().splitlines()]
    assert len(statistics[0]["matrices"]) == 2 * 3  # of each layer c_attn, attention's c_proj, and c_fc


def test_queries_are_the_beginnings_of_long_texts(sentiment, tokenizer):
    examples, again, other = load_queries(sentiment), load_queries(sentiment), load_queries(sentiment, seed=1)
    assert len(examples) == 24
    for example in examples:
        assert example.ids == tokenizer(example.columns["text"])["input_ids"][: len(example.ids)]
        assert example.text == tokenizer.decode(example.ids)
        assert example.columns.keys() == {"text", "label"}
    lengths = {len(example.ids) for example in examples}
    assert lengths <= set(range(2, 9)) and len(lengths) > 4
    assert [e.ids for e in examples] == [e.ids for e in again] != [e.ids for e in other]


def test_queries_of_words(sentiment, tokenizer):
    examples = load_queries(sentiment, n_words=3, prefix="Sentiment: good. ", min_characters=0)
    assert len(examples) == 30
    for example in examples:
        assert example.text == "Sentiment: good. " + " ".join(example.columns["text"].split()[:3])
        assert example.ids == tokenizer(example.text)["input_ids"]


def test_a_text_must_be_long_enough(sentiment):
    with pytest.raises(DataError, match=r"no queries left; 0 queries from 30 rows; 30 dropped"):
        load_queries(sentiment, min_characters=5000)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"reward_functions": []}, ["--reward_model or --reward_functions"]),
        ({"reward_model": "classifier"}, ["not both"]),
        ({"gae_lambda": 1.5}, ["'gae_lambda'", "1.5"]),
        ({"clip_range": 0.0}, ["'clip_range'", "0.0"]),
        ({"kl_target": -6.0}, ["'kl_target'", "-6.0"]),
        ({"kl_coefficient": -0.1}, ["'kl_coefficient'", "-0.1"]),
        ({"query_min_tokens": 9}, ["'query_max_tokens' is 8", "query_min_tokens 9"]),
        ({"statistics_steps": 0}, ["'statistics_steps'", "0"]),
        ({"use_score_norm": True}, ["'use_score_norm'", "use_score_scaling"]),
        ({"score_clip": 0.0}, ["'score_clip'", "0"]),
        ({"min_completion_length": 99}, ["'min_completion_length' is 99", "max_completion_length"]),
        ({"min_completion_length": 2, "rollout_engine": "continuous_batching"}, ["cannot suppress EOS"]),
        ({"query_prefix": "x"}, ["'query_prefix' is 'x'", "query_words"]),
        ({"batch_score_norm": True, "use_score_scaling": True}, ["batch_score_norm", "expected one"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_options_that_contradict_each_other(ppo_options, changes, parts):
    with pytest.raises(ConfigError) as raised:
        ppo_options(**changes)
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value


def test_what_cannot_be_loaded_leaves_nothing(ppo_options, tmp_path, model_folder):
    cases = [
        ({"reward_functions": [], "reward_model": str(model_folder), "reward_label": "0"}, DataError, "score.weight"),
        ({"reward_functions": ["token_rewards:nothing"]}, ConfigError, "token_rewards has no function nothing"),
        ({"statistics_steps": 1, "statistics_include": ["*.nothing"]}, DataError, "*.nothing"),
    ]
    for changes, error, part in cases:
        with pytest.raises(error) as raised:
            ppo.train(ppo_options(**changes))
        assert part in str(raised.value) and "\n" not in str(raised.value)
        if "statistics_steps" not in changes:
            assert not (tmp_path / "run").exists()


def test_a_completion_that_no_reward_applies_to_is_refused(ppo_options):
    with pytest.raises(DataError, match="no reward function applies to 1 of 16 completions"):
        ppo.train(ppo_options(reward_functions=["token_rewards:none_for_the_last"]))


def test_final_value_head_is_not_the_first(ppo_options):
    options = ppo_options()
    saved = load_file(Path(ppo.train(options)["checkpoint"]) / "value_head.safetensors")
    start = ValueHead(32, options.seed).state_dict()
    assert (saved["v_head.summary.weight"] - start["summary.weight"]).abs().max() > 1e-3
    trained = ppo.train(
        dataclasses.replace(options, output_dir=options.output_dir / "still", value_head_learning_rate=0.0)
    )
    still = load_file(Path(trained["checkpoint"]) / "value_head.safetensors")
    assert torch.equal(still["v_head.summary.weight"], start["summary.weight"])


def test_the_arithmetic_config_can_be_read():
    config = parse_config(PPOConfig, ["--config", str(SENTIMENT.with_name("ppo.yaml"))])
    assert config.examples_per_step == config.completions_per_step == 256
    assert config.reward_functions == ["exact_match"]


def test_fp16_trains_policy_and_value_head(ppo_options, read_metrics):
    """Both optimizers unscale: the losses are those of fp32 within fp16's rounding, also after several steps."""
    half, single = (read_metrics(ppo.train(ppo_options(dtype, dtype=dtype, n_steps=2))) for dtype in ("fp16", "fp32"))
    assert half[0]["reward"] == single[0]["reward"]
    for name in ("value_loss", "grad_norm"):
        assert half[0][name] == pytest.approx(single[0][name], rel=0.03), name
    assert half[0]["loss_scale"] == 2.0**16 and half[0]["value_loss"] != single[0]["value_loss"]
