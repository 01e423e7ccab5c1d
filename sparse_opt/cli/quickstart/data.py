"""Inputs of the quickstart: a tiny language model, its tokenizer, and questions with a right and a wrong answer.

The task is "Which is larger, 37 or 82?". The demonstrations for SFT answer with either number at random, so that SFT
teaches only the form of an answer; the preference pairs teach which answer is right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...files import written_aside

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

_WORDINGS = (
    "Which is larger, {a} or {b}?",
    "Which number is larger: {a} or {b}?",
    "Compare {a} and {b}. Which is larger?",
)


@dataclass(frozen=True)
class Question:
    """A question about two different numbers from 10 to 99."""

    prompt: str
    a: int
    b: int

    @property
    def chosen(self) -> str:
        return f" {max(self.a, self.b)}"

    @property
    def rejected(self) -> str:
        return f" {min(self.a, self.b)}"


def make_questions(n: int, generator: random.Random) -> list[Question]:
    """`n` questions, no two about the same pair of numbers, so that a part of them can be held out.

    Raises:
        ValueError: n is larger than 4005, the number of pairs.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    questions = []
    for low, high in generator.sample(pairs, n):
        a, b = (low, high) if generator.random() < 0.5 else (high, low)
        questions.append(Question(generator.choice(_WORDINGS).format(a=a, b=b), a, b))
    return questions


def demonstrations(questions: Iterable[Question], generator: random.Random) -> list[dict[str, str]]:
    """Rows in TRL's prompt-completion format, each answered right or wrong with equal chance."""
    return [{"prompt": q.prompt, "completion": generator.choice((q.chosen, q.rejected))} for q in questions]


def preferences(questions: Iterable[Question]) -> list[dict[str, str]]:
    """Rows in TRL's preference format."""
    return [{"prompt": q.prompt, "chosen": q.chosen, "rejected": q.rejected} for q in questions]


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    with written_aside(path) as aside:
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer(questions: Iterable[Question]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the questions' text; every digit is its own token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # Numbers share the embeddings of their digits, so that training on 37 generalises to 38.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((q.prompt + q.chosen for q in questions), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 1.9 million fp32 parameters with random weights; the embedding is tied to the output."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
