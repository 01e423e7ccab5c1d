"""`sparse-opt train ppo`: its arithmetic compared with numpy in fp64, and whole runs on a CPU."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip
from safetensors.torch import load_file
from small_models import rows_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from sparse_opt.analysis import get_layer_rank_stats
from sparse_opt.cli.main import main
from sparse_opt.delta import DeltaLog
from sparse_opt.errors import ConfigError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers.recipes import ppo

# One worker makes what the tests of this file share.
pytestmark = pytest.mark.xdist_group("ppo")

EPS = 2**-23

# The arithmetic


class Completions:
    """Ragged completions of 1 to 11 tokens at random columns; outside them, numbers that must not matter."""

    def __init__(self, seed: int, rows: int = 6, columns: int = 11):
        generator = np.random.default_rng(seed)
        self.spans = [(0, columns), (4, 5)]  # all columns, and a single token
        while len(self.spans) < rows:
            start = int(generator.integers(0, columns))
            self.spans.append((start, int(generator.integers(start + 1, columns + 1))))
        self.tokens = [(row, t) for row, (start, end) in enumerate(self.spans) for t in range(start, end)]
        self.mask = torch.zeros(rows, columns, dtype=torch.bool)
        for row, t in self.tokens:
            self.mask[row, t] = True
        # Rounded to fp32 once, so that both sides begin with the same numbers.
        self.arrays = {
            name: generator.normal(scale=scale, size=(rows, columns)).astype(np.float32).astype(np.float64)
            for name, scale in {"logprobs": 1, "old": 1, "ref": 1, "values": 2, "old_values": 2, "rewards": 3}.items()
        }
        self.scores = generator.normal(size=rows).astype(np.float32).astype(np.float64)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.tensor(self.arrays[name], dtype=torch.float32)


@pytest.fixture(params=range(4), ids="seed{}".format)
def batch(request) -> Completions:
    return Completions(request.param)


def test_token_rewards(batch):
    expected = np.zeros(batch.mask.shape)
    for row, t in batch.tokens:
        expected[row, t] = -0.3 * (batch.arrays["logprobs"][row, t] - batch.arrays["ref"][row, t])
    for row, (_, end) in enumerate(batch.spans):
        expected[row, end - 1] += batch.scores[row]
    scores = torch.tensor(batch.scores)
    found = ppo.token_rewards(scores, batch.tensor("logprobs"), batch.tensor("ref"), batch.mask, 0.3)
    # Three roundings of numbers up to 6.
    np.testing.assert_allclose(found.double(), expected, rtol=0, atol=3 * 6 * EPS)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_and_returns(batch, gamma, lam):
    """A_t is the sum over later tokens of (gamma lam)^k delta_(t+k), equation 16 of the paper: no recursion."""
    expected, expected_returns = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)
    rewards, values = batch.arrays["rewards"], batch.arrays["values"]
    for row, (start, end) in enumerate(batch.spans):
        later = [values[row, t + 1] if t + 1 < end else 0.0 for t in range(start, end)]
        deltas = [rewards[row, t] + gamma * later[t - start] - values[row, t] for t in range(start, end)]
        for t in range(start, end):
            expected[row, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t - start :]))
            expected_returns[row, t] = expected[row, t] + values[row, t]
    found = ppo.generalized_advantages(batch.tensor("rewards"), batch.tensor("values"), batch.mask, gamma, lam)
    for ours, theirs in zip(found, (expected, expected_returns), strict=True):
        # 11 steps of 5 roundings each, of sums that stay below 11 * 20.
        np.testing.assert_allclose(ours.double(), theirs, rtol=0, atol=11 * 5 * 220 * EPS)


def test_whitening(batch):
    inside = np.array([batch.arrays["rewards"][token] for token in batch.tokens])
    expected = np.zeros(batch.mask.shape)
    for token in batch.tokens:
        expected[token] = (batch.arrays["rewards"][token] - inside.mean()) / math.sqrt(inside.var(ddof=1) + 1e-8)
    found = ppo.whiten(batch.tensor("rewards"), batch.mask)
    # A mean and a variance of at most 66 numbers, added pairwise, and four roundings of numbers up to 10.
    np.testing.assert_allclose(found.double(), expected, rtol=0, atol=20 * 10 * EPS)


def test_the_kl_coefficient_adapts():
    for kl, error in [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (5.7, -0.05), (-3.0, -0.2), (0.0, -0.2)]:
        expected = 0.2 * (1 + error * 128 / 10000)
        assert ppo.adapted_kl_coef(0.2, kl, 128, target=6.0, horizon=10000.0) == pytest.approx(expected, rel=1e-12)


def test_policy_loss_and_its_gradient(batch):
    total, n_clipped, grad = 0.0, 0, np.zeros(batch.mask.shape)
    for token in batch.tokens:
        ratio = math.exp(batch.arrays["logprobs"][token] - batch.arrays["old"][token])
        advantage = batch.arrays["rewards"][token]
        bounded = min(max(ratio, 0.8), 1.2)
        total += -min(ratio * advantage, bounded * advantage)
        n_clipped += bounded * advantage < ratio * advantage
        grad[token] = 0.0 if bounded * advantage < ratio * advantage else -advantage * ratio / len(batch.tokens)
    logprobs = batch.tensor("logprobs").requires_grad_()
    loss, clipped = ppo.policy_loss(logprobs, batch.tensor("old"), batch.tensor("rewards"), batch.mask, 0.2)
    loss.backward()
    # Ratios up to e^6 times advantages up to 10: the exponential's argument and value are rounded, 8 roundings in all.
    assert loss.item() == pytest.approx(total / len(batch.tokens), abs=8 * math.exp(6) * 10 * EPS)
    assert clipped.item() == pytest.approx(n_clipped / len(batch.tokens)) and n_clipped > 0
    np.testing.assert_allclose(logprobs.grad.double(), grad, rtol=20 * EPS, atol=0)


def test_value_loss_and_its_gradient(batch):
    values, old, returns = (batch.arrays[name] for name in ("values", "old_values", "rewards"))
    total, n_clipped, grad, n = 0.0, 0, np.zeros(batch.mask.shape), len(batch.tokens)
    for token in batch.tokens:
        bounded = min(max(values[token], old[token] - 0.2), old[token] + 0.2)
        plain, clipped = (values[token] - returns[token]) ** 2, (bounded - returns[token]) ** 2
        total += 0.5 * max(plain, clipped) / n
        n_clipped += clipped > plain
        grad[token] = 0.0 if clipped > plain else (values[token] - returns[token]) / n
    tensor = batch.tensor("values").requires_grad_()
    loss, share = ppo.value_loss(tensor, batch.tensor("old_values"), batch.tensor("rewards"), batch.mask, 0.2)
    loss.backward()
    # Squares of differences up to 16, of four roundings each.
    assert loss.item() == pytest.approx(total, abs=4 * 256 * EPS)
    assert share.item() == pytest.approx(n_clipped / n) and n_clipped > 0
    np.testing.assert_allclose(tensor.grad.double(), grad, rtol=0, atol=4 * 16 * EPS / n)


# Runs

GOOD = ["good", "great", "superb", "loved", "fun"]
BAD = ["bad", "awful", "boring", "hated", "dull"]
PLAIN = ["the", "film", "was", "and", "i", "it", "story", "actors", "a", "very"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *PLAIN]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=24,
        model_input_names=["input_ids", "attention_mask"],
    )


def save_sentiment_classifier(folder: Path) -> None:
    """A DistilBERT of one layer, trained for a moment to tell GOOD words from BAD ones."""
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    model = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=24,
            dim=16,
            hidden_dim=32,
            n_layers=1,
            n_heads=2,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    _train(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train(model, tokenizer) -> None:
    model.eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        labels = torch.randint(2, (32,), generator=generator)
        texts = [
            " ".join(
                words[i] if mood else PLAIN[i]
                for i, mood in zip(
                    torch.randint(5, (6,), generator=generator).tolist(),
                    [True, *torch.randint(2, (5,), generator=generator).tolist()],
                    strict=True,
                )
            )
            for words in ((GOOD if label else BAD) for label in labels.tolist())
        ]
        loss = model(**tokenizer(texts, return_tensors="pt", padding=True), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a GPT-2, a classifier of moods, and reviews as IMDB has them."""
    folder = tmp_path_factory.mktemp("sentiment")
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "[EOS]"})
    tokenizer.pad_token = None  # GPT-2's has none
    torch.manual_seed(0)
    sizes = {"n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    save_sentiment_classifier(folder / "classifier")
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(GOOD + BAD + PLAIN, k=20)), "label": 0} for _ in range(40)]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def words(files, tmp_path):
    """`words("run", lam=0.9)`: the command line of a small run in that folder of the test."""

    def make(folder: str = "run", **changes: object) -> list[str]:
        options = {
            "policy_name": files / "gpt2",
            "reward_model_name": files / "classifier",
            "dataset_name": files / "reviews.jsonl",
            "output_dir": tmp_path / folder,
            "num_updates": 4,
            "batch_size": 16,
            "max_new_tokens": 8,
            "min_new_tokens": 2,
            "learning_rate": 2e-3,
            "dtype": "float32",
            "device": "cpu",
            **changes,
        }
        return ["train", "ppo", *(f"--{name}={value}" for name, value in options.items())]

    return make


