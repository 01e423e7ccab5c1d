"""Rewards from a sequence classifier: the logit of one of its labels, as in TRL's sentiment example.

With a second label the reward is the difference of the two logits, the log-odds of the first against the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError, DataError

from ..data.order import chunks
from ..policy.models import DTYPES
from ..policy.pretrained import load_pretrained, load_tokenizer_from, max_positions

# Tokenizers without a length limit report a huge one.
_NO_LIMIT = 10**9


class RewardModel:
    """Computes the logit of a label for texts, with a frozen classifier and its own tokenizer.

    A text longer than the classifier's limit is truncated at its start, so that the completion is kept.

    Args:
        name: hub name or local folder of a sequence classifier.
        label: its label whose logit is the reward, by name (in any case) or by number.
        against: label whose logit is subtracted; None for none.
        device: the device that it runs on.
        dtype: dtype of its weights.
        rows_per_pass: texts per forward pass.

    Raises:
        DataError: the model does not exist, or lacks weights of a classifier (a causal model has no such head).
        ConfigError: the model has no such label.
    """

    def __init__(
        self,
        name: str,
        label: str,
        *,
        against: str | None = None,
        device: torch.device,
        dtype: Literal["bf16", "fp32"],
        rows_per_pass: int,
    ):
        from transformers import AutoModelForSequenceClassification

        model = load_pretrained(AutoModelForSequenceClassification, name, "a reward model", dtype=DTYPES[dtype])
        self.tokenizer = load_tokenizer_from(name)
        self.label = label_index(model.config, label, name)
        self.against = None if against is None else label_index(model.config, against, name, "reward_label_against")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self.rows_per_pass = rows_per_pass
        self._set_padding(name)
        limit = min(max_positions(model.config) or _NO_LIMIT, self.tokenizer.model_max_length)
        self.max_length = limit if limit < _NO_LIMIT else None
        self.tokenizer.truncation_side = "left"

    def _set_padding(self, name: str) -> None:
        """Set the pad id, by which classifiers on causal models find the last token that is not padding."""
        if self.tokenizer.pad_token is None:
            if self.tokenizer.eos_token is None:
                raise DataError(f"reward model {name}: its tokenizer has neither a padding token nor an EOS")
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """One reward for each text: [len(texts)] fp32 on the device."""
        logits = torch.cat([self._logits(part) for part in chunks(texts, self.rows_per_pass)]).float()
        reward = logits[:, self.label]
        return reward if self.against is None else reward - logits[:, self.against]

    def _logits(self, texts: Sequence[str]) -> Tensor:
        inputs = self.tokenizer(
            list(texts),
            return_tensors="pt",
            padding=True,
            truncation=self.max_length is not None,
            max_length=self.max_length,
        )
        logits: Tensor = self.model(**inputs.to(self.device)).logits
        return logits


def label_index(config: Any, label: str, name: str, option: str = "reward_label") -> int:
    """The index of a classifier's label, given by index or name; `option` is that of the label, for messages.

    Raises:
        ConfigError: there is no such label; the message lists the labels.
    """
    names = {int(index): str(text) for index, text in config.id2label.items()}
    if label.isdecimal() and int(label) in names:
        return int(label)
    matches = [index for index, text in names.items() if text.lower() == label.lower()]
    if len(matches) != 1:
        listed = ", ".join(f"{index} {text}" for index, text in sorted(names.items()))
        raise ConfigError(f"option '{option}' is '{label}': the reward model {name} has the labels {listed}")
    return matches[0]
