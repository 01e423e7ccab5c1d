"""Rewards from a classifier: its logits, whatever the batch; the label asked for; what cannot be one."""

from __future__ import annotations

import pytest
import torch
from small_classifiers import save_sentiment_classifier
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.trainers.rewards.classifier import RewardModel

CPU = torch.device("cpu")
TEXTS = [
    "the film was good",
    "bad",
    "i loved it and the story was superb fun",
    "a very dull film it was boring and awful",
]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save_sentiment_classifier(tmp_path_factory.mktemp("reward") / "classifier")


def reward_model(folder, label="POSITIVE", rows_per_pass=8, dtype="fp32") -> RewardModel:
    return RewardModel(str(folder), label, device=CPU, dtype=dtype, rows_per_pass=rows_per_pass)


def own_logits(folder, texts):
    """[n, labels] of the texts one by one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**tokenizer([text], return_tensors="pt")).logits for text in texts])


@pytest.mark.parametrize("rows_per_pass", [1, 3, 8])
def test_the_reward_is_the_labels_logit(classifier, rows_per_pass):
    expected = own_logits(classifier, TEXTS)
    for label, column in (("POSITIVE", 1), ("negative", 0), ("0", 0)):
        rewards = reward_model(classifier, label, rows_per_pass)(TEXTS)
        assert rewards.shape == (4,) and rewards.dtype == torch.float32
        # Padding changes the order of sums over 16 products, in a handful of layers.
        torch.testing.assert_close(rewards, expected[:, column], rtol=1e-4, atol=1e-5)
    assert rewards.requires_grad is False


def test_a_difference_of_logits(classifier):
    expected = own_logits(classifier, TEXTS)
    model = RewardModel(str(classifier), "POSITIVE", against="NEGATIVE", device=CPU, dtype="fp32", rows_per_pass=8)
    torch.testing.assert_close(model(TEXTS), expected[:, 1] - expected[:, 0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="'reward_label_against' is 'NEUTRAL'"):
        RewardModel(str(classifier), "POSITIVE", against="NEUTRAL", device=CPU, dtype="fp32", rows_per_pass=8)


def test_the_classifier_of_these_tests_tells_moods_apart(classifier):
    good, bad, better, worse = reward_model(classifier)(TEXTS).tolist()
    assert min(good, better) > max(bad, worse)


def test_a_text_that_is_too_long_keeps_its_end(classifier):
    ending = "i loved it and the story was superb fun"
    long_text = "bad " * 40 + ending
    kept = "bad " * 15 + ending  # 24 words
    torch.testing.assert_close(reward_model(classifier)([long_text]), reward_model(classifier)([kept]))


def test_a_causal_classifier_without_padding_token(tmp_path, tokenizer):
    """Such a model reads its last token, which it has to find."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_labels=1, pad_token_id=None, initializer_range=0.5,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    unpadded = AutoTokenizer.from_pretrained(tmp_path)
    unpadded.pad_token = None
    unpadded.save_pretrained(tmp_path)
    texts = ["What is 3?", "What is 3 plus 5 plus 9?", "It is 8."]
    torch.testing.assert_close(
        reward_model(tmp_path, "0")(texts), own_logits(tmp_path, texts)[:, 0], rtol=1e-4, atol=1e-5
    )


def test_a_label_that_is_not_there_is_refused(tmp_path, classifier):
    folder = save_sentiment_classifier(tmp_path / "plain", labels=("LABEL_0", "LABEL_1", "LABEL_2"))
    with pytest.raises(ConfigError, match=r"'reward_label' is 'POSITIVE'.* has the labels 0 LABEL_0, 1 LABEL_1, 2"):
        reward_model(folder)
    with pytest.raises(ConfigError, match=r"'reward_label' is '2'.* has the labels 0 NEGATIVE, 1 POSITIVE"):
        reward_model(classifier, "2")


def test_what_is_no_classifier_is_refused(model_folder, tmp_path):
    with pytest.raises(DataError, match=r"no weights for 1 tensors of a reward model, among them score\.weight"):
        reward_model(model_folder, "0")
    with pytest.raises(DataError, match="cannot load a reward model from .*nowhere"):
        reward_model(tmp_path / "nowhere")
