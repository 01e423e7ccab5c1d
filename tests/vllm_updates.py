"""A trainer whose updates tests send to vLLM, damaged ones too, and the tokens of an engine."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm_lab import SIZES, make_model, saved

from sparse_opt import MaskSet
from sparse_opt.weight_sync import WeightSender

# One block of the KV cache is 128 tokens on CPUs, so that a prompt of 2 blocks and more is found in the prefix cache.
LENGTH = 300
PROMPTS = [[(7 * i + 3 * j + j * j) % 100 for j in range(n)] for i, n in enumerate((5, 40, LENGTH, LENGTH + 20))]
NEW_TOKENS = 12


class Trainer:
    """Changes random active elements of a small Llama or of another model, the same ones in every run."""

    def __init__(self, model: nn.Module | None = None, mask: MaskSet | None = None) -> None:
        self.model = model or make_model("Llama", tie_word_embeddings=False, max_position_embeddings=512)
        self.mask = mask or MaskSet.random(self.model, density=0.1, seed=1)
        self.generator = torch.Generator().manual_seed(2)
        self.step_number = 0

    def step(self) -> None:
        # Every fifth step changes all active elements, which are then sent as a whole; every seventh one MLP only.
        self.step_number += 1
        share = 1.0 if self.step_number % 5 == 0 else 0.2
        with torch.no_grad():
            for name, indices in self.mask.indices.items():
                if self.step_number % 7 == 0 and "layers.1.mlp" not in name:
                    continue
                chosen = indices[torch.rand(indices.numel(), generator=self.generator) < share].long()
                change = torch.randn(chosen.numel(), generator=self.generator) * 0.05
                self.model.get_parameter(name).view(-1)[chosen] += change.to(torch.bfloat16)


def damaged(message: bytes) -> bytes:
    """One bit of the first value is flipped: safetensors puts the values before the bitmap, after the header."""
    at = 8 + int.from_bytes(message[:8], "little")
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


class DamagedSender:
    """A sender whose next update is damaged on its way."""

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)

    def update(self) -> Any:
        class Damaged:
            def __init__(self, message: Any) -> None:
                self.message = message

            def wait(self) -> Any:
                return self

            def __getattr__(self, name: str) -> Any:
                return getattr(self.message, name)

            def to_bytes(self) -> bytes:
                return damaged(self.message.to_bytes())

        return Damaged(self.sender.update().wait())


def save(folder: Path, model: nn.Module) -> Path:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return saved(folder, model)


def tokens_of(llm: LLM) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
