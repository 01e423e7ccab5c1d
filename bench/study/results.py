"""The results file of the study: one finished run per line of JSON."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

import xxhash

from sparse_opt.errors import ConfigError

from .plan import TUNING_SEED, Run, Subject

RESULTS_FILE, STARTS_FILE = "results.jsonl", "starts.json"
# Settings that choose the runs; all others must be equal in one file.
_OF_PLAN = ("tasks", "factors", "learning_rates", "sgd_rate", "lora", "tile", "texts", "seconds")


def settings_digest(settings: Mapping[str, Any]) -> str:
    """The digest of the settings that all runs of a file share."""
    of_runs = {name: value for name, value in settings.items() if name not in _OF_PLAN}
    return xxhash.xxh3_64_hexdigest(json.dumps(of_runs, sort_keys=True).encode())


class Results:
    """Finished runs by their settings. Each is appended and flushed to disk when it is finished.

    An incomplete last line, of a process that was killed while it wrote, is dropped.

    Attributes:
        inputs: path in the output folder -> digest, of the questions and texts that the runs used. They are sampled or
            generated, and might differ on another machine; runs of different ones are not compared.

    Raises:
        ConfigError: the file has a line that is not a run, or runs of other settings, or of different inputs.
    """

    def __init__(self, path: Path, header: dict[str, Any]):
        self.path = path
        self.header = header
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._by_subject: dict[tuple[Subject, int | None], dict[tuple[Any, ...], dict[str, Any]]] = defaultdict(dict)
        self.inputs: dict[str, str] = {}
        if not path.is_file():
            return
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                row = {"n_steps": None} | json.loads(line)  # runs of the settings' length may not state it
                run = Run(**{field.name: row[field.name] for field in fields(Run)})
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{path}: line {number} is not a run of the study") from error
            if row.get("settings") != header["settings"]:
                raise ConfigError(f"{path}: line {number} has a run of other settings: name another file")
            self._require_same_inputs(row.get("inputs", {}), f"line {number}")
            self._keep(run, row)
        if complete != content:
            with open(path, "r+b") as file:
                file.truncate(len(complete))

    def __contains__(self, run: Run) -> bool:
        return run.key in self.rows

    def agrees_with(self, inputs: Mapping[str, str]) -> bool:
        """Whether the runs that used these files, paths with their digests, used the same."""
        return all(self.inputs.get(name, digest) == digest for name, digest in inputs.items())

    def _require_same_inputs(self, inputs: Mapping[str, str], what: str) -> None:
        for name, digest in inputs.items():
            if self.inputs.setdefault(name, digest) != digest:
                raise ConfigError(
                    f"{self.path}: {what} is a run on {name} with digest {digest}; expected {self.inputs[name]}, as in "
                    "the runs before: name another file"
                )

    def add(self, run: Run, measured: dict[str, Any]) -> None:
        """Append the measurements of a run.

        Raises:
            ConfigError: the run used other inputs than those before.
        """
        self._require_same_inputs(measured.get("inputs", {}), run.name)
        row = {**asdict(run), **measured, **self.header}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            file.write((json.dumps(row, allow_nan=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._keep(run, row)

    def _keep(self, run: Run, row: dict[str, Any]) -> None:
        self.rows[run.key] = row
        self._by_subject[Subject(run.algorithm, run.task, run.trained), run.n_steps][run.key] = row

    def of(self, subject: Subject, seeds: Iterable[int], n_steps: int | None = None) -> list[dict[str, Any]]:
        """The runs of a subject with these seeds and this number of steps, by learning rate and seed."""
        seeds = set(seeds)
        found = [row for row in self._by_subject[subject, n_steps].values() if row["seed"] in seeds]
        return sorted(found, key=lambda row: (row["learning_rate"], row["seed"]))

    def best_rate(self, subject: Subject) -> float | None:
        """The learning rate of the best tuning run, the lowest of equal ones; None without tuning runs."""
        runs = self.of(subject, [TUNING_SEED])
        if not runs:
            return None
        return float(min(runs, key=lambda row: (-row["tune_accuracy"], row["learning_rate"]))["learning_rate"])

    def chosen(self, subject: Subject, seeds: Iterable[int]) -> list[dict[str, Any]]:
        """The runs of these seeds at the best learning rate."""
        best = self.best_rate(subject)
        return [row for row in self.of(subject, seeds) if row["learning_rate"] == best]

    def seconds_per_run(self, algorithm: str, jobs: int) -> float | None:
        """The median time of the finished runs of an algorithm, of those with as many at once if there are any.

        None without finished runs.
        """
        rows = [row for row in self.rows.values() if row["algorithm"] == algorithm]
        found = [row["seconds"] for row in rows if row["jobs"] == jobs] or [row["seconds"] for row in rows]
        return median(found) if found else None


def read_starts(folder: Path, results: Results) -> dict[str, dict[str, Any]]:
    """Task -> the scores of the start, with the settings and inputs of the results."""
    file = folder / STARTS_FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    settings = results.header["settings"]
    return {
        task: scores
        for task, scores in found.items()
        if scores["settings"] == settings and results.agrees_with(scores["inputs"])
    }
