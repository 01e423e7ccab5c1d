"""Small sequence classifiers on disk, with a tokenizer of their own that is not the policy's."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

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


def save_sentiment_classifier(folder: Path, labels: tuple[str, ...] = ("NEGATIVE", "POSITIVE")) -> Path:
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
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    if len(labels) == 2:
        _train(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
