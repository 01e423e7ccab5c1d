"""Fixtures: a tiny Llama with its tokenizer on disk, and preference files in common formats."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from small_models import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLE_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>"]


def make_pairs(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows in TRL's preference format: a question with the right and a wrong answer."""
    generator = random.Random(seed)
    rows = []
    for _ in range(n):
        a, b = generator.randrange(50), generator.randrange(50)
        rows.append(
            {"prompt": f"What is {a} plus {b}?", "chosen": f" It is {a + b}.", "rejected": f" Maybe {a - b}, or not."}
        )
    return rows


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with BOS before plain text, an EOS, a separate pad token and no chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>", *ROLE_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in make_pairs(64) for text in row.values()), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def model(tokenizer) -> LlamaForCausalLM:
    return make_model(tokenizer).eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pairs() -> list[dict[str, str]]:
    return make_pairs(24)


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory, pairs) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def mask_file(tmp_path_factory, model_folder) -> Path:
    from sparse_opt.masks.mask_set import MaskSet

    mask = MaskSet.random(LlamaForCausalLM.from_pretrained(model_folder), density=0.2, seed=3)
    return mask.save(tmp_path_factory.mktemp("masks") / "random.safetensors")


@pytest.fixture
def command(capfd, monkeypatch, tmp_path) -> Callable[..., str]:
    """`command("train", "rft", "test")`: `sparse-opt` in the test's folder -> stdout; with `code=` the error line."""
    from sparse_opt.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)

    def call(*words: object, code: int = 0) -> str:
        capfd.readouterr()
        found = main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert found == code, err
        return out if code == 0 else err.splitlines()[-1]

    return call
