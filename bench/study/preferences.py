"""Preference pairs for DPO from a model's own answers: right ones are chosen, wrong ones rejected.

    python -m sparse_opt.bench.study.preferences --answers answers/results.jsonl --output pairs.jsonl

`answers` is a folder of `sparse-opt train rft test`, which samples answers and verifies them:

    sparse-opt train rft test --policy_name smollm2/fp32 --dataset products/train.jsonl --n_generations 8 \\
        --temperature 1 --reward_functions sparse_opt.bench.study.tasks:score --max_completion_length 16 \\
        --output_dir answers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_opt.config import option, require_number_ranges, run_module
from sparse_opt.errors import DataError
from sparse_opt.files import one_line
from sparse_opt.trainers.rft.parts import write_lines


@dataclass(kw_only=True)
class PreferencesConfig:
    """Write preference pairs in TRL's format from sampled and verified answers, the results.jsonl of `rft test`."""

    answers: Path = option(Path("answers/results.jsonl"), "results.jsonl of rft test")
    output: Path = option(Path("pairs.jsonl"), "file to write: prompt, chosen, rejected")
    pairs_per_prompt: int = option(2, "at most this many pairs of a prompt, none with an answer of another", at_least=1)

    def __post_init__(self) -> None:
        require_number_ranges(self)


def pairs(rows: Iterable[dict[str, Any]], pairs_per_prompt: int) -> Iterator[dict[str, Any]]:
    """Rows of prompt, chosen and rejected, messages if the prompt is messages.

    Answers are used in the order in which they were sampled, each text once. An answer that was truncated is not used,
    because DPO would train it with an EOS that it did not have. A prompt without a right or a wrong answer gives no
    pair.
    """
    for row in rows:
        outcomes: dict[bool, list[str]] = {True: [], False: []}
        for completion, right, finished in zip(row["completions"], row["right"], row["finished"], strict=True):
            text = completion.strip()
            if finished and text and text not in outcomes[right]:
                outcomes[right].append(text)
        as_prompt = isinstance(row["prompt"], str)
        chosen_and_rejected = zip(outcomes[True], outcomes[False], strict=False)
        for _, texts in zip(range(pairs_per_prompt), chosen_and_rejected, strict=False):
            chosen, rejected = (text if as_prompt else [{"role": "assistant", "content": text}] for text in texts)
            yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def write_pairs(answers: Path, output: Path, pairs_per_prompt: int = 2) -> int:
    """Write the pairs of a file of answers; return their number.

    Raises:
        DataError: the file cannot be read, or gives no pair.
    """
    try:
        rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        found = list(pairs(rows, pairs_per_prompt))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{answers}: not the results.jsonl of rft test: {one_line(error)}") from error
    if not found:
        raise DataError(f"{answers}: no prompt of {len(rows)} has both a right and a wrong answer that ended")
    write_lines(output, iter(found))
    return len(found)


def _write(config: PreferencesConfig) -> str:
    return f"{config.output}: {write_pairs(config.answers, config.output, config.pairs_per_prompt)} pairs"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file. Returns 0, 1 if the work failed, or 2 if the call was wrong."""
    return run_module(PreferencesConfig, _write, argv, prog="python -m sparse_opt.bench.study.preferences")


if __name__ == "__main__":
    sys.exit(main())