@pytest.fixture
def run(words, tmp_path, capfd):
    """Runs such a command line and returns the rows of its metrics."""

    def call(folder: str = "run", **changes: object) -> list[dict]:
        code = main(words(folder, **changes))
        assert code == 0, capfd.readouterr().err
        return rows_of(tmp_path / folder / "metrics.jsonl")

    return call


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize("changes", [{}, {"mask_density": 0.2, "learning_rate": 8e-3}], ids=["dense", "sparse"])
def test_the_reward_rises(run, files, tmp_path, changes):
    rows = run(num_updates=20, rank_log_every=10, init_kl_coef=0.05, max_grad_norm=1.0, **changes)
    rewards = [row["reward"] for row in rows]
    # Rewards begin at 0 and end below 10, with a deviation of 9 in a batch of 16.
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 2.5
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-4) and rows[-1]["objective/kl"] > 0.3
    before, after = weights(files / "gpt2"), weights(tmp_path / "run")
    changed = {name: before[name] != after[name] for name in before}
    if changes:
        mask = MaskSet.random(before, density=0.2)
        inactive = {name: ~mask.bool(name) if name in mask else torch.ones_like(c) for name, c in changed.items()}
        assert not any((changed[name] & inactive[name]).any() for name in before)
    statistics = rows_of(tmp_path / "run" / "update_statistics.jsonl")
    assert [row["step"] for row in statistics] == [10, 20]
    share = sum(int(c.sum()) for c in changed.values()) / sum(c.numel() for c in changed.values())
    assert statistics[-1]["share_changed"] == rows[-1]["update_share_changed"] == pytest.approx(share, rel=1e-3)
    (name, matrix), *_ = statistics[-1]["matrices"].items()
    (stats,) = get_layer_rank_stats({name: after[name]}, {name: before[name]}).values()
    assert matrix["effective_rank"] == pytest.approx(stats.effective_rank, rel=1e-2)
    samples = rows_of(tmp_path / "run" / "samples.jsonl")
    assert [row["step"] for row in samples] == [1, 2, 3, 5, 10, 15, 20]
    assert all(2 <= len(row["completion"].split()) <= 8 for row in samples)


