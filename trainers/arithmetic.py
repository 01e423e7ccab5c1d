"""Generated arithmetic: a small Llama with its tokenizer, sums such as "17+25=", and demonstrations to start from.

    python -m sparse_opt.trainers.arithmetic --output_dir arithmetic

writes, without downloads and the same for the same seed:

| file | rows |
|---|---|
| model/ | a Llama with random weights and its tokenizer, as transformers loads them |
| data/demonstrations.jsonl | prompt, completion: for SFT; the completion is right with probability `p_right` |
| data/train.jsonl | prompt, answer: for rollouts |
| data/test.jsonl | prompt, answer: questions that no other file has |
| data/preferences.jsonl | prompt, chosen, rejected: the right answer and a near miss |
| data/explanations.jsonl | question, solution, explanation: for a teacher; right with probability `p_right` |

SFT on the demonstrations teaches the form of an answer and part of the skill: a sampled answer is then right about as
often as the demonstrations are, or less, so that reinforcement learning can improve it; examples/configs/sft.yaml does
that.

A near miss is the right answer to a similar question, in which one operand differs by 1 or 10; a wrong explanation
explains that question.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparse_opt.errors import ConfigError
from sparse_opt.files import check_new_folder, new_folder, save_model, writing

from .console import run_module

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# One token each, so that a small model can learn to write them: the tags of reasoning models, and those of the teachers
# and students of https://arxiv.org/abs/2506.08388.
TAGS = (
    "<think>",
    "</think>",
    "<|begin_of_thought|>",
    "<|end_of_thought|>",
    "<|begin_of_explanation|>",
    "<|end_of_explanation|>",
    "<|begin_of_solution|>",
    "<|end_of_solution|>",
)
# 32 is the smallest head that all of vLLM's attention kernels take.
_HEAD_DIM = 32
_LARGEST_OPERAND = 999  # all questions are listed: a million of them


@dataclass(kw_only=True)
class ArithmeticConfig:
    """Write generated arithmetic: a small model with its tokenizer, and questions with their answers."""

    output_dir: Path = Path("arithmetic")  # new or empty folder
    max_operand: int = 19  # operands are 0 to this
    answers: Literal["plain", "think"] = "plain"  # '42', or with the calculation: '<think>7+5+0=12,1+2+1=4</think>42'
    p_right: float = 0.5  # share of demonstrations and explanations that are right; the others are near misses
    n_train: int = 350  # questions to train on, in demonstrations, rollouts and preferences
    n_test: int = 50  # held-out questions
    n_demonstrations: int = 20000  # beyond n_train, questions are answered more than once
    hidden_size: int = 128  # width of the model, a multiple of 32
    n_layers: int = 2
    seed: int = 0  # of questions, answers and weights

    def __post_init__(self) -> None:
        for name in ("n_train", "n_test", "n_demonstrations", "n_layers", "max_operand"):
            if getattr(self, name) < 1:
                raise ConfigError(f"option '{name}' is {getattr(self, name)}: expected at least 1")
        if self.max_operand > _LARGEST_OPERAND:
            raise ConfigError(f"option 'max_operand' is {self.max_operand}: expected at most {_LARGEST_OPERAND}")
        if not 0 <= self.p_right <= 1:
            raise ConfigError(f"option 'p_right' is {self.p_right}: expected 0 to 1")
        if self.hidden_size < _HEAD_DIM or self.hidden_size % _HEAD_DIM:
            raise ConfigError(f"option 'hidden_size' is {self.hidden_size}: expected a multiple of {_HEAD_DIM}")
        n_questions = (self.max_operand + 1) ** 2
        if self.n_train + self.n_test > n_questions:
            raise ConfigError(
                f"n_train {self.n_train} and n_test {self.n_test} are more than the {n_questions} questions there are "
                f"with operands of 0 to {self.max_operand}"
            )


@dataclass(frozen=True)
class Question:
    """A sum of two whole numbers."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """`17+25=`"""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """`42`"""
        return str(self.a + self.b)

    @property
    def explanation(self) -> str:
        """The calculation digit by digit from the ones, each with its carry: `7+5+0=12,1+2+1=4`."""
        columns: list[str] = []
        a, b, carry = self.a, self.b, 0
        while a or b or not columns:
            a, x = divmod(a, 10)
            b, y = divmod(b, 10)
            columns.append(f"{x}+{y}+{carry}={x + y + carry}")
            carry = int(x + y + carry > 9)
        return ",".join(columns)

    def completion(self, style: Literal["plain", "think"]) -> str:
        """The completion of a demonstration."""
        return self.answer if style == "plain" else f"<think>{self.explanation}</think>{self.answer}"

    def near_miss(self, generator: random.Random) -> Question:
        """A question with one operand changed by 1 or 10, and so another answer; neither becomes negative."""
        neighbours = [
            other
            for change in (-10, -1, 1, 10)
            for other in (replace(self, a=self.a + change), replace(self, b=self.b + change))
            if other.a >= 0 and other.b >= 0
        ]
        return generator.choice(neighbours)


def make_arithmetic(output_dir: Path, **options: Any) -> Path:
    """Write model and data of `ArithmeticConfig`'s options to `output_dir`, atomically, and return it.

    Raises:
        ConfigError: an option is out of range, or the folder is not empty or cannot be created.
        TypeError: `ArithmeticConfig` has no such option.
    """
    config = ArithmeticConfig(output_dir=output_dir, **options)
    check_new_folder(output_dir, "output_dir")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, config.hidden_size, config.n_layers, config.seed)
    with writing(output_dir), new_folder(output_dir) as aside:
        save_model(model, tokenizer, aside / "model")
        (aside / "data").mkdir()
        for name, rows in make_rows(config).items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (aside / "data" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return output_dir


def make_rows(config: ArithmeticConfig) -> dict[str, list[dict[str, str]]]:
    """The rows of each file of data/, by its name."""
    generator, operands = random.Random(config.seed), range(config.max_operand + 1)
    every_question = [Question(a, b) for a in operands for b in operands]
    questions = generator.sample(every_question, config.n_train + config.n_test)
    train, test = questions[: config.n_train], questions[config.n_train :]

    def perturbed(question: Question) -> Question:
        return question if generator.random() < config.p_right else question.near_miss(generator)

    def written(question: Question) -> str:
        return question.completion(config.answers)

    demonstrated = [train[index % len(train)] for index in range(config.n_demonstrations)]
    return {
        "train": [{"prompt": q.prompt, "answer": q.answer} for q in train],
        "test": [{"prompt": q.prompt, "answer": q.answer} for q in test],
        "demonstrations": [{"prompt": q.prompt, "completion": written(perturbed(q))} for q in demonstrated],
        "preferences": [
            {"prompt": q.prompt, "chosen": written(q), "rejected": written(q.near_miss(generator))} for q in train
        ],
        "explanations": [
            {"question": q.prompt, "solution": q.answer, "explanation": perturbed(q).explanation} for q in train
        ],
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that every digit is a token and decoding restores any text; `TAGS` are one token each.

    It has BOS, EOS and padding, adds none of them itself, and has no chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(list(TAGS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int, n_layers: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random fp32 weights; the embedding is tied to the output.

    13 * n_layers * hidden_size^2 weights, and a few more: 0.46 million at hidden_size 128 and 2 layers.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    n_heads = hidden_size // _HEAD_DIM
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder of the given options. Returns 0, 1 if a write failed, or 2 if the call was wrong."""
    return run_module(ArithmeticConfig, _make, argv, "arithmetic")


def _make(config: ArithmeticConfig) -> None:
    data = make_arithmetic(**vars(config)) / "data"
    print(f"wrote {data.with_name('model')} and in {data}: {', '.join(sorted(file.name for file in data.iterdir()))}")


if __name__ == "__main__":
    sys.exit(main())
