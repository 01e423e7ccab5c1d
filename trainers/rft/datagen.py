"""The data stage of RFT (https://arxiv.org/abs/2308.01825): sample completions and keep distinct correct ones.

A completion is correct if its reward is at least `reward_threshold`, and kept only if it ended with EOS: a completion
truncated at `max_completion_length` would be trained with an EOS that it did not have. `deduplicate` keeps the first of
several equivalent completions of a prompt, and `keep` selects among the rest.

Files in the output folder:

| file | |
|---|---|
| kept.jsonl | prompt, completion, reward, as text or messages like the prompts; input of `train` and TRL's SFTTrainer |
| report.json | accuracy, answer rate, counts of kept and discarded completions, seconds |
| parts/ | every completion with its verdict, one file per block |

Not implemented: mixing the kept rows with the original demonstrations, as the paper does (concatenate the JSON lines
files), and the paper's selection of the most different reasoning paths from several models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from sparse_opt.config import option
from sparse_opt.errors import ConfigError

from .parts import write_lines, write_report
from .sampling import Sampled, SamplingOptions, sample

KEPT_FILE = "kept.jsonl"
REPORT_FILE = "report.json"

# An equation of numbers and operators, such as "6*7=42" or "(1+2) / 3 = 1.0".
_SIDE = r"[\d.,()+\-*/^%$ ]*\d[\d.,()+\-*/^%$ ]*"
_EQUATION = re.compile(rf"{_SIDE}(?:={_SIDE})+")


@dataclass(kw_only=True)
class DatagenConfig(SamplingOptions):
    """Sample completions, verify them, and keep the right ones as training data."""

    keep: Literal["all", "first", "best"] = option(
        "all", "of a prompt's right completions: all, the first, or the one with the highest reward"
    )
    deduplicate: Literal["text", "equations", "none"] = option(
        "text", "of a prompt's right completions, keep one of those with the same text or the same list of equations"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ConfigError("option 'temperature' is 0: rejection sampling is random; expected more than 0")


@dataclass
class Selection:
    """Selects the correct completions to keep, and counts the kept and the discarded ones."""

    n_kept: int = 0
    n_prompts_kept: int = 0
    n_wrong: int = 0
    n_unfinished: int = 0  # correct, but truncated
    n_duplicates: int = 0
    n_not_chosen: int = 0  # correct and distinct, but not selected by `keep`
    _seen: set[tuple[str, str]] = field(default_factory=set, repr=False)

    def counts(self) -> dict[str, int]:
        """The counts by name."""
        return {name: count for name, count in vars(self).items() if name.startswith("n_")}

    def select(self, row: dict[str, Any], config: DatagenConfig) -> list[int]:
        """The positions of the kept completions of one prompt; updates the counts."""
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
            kept = [max(candidates, key=lambda i: row["rewards"][i])]  # the first of equal rewards
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
    """A key that is equal for equivalent completions.

    text: the words. equations: the equations in order, without spaces (section 3.3 of the paper), or the words if there
    is not an equation.
    """
    if deduplicate == "equations":
        equations = ["".join(match.split()).strip(".,$") for match in _EQUATION.findall(completion)]
        if equations:
            return "\n".join(equations)
    return " ".join(completion.split())


def kept_rows(rows: Iterable[dict[str, Any]], config: DatagenConfig, selection: Selection) -> Iterator[dict[str, Any]]:
    """The rows of kept.jsonl, of sampled and verified answers such as those in the results.jsonl of `test`.

    Args:
        rows: one for each prompt: prompt, completions, rewards, right and finished.
        config: its `keep` and `deduplicate` are used.
        selection: counts the answers.
    """
    for row in rows:
        for i in selection.select(row, config):
            completion = row["completions"][i]
            if not isinstance(row["prompt"], str):
                completion = [{"role": "assistant", "content": completion}]
            yield {"prompt": row["prompt"], "completion": completion, "reward": row["rewards"][i]}


def datagen(config: DatagenConfig) -> dict[str, Any]:
    """Write kept.jsonl and report.json, and return the report.

    Raises:
        ConfigError, DataError: as in `sampling.sample`.
    """
    with sample(config, "datagen") as sampled:
        return sampled.ranks.on_main(lambda: _write_kept(config, sampled))


def _write_kept(config: DatagenConfig, sampled: Sampled) -> dict[str, Any]:
    selection = Selection()
    kept_file = sampled.folder / KEPT_FILE
    write_lines(kept_file, kept_rows(sampled.rows(), config, selection))
    report = sampled.report(config, "datagen", **selection.counts(), kept_file=str(kept_file))
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
