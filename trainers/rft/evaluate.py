"""The test stage of RFT: measure a model's accuracy on prompts with known answers. It accepts any loop's checkpoint.

With one completion per prompt at temperature 0, accuracy is that of greedy decoding; with several completions at a
higher temperature it is the mean pass rate of the prompts. Files in the output folder:

| file | |
|---|---|
| results.jsonl | one row per prompt: index, prompt, answer, completions with their rewards and verdicts, pass rate |
| summary.json | accuracy with its standard error, answer rate, solved prompts, seconds |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparse_opt.config import option

from .parts import write_lines, write_report
from .sampling import Sampled, SamplingOptions, sample

RESULTS_FILE = "results.jsonl"
SUMMARY_FILE = "summary.json"


@dataclass(kw_only=True)
class TestConfig(SamplingOptions):
    """Measure accuracy and answer rate on prompts with known answers."""

    __test__ = False  # pytest would collect a class of this name

    dataset_split: str = option("test", "split of a hub dataset")
    n_generations: int = option(1, "completions per prompt")
    temperature: float = option(0.0, "sampling temperature; 0 takes the most likely token")


def test(config: TestConfig) -> dict[str, Any]:
    """Write results.jsonl and summary.json, and return the summary.

    Raises:
        ConfigError, DataError: as in `sampling.sample`.
    """
    with sample(config, "test") as sampled:
        return sampled.ranks.on_main(lambda: _write_results(config, sampled))


def _write_results(config: TestConfig, sampled: Sampled) -> dict[str, Any]:
    def results() -> Iterator[dict[str, Any]]:
        for row in sampled.rows():
            yield {**row, "pass_rate": sum(row["right"]) / len(row["right"])}

    results_file = sampled.folder / RESULTS_FILE
    write_lines(results_file, results())
    checkpoint = None if config.checkpoint is None else str(config.checkpoint)
    summary = sampled.report(config, "test", checkpoint=checkpoint, results_file=str(results_file))
    write_report(sampled.folder / SUMMARY_FILE, summary)
    return {**summary, "text": _text(summary, config)}


test.__test__ = False  # type: ignore[attr-defined]  # and a function of this name


def _text(summary: dict[str, Any], config: TestConfig) -> str:
    how = "greedy" if config.temperature == 0 else f"{config.n_generations} at temperature {config.temperature:g}"
    return "\n".join(
        [
            f"rft test: accuracy {summary['accuracy']:.4f} +- {summary['accuracy_stderr']:.4f} (standard error; "
            f"{how}), answer rate {summary['answer_rate']:.4f}, solved {summary['solved']:.4f}",
            f"prompts    {summary['n_prompts']}, {summary['tokens_per_completion']:.1f} tokens a completion",
            f"time       {summary['generate_time_s']:.1f} s to generate ({summary['tokens_per_s']:.0f} tokens/s)",
            f"results    {summary['results_file']}",
        ]
    )
