"""What is measured of a run: scores, what it forgot, and its update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import load_file

from sparse_opt.analysis import count_changes, sum_changes

from ..training import answers, encode, load, read_rows, sample, write_rows
from .plan import Study


def make_texts(file: Path, model_folder: Path, *, prompts: Sequence[str], n: int, max_new_tokens: int) -> None:
    """Sample texts of the start at temperature 1, unless the file exists."""
    if file.is_file():
        return
    torch.manual_seed(0)
    model, tokenizer = load(model_folder)
    asked = [[{"role": "user", "content": text}] if tokenizer.chat_template else text for text in prompts]
    ids = [encode(tokenizer, prompt) for prompt in asked]
    found = sample(model, tokenizer, ids, n=n, max_new_tokens=max_new_tokens, batch_size=128)
    ended = [
        text[: text.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in text else None] for text in found
    ]
    write_rows(file, ({"prompt": ids[i // n], "completion": text} for i, text in enumerate(ended)))


@torch.no_grad()
def perplexity(file: Path, model_folder: Path) -> float | None:
    """exp of the mean negative log-probability of the texts' tokens under a model; None if it is not finite."""
    model, _ = load(model_folder)
    total, n = 0.0, 0
    for row in read_rows(file):
        ids = torch.tensor([row["prompt"] + row["completion"]], device=model.device)
        logits = model(ids).logits[0, len(row["prompt"]) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, len(row["prompt"]) :], reduction="sum"))
        n += len(row["completion"])
    return math.exp(total / n) if math.isfinite(total) and total / n < 700 else None


def scores(study: Study, task: str, model_folder: Path) -> dict[str, Any]:
    """The scores of a model, by its most likely answers.

    Returns:
        tune_accuracy on the questions for tuning, accuracy on the held-out ones, and the standard error of the first;
        right, a digit for each held-out question; n_generations, 1; others, the accuracy on held-out questions of each
        other task; and perplexity, of texts that the start wrote.
    """
    folder = study.folder / "questions"
    asked = {name: read_rows(folder / task / f"{name}.jsonl") for name in ("tune", "test")}
    for other in study.tasks:
        if other != task:
            asked[other] = read_rows(folder / other / "test.jsonl")[: study.settings["others"]]
    reward, options = study.settings["reward"], study.settings["test"]
    right = {name: [float(found.right) for (found,) in answers(model_folder, rows, reward, **options)]
             for name, rows in asked.items()}  # fmt: skip
    share = mean(right["tune"])
    return {
        "tune_accuracy": share,
        "tune_stderr": math.sqrt(share * (1 - share) / len(right["tune"])),
        "accuracy": mean(right["test"]),
        "right": "".join(str(int(found)) for found in right["test"]),
        "n_generations": 1,
        "others": {other: mean(right[other]) for other in study.tasks if other != task},
        "perplexity": perplexity(study.folder / "texts.jsonl", model_folder),
    }


def measure_update(start: Path, final: Path) -> dict[str, float]:
    """The shares of all weights that differ between two folders: changed_bf16 with both rounded to bf16, changed_fp32
    as they are, and changed_1e-5, moved by more than that."""
    first, last = (load_file(folder / "model.safetensors") for folder in (start, final))
    own = sum_changes(count_changes(first[name].to(after.dtype), after, (1e-5,)) for name, after in last.items())
    rounded = sum_changes(count_changes(first[name].bfloat16(), after.bfloat16(), ()) for name, after in last.items())
    return {"changed_bf16": rounded.share, "changed_fp32": own.share, "changed_1e-5": own.above[0] / own.numel}
