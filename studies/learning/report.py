"""The tables and figures of docs/results.md on what loops learn, from the JSON of finished runs:

python -m studies.learning.report            # print the tables
python -m studies.learning.report --write    # write them to docs/results.md, and the figures to docs/figures
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sparse_opt.analysis.plots import new_figure, save_png
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.tables import markdown_table

from ..training import ROOT, TUNING_SEED, fill_tables

ALGORITHMS = ("grpo", "ppo", "rft", "rlt")
TRAINED = ("dense", "lora", "random:10", "random:2.5", "found:10", "found:2.5")
SEEDS = (0, 1, 2)
_COLOURS = ("#000000", "#CC79A7", "#E69F00", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#F0E442")


class Results:
    """The finished runs of a JSON file."""

    def __init__(self, name: str):
        data = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        self.runs, self.before = list(data["runs"].values()), data["before"]

    def of(self, algorithm: str, trained: str, *seeds: int) -> list[dict[str, Any]]:
        """The runs of these seeds, by seed."""
        found = [run for run in self.runs if (run["algorithm"], run["trained"]) == (algorithm, trained)]
        return sorted((run for run in found if run["seed"] in seeds), key=lambda run: run["seed"])

    def best_rate(self, algorithm: str, trained: str) -> float:
        """The learning rate of the best tuning run, the lowest of equal ones."""
        runs = self.of(algorithm, trained, TUNING_SEED)
        return float(min(runs, key=lambda run: (-run["after"], run["learning_rate"]))["learning_rate"])

    def chosen(self, algorithm: str, trained: str) -> list[dict[str, Any]]:
        """The runs of the seeds at the best rate."""
        rate = self.best_rate(algorithm, trained)
        return [run for run in self.of(algorithm, trained, *SEEDS) if run["learning_rate"] == rate]


def loop_table(results: Results) -> str:
    """The held-out result of each loop and choice of what is trained, of each seed."""
    rows = []
    for algorithm in ALGORITHMS:
        for trained in TRAINED:
            runs = results.chosen(algorithm, trained)
            ends = [run["after"] for run in runs]
            numbers = (f"{results.before[algorithm]:.3f}", f"{mean(ends):.3f}", " ".join(f"{end:.3f}" for end in ends))
            rows.append((algorithm, trained, f"{runs[0]['learning_rate']:g}", *numbers))
    headers = ("loop", "trained", "learning rate", "before", "after, mean", "seeds 0, 1, 2")
    return markdown_table(headers, rows, n_words=2)


def masks_of(results: Results) -> dict[tuple[str, str], dict[str, str]]:
    """(source, percent) -> pattern -> what is trained."""
    words = {run["trained"] for run in results.runs if ":" in run["trained"]}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for source in ("random", "found"):
        for percent in ("10", "2.5"):
            of = {(*word.split(":"), "element")[2]: word for word in words if word.split(":")[:2] == [source, percent]}
            found[source, percent] = {pattern: of[pattern] for pattern in PATTERNS if pattern in of}
    return found


def pattern_table(results: Results) -> str:
    """The held-out result under masks of each pattern, compared with dense training."""
    dense = mean(run["after"] for run in results.chosen("grpo", "dense"))
    named = [("dense", "", "dense")]
    named += [(source, pattern, word) for (source, _), of in masks_of(results).items() for pattern, word in of.items()]
    rows = []
    for source, pattern, word in named:
        runs = results.chosen("grpo", word)
        ends = [run["after"] for run in runs]
        active = f"{100 * mean(run['active'] for run in runs):.2f} %" if pattern else ""
        numbers = [f"{value:.3f}" for value in (mean(ends), min(ends), max(ends))]
        above = f"{mean(ends) - dense:+.3f}" if pattern else ""
        rows.append((source, pattern, active, f"{runs[0]['learning_rate']:g}", *numbers, above))
    headers = ("mask", "pattern", "active", "learning rate", "after, mean", "lowest", "highest", "above dense")
    return markdown_table(headers, rows, n_words=2)


def rate_table(results: Results) -> str:
    """The best learning rate of each pattern, in multiples of the dense one."""
    dense, masks = results.best_rate("grpo", "dense"), masks_of(results)
    rows = [
        (source, f"{percent} %", *(f"{results.best_rate('grpo', word) / dense:.2g}" for word in of.values()))
        for (source, percent), of in masks.items()
    ]
    return markdown_table(("mask", "active", *masks["random", "10"]), rows)


def plot(results: Results, panels: dict[str, tuple[str, dict[str, str]]], path: Path) -> None:
    """Rewards during training, averaged over a twentieth of the run: means over the seeds, and their range.

    Args:
        panels: title -> algorithm, and label of a line -> what is trained.
    """
    figure = new_figure(4.6 * len(panels), 4.4)
    labelled: dict[str, Any] = {}
    for axes, (title, (algorithm, lines)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for colour, (label, trained) in zip(_COLOURS, lines.items(), strict=False):
            columns = list(zip(*(smooth(run["curve"]) for run in results.chosen(algorithm, trained)), strict=True))
            steps = range(1, len(columns) + 1)
            (labelled[label],) = axes.plot(steps, [mean(column) for column in columns], color=colour, linewidth=1.6)
            lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(steps, lowest, highest, color=colour, alpha=0.12)
        axes.set(title=title, xlabel="step")
        axes.set_ylabel("-loss of SFT on the kept" if algorithm == "rft" else "reward")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = labelled.values(), labelled.keys()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labelled), 6), frameon=False)
    save_png(figure, path)


def smooth(curve: Sequence[float]) -> list[float]:
    """The mean of each point and those before it, up to a twentieth of the curve."""
    width = max(1, len(curve) // 20)
    return [mean(curve[max(0, i + 1 - width) : i + 1]) for i in range(len(curve))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.learning.report", description=__doc__.partition(":")[0])
    parser.add_argument("--write", action="store_true", help="write docs/results.md and its figures")
    write = parser.parse_args(argv).write
    loops, patterns = Results("learning_h200.json"), Results("learning_patterns_h200.json")
    tables = {
        "learning_loops": loop_table(loops),
        "learning_patterns": pattern_table(patterns),
        "learning_rates": rate_table(patterns),
    }
    if not write:
        print("\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items()))
        return 0
    fill_tables(ROOT / "docs/results.md", tables)
    figures = ROOT / "docs/figures"
    plot(
        loops, {name.upper(): (name, {word: word for word in TRAINED}) for name in ALGORITHMS}, figures / "learning.png"
    )
    panels = {
        f"GRPO, {source} masks, {percent} %": ("grpo", {"dense": "dense", **of})
        for (source, percent), of in masks_of(patterns).items()
    }
    plot(patterns, panels, figures / "learning_patterns.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
