"""Inputs of the end-to-end benchmark: a model of realistic shape with random weights, texts of exact length, a mask."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from ...models import make_model, model_config

N_WORDS = 1000


def words_config(shape: str, max_length: int) -> Any:
    """The configuration of a model of this shape for the tokens of `word_tokenizer`."""
    tokenizer = word_tokenizer()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model_config(shape, max_length, bos_token_id=None, eos_token_id=eos, pad_token_id=pad)


def make_checkpoint(folder: Path, config: Any, *, seed: int, device: torch.device) -> None:
    """A model with random bf16 weights, and a tokenizer of one token a word, in Hugging Face format."""
    model: Any = make_model(config, device, seed)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the runs are other processes on the same GPU


def word_tokenizer() -> Any:
    """A tokenizer whose tokens are the words w0 ... w999, so that a text's length in tokens is known."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(N_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def preference_pairs(n: int, sequence_length: int, seed: int, n_prompt: int | None = None) -> list[dict[str, str]]:
    """Pairs of random words; prompt, completion and the closing EOS make ``sequence_length`` tokens.

    Args:
        n_prompt: tokens of the prompt; None is an eighth of the sequence.
    """
    generator = random.Random(seed)
    n_prompt = sequence_length // 8 if n_prompt is None else n_prompt
    n_completion = sequence_length - n_prompt - 1

    def words(count: int) -> str:
        return " ".join(f"w{generator.randrange(N_WORDS)}" for _ in range(count))

    return [
        {"prompt": words(n_prompt), "chosen": f" {words(n_completion)}", "rejected": f" {words(n_completion)}"}
        for _ in range(n)
    ]


def write_pairs(path: Path, pairs: list[dict[str, str]]) -> None:
    """One JSON object a line, as `trainers.batches` reads it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
