"""Tables of `bench learning`, and its results as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sparse_opt.errors import ConfigError
from sparse_opt.files import written_aside
from sparse_opt.masks.patterns import PATTERNS

from ...common.report import table
from .runs import TUNING_SEED, Run, Trained

HEADERS = ("algorithm", "trained", "learning rate", "before", "after", "of the seeds", "gained", "s a run")
PATTERN_HEADERS = (
    "mask", "asked %", "pattern", "active %", "learning rate", "after", "lowest", "highest", "gained", "of dense",
)  # fmt: skip
# A figure's last bits are noise between two machines, and a curve is drawn.
_CURVE_DIGITS = 5


class Results:
    """The runs that are done, by name, in a JSON file that grows with each.

    Raises:
        ConfigError: the file holds runs of another size, or of other settings.
    """

    def __init__(self, path: Path, header: dict[str, Any]):
        self.path = path
        self.data: dict[str, Any] = {**header, "runs": {}, "before": {}}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8"))
            if self.data["size"] != header["size"]:
                raise ConfigError(f"{path} holds runs of size {self.data['size']}, not {header['size']}: name another")
            if self.data["settings"] != header["settings"]:
                changed = sorted(
                    key
                    for key in self.data["settings"].keys() | header["settings"].keys()
                    if self.data["settings"].get(key) != header["settings"].get(key)
                )
                raise ConfigError(f"{path} holds runs of other settings ({', '.join(changed)}): name another")

    def add(self, run: Run, figures: dict[str, Any]) -> None:
        """Keep a run's figures; of those that look for a learning rate, all but the curve."""
        kept = {**figures, "curve": [float(f"{value:.{_CURVE_DIGITS}g}") for value in figures["curve"]]}
        if run.seed == TUNING_SEED:
            del kept["curve"]
        self.data["runs"][run.name] = kept
        self.write()

    def write(self) -> None:
        """Write the file whole or not at all."""
        with written_aside(self.path) as aside:
            aside.write_text(json_text(self.data), encoding="utf-8")

    def of(self, algorithm: str, trained: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The runs of these seeds."""
        return [
            run
            for run in self.data["runs"].values()
            if (run["algorithm"], run["trained"]) == (algorithm, trained) and run["seed"] in seeds
        ]

    def choose(self, algorithm: str, trained: str, learning_rate: float) -> None:
        """Say which learning rate counts."""
        self.data.setdefault("learning_rates", {}).setdefault(algorithm, {})[trained] = learning_rate

    def chosen(self, algorithm: str, trained: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The runs of these seeds at the chosen learning rate, by seed; at any where none was chosen."""
        rate = self.data.get("learning_rates", {}).get(algorithm, {}).get(trained)
        runs = [run for run in self.of(algorithm, trained, seeds) if rate in (None, run["learning_rate"])]
        return sorted(runs, key=lambda run: run["seed"])


def json_text(data: dict[str, Any]) -> str:
    """JSON with a line for each entry, and one for each list of numbers. NaN is an error: no result holds one."""
    text = json.dumps(data, indent=1, allow_nan=False)
    # No string of JSON holds a line break as it is, so that what matches is a list.
    return re.sub(r"\[\n[-+.0-9eE,\s]+\]", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


def text(results: Results, algorithms: Sequence[str], trained: Sequence[str], seeds: Sequence[int]) -> str:
    """What was trained, a row each: means over the seeds, and each seed's figure."""
    rows = []
    for algorithm in algorithms:
        for what in trained:
            runs = results.chosen(algorithm, what, seeds)
            if not runs:
                continue
            start, ends = results.data["before"][algorithm], [run["after"] for run in runs]
            rows.append(
                (
                    algorithm,
                    what,
                    f"{runs[0]['learning_rate']:g}",
                    f"{start:.3f}",
                    f"{mean(ends):.3f}",
                    " ".join(f"{end:.3f}" for end in ends),
                    f"{mean(ends) - start:+.3f}",
                    f"{mean(run['seconds'] for run in runs):.0f}",
                )
            )
    return table(HEADERS, rows, n_words=2)


def pattern_text(results: Results, algorithm: str, trained: Sequence[str], seeds: Sequence[int]) -> str:
    """What each mask's pattern costs and which learning rate it wants: three tables of one algorithm."""
    parts = [
        f"{algorithm}, {results.data['before'][algorithm]:.3f} before, seeds {' '.join(map(str, seeds))}",
        _scores(results, algorithm, trained, seeds),
    ]
    if rates := _rates(results, algorithm, trained, seeds):
        parts += ["best learning rate, in multiples of dense's (< or >: the lowest or highest of those tried)", rates]
    if tried := _tried(results, algorithm, trained):
        parts += ["figure after by learning rate, one run each", tried]
    starts = {run["start"] for run in results.data["runs"].values() if "start" in run and run["algorithm"] == algorithm}
    if len(starts) > 1:
        parts += [f"The runs began from {len(starts)} different models: {', '.join(sorted(starts))}"]
    return "\n\n".join(parts)


def _scores(results: Results, algorithm: str, trained: Sequence[str], seeds: Sequence[int]) -> str:
    start = results.data["before"][algorithm]
    dense = [run["after"] for run in results.chosen(algorithm, "dense", seeds)]
    rows = []
    for what in trained:
        runs, parts = results.chosen(algorithm, what, seeds), Trained.parse(what)
        if not runs:
            continue
        ends = [run["after"] for run in runs]
        rows.append(
            (
                parts.source,
                "" if parts.percent is None else f"{parts.percent:g}",
                parts.pattern or "",
                f"{100 * mean(run['active'] for run in runs):.2f}" if parts.percent is not None else "",
                f"{runs[0]['learning_rate']:g}",
                *(f"{figure:.3f}" for figure in (mean(ends), min(ends), max(ends))),
                f"{mean(ends) - start:+.3f}",
                f"{mean(ends) - mean(dense):+.3f}" if dense and what != "dense" else "",
            )
        )
    return table(PATTERN_HEADERS, rows, n_words=3)


def _rates(results: Results, algorithm: str, trained: Sequence[str], seeds: Sequence[int]) -> str:
    """Empty without dense runs of these seeds."""
    dense = results.chosen(algorithm, "dense", seeds)
    if not dense:
        return ""
    masks = [parts for parts in map(Trained.parse, trained) if parts.percent is not None]
    patterns = [pattern for pattern in PATTERNS if any(parts.pattern == pattern for parts in masks)]
    rows = []
    for source, percent in dict.fromkeys((parts.source, parts.percent) for parts in masks):
        cells = []
        for pattern in patterns:
            what = str(Trained(source, percent, pattern))
            runs = results.chosen(algorithm, what, seeds)
            if not runs:
                cells.append("")
                continue
            rate = runs[0]["learning_rate"]
            cells.append(f"{_end(results, algorithm, what, rate)}{rate / dense[0]['learning_rate']:.3g}")
        rows.append((source, f"{percent:g}", *cells))
    return table(("mask", "asked %", *patterns), rows, n_words=2) if rows else ""


def _end(results: Results, algorithm: str, what: str, rate: float) -> str:
    """`<` or `>` where this rate is the lowest or highest that was tried; the best may lie beyond."""
    tried = [run["learning_rate"] for run in results.of(algorithm, what, [TUNING_SEED])]
    if len(tried) < 2:
        return ""
    return "<" if rate <= min(tried) else ">" if rate >= max(tried) else ""


def _tried(results: Results, algorithm: str, trained: Sequence[str]) -> str:
    """Empty where no learning rate was tried."""
    found = {
        what: {f"{run['learning_rate']:g}": run["after"] for run in results.of(algorithm, what, [TUNING_SEED])}
        for what in trained
    }
    rates = sorted({rate for figures in found.values() for rate in figures}, key=float)
    rows = [
        (what, *(f"{figures[rate]:.3f}" if rate in figures else "" for rate in rates))
        for what, figures in found.items()
        if figures
    ]
    return table(("trained", *rates), rows) if rows else ""
