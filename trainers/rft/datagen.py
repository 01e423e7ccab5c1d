"""RFT's data (https://arxiv.org/abs/2308.01825): sample completions, verify them, keep right ones that differ.

A completion is kept where its reward is at least `reward_threshold` and it ended by itself: one that was cut at
`max_completion_length` would be taught with an end that it did not have. Of the same prompt's right completions those
that say the same count once (`deduplicate`), the earliest of them; of what is then left, `keep` says how many stay.

In the output folder:

| file | |
|---|---|
| kept.jsonl | prompt, completion, reward, as `train` and TRL's SFTTrainer read them: text, or messages as the prompts |
| report.json | accuracy, answer rate, what was kept and what was not, seconds |
| parts/ | every completion with its verdict, block by block |

Left out: mixing the kept rows with the demonstrations that the model was first trained on, as the paper does (JSON
lines: put the files together), and its selection of the most different paths from several models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from sparse_opt.config import option
from sparse_opt.errors import ConfigError

from ..profiles import preset_values
from .sampling import Figures, SamplingOptions, sample, write_lines, write_report

KEPT_FILE = "kept.jsonl"
REPORT_FILE = "report.json"

# A side of numbers and operators, "=", and another; as in "6*7=42" or "(1+2) / 3 = 1.0".
_SIDE = r"[\d.,()+\-*/^%$ ]*\d[\d.,()+\-*/^%$ ]*"
_EQUATION = re.compile(rf"{_SIDE}(?:={_SIDE})+")


@dataclass(kw_only=True)
class DatagenConfig(SamplingOptions):
    """Sample completions, verify them, and keep right ones as training data."""

    keep: Literal["all", "first", "best"] = option(
        "all", "of a prompt's right completions: all, the first, or the one with the highest reward"
    )
    deduplicate: Literal["text", "equations", "none"] = option(
        "text", "of a prompt's right completions, keep one of those with the same text or the same list of equations"
    )

    @classmethod
    def presets(cls, values: dict[str, Any]) -> list[tuple[str, Any, str]]:
        """The values of `profile` for options that were not given."""
        return preset_values(values.get("profile"), "datagen")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ConfigError("option 'temperature' is 0: rejection sampling draws, wanted more than 0")


@dataclass
class Selection:
    """What became of the right completions."""

    n_kept: int = 0
    n_prompts_kept: int = 0
    n_wrong: int = 0
    n_unfinished: int = 0  # right, but cut
    n_duplicates: int = 0
    n_not_chosen: int = 0  # right, different, and not what `keep` takes
    _seen: set[tuple[str, str]] = field(default_factory=set, repr=False)

    def select(self, row: dict[str, Any], config: DatagenConfig) -> list[int]:
        """The places of one prompt's completions that are kept; they are counted."""
        candidates = []
        for i, completion in enumerate(row["completions"]):
            if not row["right"][i]:
                self.n_wrong += 1
            elif not row["finished"][i]:
                self.n_unfinished += 1
            elif not self._is_new(repr(row["prompt"]), completion, config.deduplicate):
                self.n_duplicates += 1
            else:
                candidates.append(i)
        kept = candidates
        if config.keep == "first":
            kept = candidates[:1]
        elif config.keep == "best" and candidates:
            kept = [max(candidates, key=lambda i: row["rewards"][i])]  # the earliest of equals
        self.n_not_chosen += len(candidates) - len(kept)
        self.n_kept += len(kept)
        self.n_prompts_kept += bool(kept)
        return kept

    def _is_new(self, prompt: str, completion: str, deduplicate: str) -> bool:
        if deduplicate == "none":
            return True
        key = (prompt, fingerprint(completion, deduplicate))
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def fingerprint(completion: str, deduplicate: str) -> str:
    """What two completions that say the same have in common.

    text: the words. equations: the list of equations in their order, without spaces (section 3.3 of the paper), and the
    words where there is none.
    """
    if deduplicate == "equations":
        equations = ["".join(match.split()).strip(".,$") for match in _EQUATION.findall(completion)]
        if equations:
            return "\n".join(equations)
    return " ".join(completion.split())


def datagen(config: DatagenConfig) -> dict[str, Any]:
    """Write kept.jsonl and report.json, and return the report.

    Raises:
        ConfigError, DataError: as `rft_sampling.sample`.
    """
    with sample(config, "datagen") as sampled:
        figures, selection = Figures(), Selection()

        def kept_rows() -> Iterator[dict[str, Any]]:
            for row in sampled.rows():
                figures.add(row)
                for i in selection.select(row, config):
                    completion = row["completions"][i]
                    if not isinstance(row["prompt"], str):
                        completion = [{"role": "assistant", "content": completion}]
                    yield {"prompt": row["prompt"], "completion": completion, "reward": row["rewards"][i]}

        kept_file = sampled.folder / KEPT_FILE
        write_lines(kept_file, kept_rows())
        report = {
            "algorithm": "rft",
            "stage": "datagen",
            "policy_name": config.policy_name,
            "dataset": config.dataset,
            "prompts": sampled.prompts,
            **figures.as_dict(),
            "n_kept": selection.n_kept,
            "n_prompts_kept": selection.n_prompts_kept,
            "n_wrong": selection.n_wrong,
            "n_unfinished": selection.n_unfinished,
            "n_duplicates": selection.n_duplicates,
            "n_not_chosen": selection.n_not_chosen,
            **sampled.speed(figures.n_tokens),
            "n_parts_resumed": sampled.n_resumed,
            "kept_file": str(kept_file),
        }
        write_report(sampled.folder / REPORT_FILE, report)
        return {**report, "text": _text(report)}


def _text(report: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"rft datagen: {report['n_completions']} completions of {report['n_prompts']} prompts, accuracy "
            f"{report['accuracy']:.4f}, answer rate {report['answer_rate']:.4f}, solved {report['solved']:.4f}",
            f"kept       {report['n_kept']} of {report['n_prompts_kept']} prompts; not kept: {report['n_wrong']} "
            f"wrong, {report['n_unfinished']} unfinished, {report['n_duplicates']} duplicates, "
            f"{report['n_not_chosen']} others",
            f"time       {report['generate_time_s']:.1f} s to generate ({report['tokens_per_s']:.0f} tokens/s), "
            f"{report['verify_time_s']:.1f} s to verify",
            f"data       {report['kept_file']}",
        ]
    )
