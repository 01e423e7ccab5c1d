"""The training loop that is timed with and without a log: DPO on random words."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sparse_opt.trainers.batches import TokenBatch, TokenSequence, collate
from sparse_opt.trainers.models import disable_dropout, make_masks_skippable

from ...common.harness import WrongResult
from ...common.shapes import LLAMA_3_2_3B_SIZES, random_model
from ..baseline.inputs import SMALL, word_tokenizer, words_config
from ..baseline.modes import Job, Mode, prepare
from ..baseline.run import Sections, Step, dpo_steps

N_BATCHES = 8
_FIRST_WORD, _N_WORDS = 3, 1000  # token ids of `word_tokenizer`


@dataclass
class Loop:
    """A training loop that can log."""

    step: Step
    section: Sections
    device: torch.device
    n_done: int = 0

    def run(self, append: Callable[[int], object] | None = None) -> float:
        """One step, and `append` with its number; the seconds until the training's stream has completed it."""
        began = time.perf_counter()
        metrics = self.step(self.n_done % N_BATCHES)
        self.n_done += 1
        if append is not None:
            append(self.n_done)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - began
        self.section.read()
        loss = metrics["loss"].item()
        if not loss == loss:
            raise WrongResult(f"step {self.n_done}: the loss is {loss}")
        return seconds


def make_model(args: Namespace, device: torch.device) -> nn.Module:
    """A Llama with random bf16 weights, prepared like by `trainers.models.load_model`."""
    config = words_config(SMALL if args.small else LLAMA_3_2_3B_SIZES, args.sequence_length)
    model = random_model(config, device, args.seed)
    disable_dropout(model)
    make_masks_skippable(model)
    return model.train()


def make_loop(mode: Mode, model: nn.Module, mask_file: Path, args: Namespace, device: torch.device) -> Loop:
    job = Job(
        algorithm="dpo",
        mode=mode,
        model_name="random weights",
        dataset="random words",
        mask=str(mask_file),
        sequence_length=args.sequence_length,
        n_steps=N_BATCHES,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        device=str(device),
        seed=args.seed,
    )
    section = Sections(device)
    return Loop(dpo_steps(prepare(job, model), _batches(args, device), section), section, device)


def _batches(args: Namespace, device: torch.device) -> list[TokenBatch]:
    """Pairs of random words of exact length; the prompt is an eighth of the sequence."""
    source, tokenizer = random.Random(args.seed), word_tokenizer()
    length, n_prompt = args.sequence_length, args.sequence_length // 8

    def words(count: int) -> list[int]:
        return [_FIRST_WORD + source.randrange(_N_WORDS) for _ in range(count)]

    def batch() -> TokenBatch:
        prompts = [words(n_prompt) for _ in range(args.batch_size)]
        completions = [
            TokenSequence([*prompt, *words(length - n_prompt - 1), tokenizer.eos_token_id], n_prompt)
            for prompt in 2 * prompts  # the chosen ones before the rejected
        ]
        return collate(completions, tokenizer.pad_token_id).to(device)

    return [batch() for _ in range(N_BATCHES)]


@dataclass(frozen=True)
class Memory:
    """Peaks of the device's memory and of pinned host memory; nothing on a CPU."""

    device: torch.device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.memory.reset_peak_host_memory_stats()

    def peaks(self) -> dict[str, int | None]:
        if self.device.type != "cuda":
            return {"device_bytes": None, "pinned_bytes": None}
        # Versions of torch count blocks in use, or all blocks of the allocator. Take the largest.
        pinned = [n for key, n in torch.cuda.memory.host_memory_stats().items() if key.endswith("bytes.peak")]
        return {"device_bytes": torch.cuda.max_memory_allocated(self.device), "pinned_bytes": max(pinned)}


def file_system(path: Path) -> str:
    """The type of the file system that a path is on, as /proc/mounts names it: `ext4`, `tmpfs`; empty if unknown."""
    mounts = Path("/proc/mounts")
    if not mounts.is_file():
        return ""
    found = (Path("/"), "")
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split(" ")
        where = Path(point.replace("\\040", " "))
        # A later mount on the same point hides an earlier one.
        if path.resolve().is_relative_to(where) and len(where.parts) >= len(found[0].parts):
            found = (where, kind)
    return found[1]
