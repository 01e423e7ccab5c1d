"""The results file of `bench learning`, and its tables."""

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
from sparse_opt.tables import table

from .runs import TUNING_SEED, Run, Trained

HEADERS = ("algorithm", "trained", "learning rate", "before", "after", "of the seeds", "gained", "s a run")
PATTERN_HEADERS = (
    "mask", "requested %", "pattern", "active %", "learning rate", "after", "lowest", "highest", "gained", "of dense",
)  # fmt: skip
# The last digits of a curve differ between machines and are not visible in a plot.
_CURVE_DIGITS = 5


class Results:
    """The finished runs by name, in a JSON file that is written after each.

    Raises:
        ConfigError: the file has runs of another size or other settings.
    """

    def __init__(self, path: Path, header: dict[str, Any]):
        self.path = path
        self.data: dict[str, Any] = {**header, "runs": {}, "before": {}}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8"))
            if self.data["size"] != header["size"]:
                raise ConfigError(
                    f"{path} has runs of size {self.data['size']}, expected {header['size']}: name another file"
                )
            if self.data["settings"] != header["settings"]:
                changed = sorted(
                    key
                    for key in self.data["settings"].keys() | header["settings"].keys()
                    if self.data["settings"].get(key) != header["settings"].get(key)
                )
                raise ConfigError(f"{path} has runs of other settings ({', '.join(changed)}): name another file")

    def add(self, run: Run, measurements: dict[str, Any]) -> None:
        """Write the measurements of a run; tuning runs without the curve."""
        kept = {**measurements, "curve": [float(f"{value:.{_CURVE_DIGITS}g}") for value in measurements["curve"]]}
        if run.seed == TUNING_SEED:
            del kept["curve"]
        self.data["runs"][run.name] = kept
        self.write()

    def write(self) -> None:
        """Write the file atomically."""
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
        """Choose the learning rate that the tables show."""
        self.data.setdefault("learning_rates", {}).setdefault(algorithm, {})[trained] = learning_rate

    def chosen(self, algorithm: str, trained: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The runs of these seeds at the chosen learning rate, or at any if none was chosen, by seed."""
        rate = self.data.get("learning_rates", {}).get(algorithm, {}).get(trained)
        runs = [run for run in self.of(algorithm, trained, seeds) if rate in (None, run["learning_rate"])]
        return sorted(runs, key=lambda run: run["seed"])


def json_text(data: dict[str, Any]) -> str:
    """JSON with one line per entry and per list of numbers. NaN is an error: no valid result contains one."""
    text = json.dumps(data, indent=1, allow_nan=False)
    # A string in JSON contains no line break, so that every match is a list.
    return re.sub(r"\[\n[-+.0-9eE,\s]+\]", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


def text(results: Results, algorithms: Sequence[str], trained: Sequence[str], seeds: Sequence[int]) -> str:
    """A row for each set of trained weights: the mean over the seeds, and the result of each seed."""
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
    """Results and best learning rate of each pattern: three tables of one algorithm."""
    parts = [
        f"{algorithm}, {results.data['before'][algorithm]:.3f} before, seeds {' '.join(map(str, seeds))}",
        _scores(results, algorithm, trained, seeds),
    ]
    if rates := _rates(results, algorithm, trained, seeds):
        parts += ["best learning rate, in multiples of dense's (< or >: the lowest or highest of those tried)", rates]
    if tried := _tried(results, algorithm, trained):
        parts += ["result by learning rate, one run each", tried]
    starts = {run["start"] for run in results.data["runs"].values() if "start" in run and run["algorithm"] == algorithm}
    if len(starts) > 1:
        parts += [f"The runs started from {len(starts)} different models: {', '.join(sorted(starts))}"]
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
                *(f"{value:.3f}" for value in (mean(ends), min(ends), max(ends))),
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
    return table(("mask", "requested %", *patterns), rows, n_words=2) if rows else ""


def _end(results: Results, algorithm: str, what: str, rate: float) -> str:
    """`<` or `>` if this rate is the lowest or highest that was tried; the best may be beyond."""
    tried = [run["learning_rate"] for run in results.of(algorithm, what, [TUNING_SEED])]
    if len(tried) < 2:
        return ""
    return "<" if rate <= min(tried) else ">" if rate >= max(tried) else ""


def _tried(results: Results, algorithm: str, trained: Sequence[str]) -> str:
    """Empty if no learning rate was tried."""
    found = {
        what: {f"{run['learning_rate']:g}": run["after"] for run in results.of(algorithm, what, [TUNING_SEED])}
        for what in trained
    }
    rates = sorted({rate for by_rate in found.values() for rate in by_rate}, key=float)
    rows = [
        (what, *(f"{by_rate[rate]:.3f}" if rate in by_rate else "" for rate in rates))
        for what, by_rate in found.items()
        if by_rate
    ]
    return table(("trained", *rates), rows) if rows else ""
