"""What a run forgets: the perplexity of texts that the start wrote, on prompts that have nothing to do with a task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .world import TEXTS_FILE, World

# Sequences of one forward pass.
_ROWS = 64


def make_texts(world: World) -> Path:
    """Sample texts of the start at temperature 1, by the settings `texts`; return their file, which is made once."""
    import torch

    from sparse_opt.trainers.policy.pretrained import load_tokenizer_from
    from sparse_opt.trainers.rft.parts import write_lines
    from sparse_opt.trainers.rollouts import Sampling, make_engine
    from sparse_opt.trainers.run.training_run import seed_everything

    file = world.folder / TEXTS_FILE
    if file.is_file():
        return file
    settings = world.settings["texts"]
    tokenizer, model = load_tokenizer_from(world.start), _load(world, world.start)
    engine = make_engine("generate", model, tokenizer)
    prompts = [_ids(tokenizer, text) for text in settings["prompts"]]
    n = settings["n_generations"]
    seed_everything(0, 0)
    with torch.no_grad():
        found = engine.generate(prompts, n, Sampling(settings["max_completion_length"])).ids
    repeated = [prompt for prompt in prompts for _ in range(n)]
    rows = ({"prompt": prompt, "completion": ids} for prompt, ids in zip(repeated, found, strict=True))
    write_lines(file, rows)
    return file


def perplexity(world: World, model_folder: Path) -> float:
    """exp of the mean negative log-probability of the texts' sampled tokens under a model; NaN if a weight is."""
    import torch

    from sparse_opt.trainers.data.encoding import TokenSequence, collate
    from sparse_opt.trainers.policy.logprobs import token_logprobs

    rows = [json.loads(line) for line in make_texts(world).read_text(encoding="utf-8").splitlines()]
    sequences = [TokenSequence([*row["prompt"], *row["completion"]], len(row["prompt"])) for row in rows]
    model = _load(world, model_folder)
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(sequences), _ROWS):
            batch = collate(sequences[first : first + _ROWS], 0).to(torch.device(world.device))
            total -= float(token_logprobs(model, batch).double().sum())
    return math.exp(total / sum(sequence.n_trained for sequence in sequences))


def _load(world: World, folder: Path) -> Any:
    import torch

    from sparse_opt.trainers.policy.pretrained import load_causal_lm

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[world.settings["shared"]["dtype"]]
    return load_causal_lm(folder, dtype).to(world.device).eval()


def _ids(tokenizer: Any, text: str) -> list[int]:
    """A prompt's tokens: as a chat where the tokenizer has a template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