def test_the_first_update_is_the_plain_formula(run, files, tmp_path, monkeypatch):
    """Log-probabilities, values and divergence, from the model's own logits, one unpadded row at a time."""
    seen = {}
    update = ppo.Policy.update

    def keep(policy, batch, before):
        seen.update(batch=batch, before=before, head={n: p.clone() for n, p in policy.head.state_dict().items()})
        return update(policy, batch, before)

    monkeypatch.setattr(ppo.Policy, "update", keep)
    run(num_updates=1, target_sentiment="none", top_k=0, top_p=1.0)
    model, batch = AutoModelForCausalLM.from_pretrained(files / "gpt2").eval(), seen["batch"]
    mask = batch.completion_mask[:, batch.first_trained :]
    for row in range(len(mask)):
        ids = batch.input_ids[row][batch.attention_mask[row].bool()]
        n = int(mask[row].sum())
        output = model(ids[None], output_hidden_states=True)
        logprobs = output.logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[-n:, 0]
        values = output.hidden_states[-1][0, -n - 1 : -1] @ seen["head"]["weight"][0] + seen["head"]["bias"]
        # Log-probabilities of about -3 and values of about 1, of states that padding rounds otherwise.
        torch.testing.assert_close(seen["before"][0][row, mask[row]], logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(seen["before"][1][row, mask[row]], values, rtol=0, atol=1e-4)
    assert (mask.sum(1) < 8).any()  # some completions ended early


def test_scores_are_those_of_the_classifier(run, files, tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(files / "classifier").eval()
    tokenizer = AutoTokenizer.from_pretrained(files / "classifier")
    for folder, changes in {"against": {}, "alone": {"reward_label_against": "none"}}.items():
        run(folder, num_updates=1, **changes)
        (sample,) = rows_of(tmp_path / folder / "samples.jsonl")
        text = " ".join(word for word in sample["completion"].split() if word[0] != "[")  # special tokens
        logits = classifier(**tokenizer([text], return_tensors="pt")).logits[0]
        expected = logits[1] - (0 if changes else logits[0])
        assert sample["reward"] == pytest.approx(expected.item(), abs=1e-4)
        # "Sentiment: Positive review." is five unknown words of this tokenizer.
        assert sample["prompt"].split().count("[UNK]") == 5 and len(sample["prompt"].split()) == 13


@pytest.mark.parametrize("changes", [{}, {"mask_density": 0.3, "dtype": "bfloat16"}], ids=["dense", "sparse"])
def test_a_stopped_run_goes_on_to_the_same_bits(run, words, tmp_path, monkeypatch, changes, capfd):
    changes |= {
        "num_updates": 6,
        "save_ckpt_every": 2,
        "rank_log_every": 1,
        "horizon": 100,
        "delta_log_steps": "every:2",
    }
    whole = run("whole", delta_log_dir=tmp_path / "whole_log", **changes)
    update, calls = ppo.Policy.update, []

    def stop_in_the_fifth(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return update(*args)

    changes["delta_log_dir"] = tmp_path / "log"
    with monkeypatch.context() as patch:
        patch.setattr(ppo.Policy, "update", stop_in_the_fifth)
        assert main(words("parts", **changes)) == 130
    error = capfd.readouterr().err
    assert "interrupted after update 4 of 6" in error and "checkpoint-4 is kept" in error
    assert main(words("parts", **changes)) == 2 and "--resume" in capfd.readouterr().err
    assert main([*words("parts", **changes), "--resume", "--lam=0.9"]) == 2
    assert "--lam is 0.9, expected 0.95" in capfd.readouterr().err
    checkpoint = tmp_path / "parts" / "checkpoint-4" / "state.pt"
    flip(checkpoint, 1000)
    assert main([*words("parts", **changes), "--resume"]) == 1
    assert "checkpoint-4: damaged: state.pt" in capfd.readouterr().err
    flip(checkpoint, 1000)
    resumed = run("parts", resume="true", **changes)
    for row in (*whole, *resumed):
        del row["time/ppo/total"]
    assert resumed == whole
    for name in ("samples.jsonl", "update_statistics.jsonl"):
        assert rows_of(tmp_path / "whole" / name) == rows_of(tmp_path / "parts" / name)
    for name in ("model.safetensors", "value_head.safetensors"):
        one, two = (load_file(tmp_path / folder / name) for folder in ("whole", "parts"))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    one, two = DeltaLog.open(tmp_path / "whole_log"), DeltaLog.open(tmp_path / "log")
    assert list(one.steps) == list(two.steps) == [0, 2, 4, 6] and one.digest(6) == two.digest(6)


def test_a_loss_that_is_nan_stops_the_run(words, monkeypatch, capfd):
    monkeypatch.setattr(ppo, "whiten", lambda values, mask: values * math.nan)
    assert main(words()) == 1
    error = capfd.readouterr().err
    assert "the loss of update 1 is nan" in error and "no checkpoint was saved" in error and error.count("\n") == 1


# Invalid calls


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo_epoch": 1}, "unknown option 'ppo_epoch'.*nearest is 'ppo_epochs'"),
        ({"lam": 1.5}, "--lam is 1.5, expected 0 to 1"),
        ({"mask": "m.safetensors", "mask_density": 0.1}, "exclude each other"),
        ({"resume": "true"}, "--resume: .* has no checkpoint"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_call_is_refused_before_a_model_is_loaded(words, changes, message):
    with pytest.raises(ConfigError, match=message):
        ppo.parse(words(**changes)[2:])


def test_what_does_not_fit_is_refused_in_one_line(words, files, tmp_path, capfd):
    tokenizer = AutoTokenizer.from_pretrained(files / "gpt2")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=None, **sizes)
    ).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")  # without a padding token, which a causal classifier needs
    causal = {"reward_model_name": tmp_path / "llama", "reward_label": "LABEL_0", "reward_label_against": "none"}
    assert main([w for w in words("causal", num_updates=1, mask_density=0.1, **causal) if "rate" not in w]) == 0
    assert f"learning rate {5e-6 * 0.1**-0.75:.3g}" in capfd.readouterr().out
    (tmp_path / "other.jsonl").write_text('{"review": "a"}\n')
    cases = {
        "--reward_label is HAPPY, expected a label of": (2, {"reward_label": "HAPPY"}),
        "expected a column text, found review": (1, {"dataset_name": tmp_path / "other.jsonl"}),
        "max_position_embeddings, 48": (2, {"max_new_tokens": 40}),
        "m.safetensors: no such mask file": (1, {"mask": "m.safetensors"}),
    }
    for message, (code, changes) in cases.items():
        found = main(words("refused", **changes)), capfd.readouterr().err
        assert found[0] == code and message in found[1] and found[1].count("\n") == 1, found
