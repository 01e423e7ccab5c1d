"""The plan of the study, which is in study.yaml, its finished runs, and what is left to do."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sparse_opt.errors import ConfigError

from ..training import ADAPTERS, SOURCES, TUNING_SEED, Trained, beyond, rounded

PLAN = Path(__file__).with_name("study.yaml")
FINDING_SEED = 2000
OF_DENSE = ("again", "subnetwork")  # compared with the dense run of their seed
WIDEN = 2  # rates that tuning tries beyond the lowest or highest, at most


class Subject(NamedTuple):
    """Runs of one subject differ in learning rate and seed only."""

    algorithm: str
    task: str
    trained: str


@dataclass(frozen=True)
class Run:
    """One training run; these fields are the key of its result."""

    algorithm: str
    task: str
    trained: str
    learning_rate: float
    seed: int
    n_steps: int | None = None  # None: as many as the plan has

    @property
    def subject(self) -> Subject:
        return Subject(self.algorithm, self.task, self.trained)

    @property
    def name(self) -> str:
        what = self.trained.replace(":", "_")
        name = f"{self.algorithm}_{self.task}_{what}_lr{self.learning_rate:g}_seed{self.seed}"
        return name if self.n_steps is None else f"{name}_{self.n_steps}steps"


@dataclass(frozen=True)
class Part:
    """A subject of the plan, the seeds that follow its tuning, and the claims whose tables show it.

    `tuned_by` is the subject whose tuning chooses the learning rate: another one for runs that are compared with the
    dense run, or with the random mask, of their seed.
    """

    subject: Subject
    tuned_by: Subject
    seeds: tuple[int, ...]
    claims: tuple[int, ...]
    tier: int
    n_steps: int | None = None

    @property
    def trained(self) -> Trained:
        return Trained.parse(self.subject.trained)


def read_parts(settings: Mapping[str, Any]) -> list[Part]:
    """The parts of the plan in the order of the file, which is that of the work and of the tables."""
    parts = []
    for tier, entries in enumerate(settings["plan"]):
        for entry in entries:
            for task, word in product(entry["tasks"], entry["trained"]):
                subject = Subject(entry.get("algorithm", "grpo"), task, str(Trained.parse(word)))
                tuned_by = subject._replace(trained=entry.get("rate_of", subject.trained))
                seeds = tuple(entry.get("seeds", (0, 1, 2)))
                claims = tuple(entry.get("claims", ()))
                parts.append(Part(subject, tuned_by, seeds, claims, tier, entry.get("n_steps")))
    return parts


def read_settings(plan: Path) -> dict[str, Any]:
    """The settings in a file, and those of the file that its `like` names, which it takes for all others."""
    settings: dict[str, Any] = yaml.safe_load(plan.read_text(encoding="utf-8"))
    return read_settings(plan.parent / settings.pop("like")) | settings if "like" in settings else settings


class Study:
    """The plan with the finished runs in a folder.

    results.jsonl has a run per line, starts.json the scores of the start by task, and times.jsonl the times of single
    steps, for runs that shared the device with others. All rows have the digest of their settings.

    Raises:
        ConfigError: results.jsonl has a line that is no run, or runs of several settings.
    """

    def __init__(self, folder: Path, plan: Path = PLAN):
        self.folder, self.settings = folder, read_settings(plan)
        self.parts, self.tasks = read_parts(self.settings), self.settings["tasks"]
        self.rows: dict[Run, dict[str, Any]] = {}
        self._by_subject: dict[tuple[Subject, int | None], list[dict[str, Any]]] = defaultdict(list)
        self.digest: str | None = None  # of the settings of the runs
        file = folder / "results.jsonl"
        content = file.read_bytes() if file.is_file() else b""
        complete = content[: content.rfind(b"\n") + 1]  # without the incomplete line of a killed process
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                row = {"n_steps": None} | json.loads(line)
                run = Run(**{field.name: row[field.name] for field in fields(Run)})
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{file}: line {number} is not a run of the study") from error
            self.digest = self.digest or row["settings"]
            if row["settings"] != self.digest:
                raise ConfigError(f"{file}: line {number} has settings {row['settings']}, expected {self.digest}")
            self._keep(run, row)
        if complete != content:
            os.truncate(file, len(complete))
        self.starts: dict[str, Any] = {}
        if (folder / "starts.json").is_file():
            self.starts = json.loads((folder / "starts.json").read_text(encoding="utf-8"))
        times = folder / "times.jsonl"
        of_steps = map(json.loads, times.read_text(encoding="utf-8").splitlines()) if times.is_file() else ()
        self.step_seconds = {(row["algorithm"], row["trained"]): float(row["step_time_s"]) for row in of_steps}
        for run, row in self.rows.items():
            if row["jobs"] == 1 and (key := self.timed_as(run.subject)):
                self.step_seconds.setdefault(key, row["step_time_s"])

    def of_claim(self, claim: int, tasks: Iterable[str]) -> list[Part]:
        return [part for part in self.parts if claim in part.claims and part.subject.task in tasks]

    def settings_digest(self) -> str:
        """The digest of the settings that all runs of a file share, those of the plan left out."""
        of_plan = ("plan", "claims", "tasks", "factors", "learning_rates", "sgd_rate", "lora")
        shared = {name: value for name, value in self.settings.items() if name not in of_plan}
        return sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]

    def _keep(self, run: Run, row: dict[str, Any]) -> None:
        self.rows[run] = row
        self._by_subject[run.subject, run.n_steps].append(row)

    def add(self, run: Run, measured: Mapping[str, Any]) -> None:
        """Append a finished run to results.jsonl."""
        row = {**asdict(run), **measured}
        with open(self.folder / "results.jsonl", "ab") as file:
            file.write((json.dumps(row, allow_nan=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._keep(run, row)

    def of(self, subject: Subject, seeds: Iterable[int], n_steps: int | None = None) -> list[dict[str, Any]]:
        """The runs of a subject with these seeds and number of steps, by learning rate and seed."""
        found = [row for row in self._by_subject[subject, n_steps] if row["seed"] in set(seeds)]
        return sorted(found, key=lambda row: (row["learning_rate"], row["seed"]))

    def rows_of(self, part: Part) -> list[dict[str, Any]]:
        """The runs of a part's seeds at its rate; its tuning run there before these are finished, or without seeds."""
        rate = self.best_rate(part.tuned_by)
        found = [row for row in self.of(part.subject, part.seeds, part.n_steps) if row["learning_rate"] == rate]
        return found or [row for row in self.of(part.subject, [TUNING_SEED]) if row["learning_rate"] == rate]

    def seeds_of(self, part: Part) -> list[dict[str, Any]]:
        """The runs of a part's seeds; none unless there are several and all are finished."""
        found = [row for row in self.rows_of(part) if row["seed"] in part.seeds]
        return found if len(found) == len(part.seeds) > 1 else []

    def best_rate(self, subject: Subject) -> float | None:
        """The learning rate of the best tuning run, the lowest of equal ones; None without tuning runs."""
        runs = self.of(subject, [TUNING_SEED])
        best = min(runs, key=lambda row: (-row["tune_accuracy"], row["learning_rate"]), default=None)
        return None if best is None else float(best["learning_rate"])

    def first_rates(self, subject: Subject) -> list[float]:
        """The learning rates that tuning tries first: the same multiples of one rate for every subject.

        That is the algorithm's dense rate; ten times as much for LoRA; for a mask, SHiRA and Super-Tuning density^-0.75
        times as much.
        """
        trained, settings = Trained.parse(subject.trained), self.settings
        rate = float(settings["learning_rates"][subject.algorithm])
        if trained.source == "sgd":
            rate = float(settings["sgd_rate"])
        elif trained.source in ("lora", "qlora"):
            rate *= 10
        elif trained.amount is not None:
            percent = trained.amount * (settings["lora"]["percent"] if trained.source in ADAPTERS else 1)
            rate *= (100 / percent) ** 0.75
        return [rounded(rate * factor) for factor in settings["factors"]]

    def tuning_left(self, subject: Subject) -> list[Run]:
        """The tuning runs that are not finished: at the first rates, then beyond an end that is the best."""
        first = self.first_rates(subject)
        runs = [Run(*subject, rate, TUNING_SEED) for rate in first]
        tried = [row["learning_rate"] for row in self.of(subject, [TUNING_SEED])]
        if all(run in self.rows for run in runs) and len(tried) < len(first) + WIDEN:
            runs = [Run(*subject, rate, TUNING_SEED) for rate in beyond(tried, self.best_rate(subject))]
        return [run for run in runs if run not in self.rows]

    def left(self, part: Part) -> list[Run]:
        """The runs of a part that are not finished and can begin: its tuning, then its seeds at the best rate."""
        if runs := self.tuning_left(part.tuned_by):
            return runs if part.tuned_by == part.subject else []
        rate = self.best_rate(part.tuned_by)
        runs = [Run(*part.subject, rate, seed, part.n_steps) for seed in part.seeds]
        return [run for run in runs if run not in self.rows]

    def is_finished(self, part: Part) -> bool:
        return not self.tuning_left(part.tuned_by) and not self.left(part)

    def timed_as(self, subject: Subject) -> tuple[str, str] | None:
        """The key of a subject in `step_seconds`: masks of all sources have the time of random ones."""
        trained = Trained.parse(subject.trained)
        if trained.source == "subnetwork":
            return None
        if trained.source in SOURCES:
            trained = trained._replace(source="random")
        return subject.algorithm, "dense" if trained.source == "again" else str(trained)

    def in_order(self, parts: Iterable[Part]) -> list[Part]:
        """The parts in the order of work: of each tier tuning and first seed of every part, then the other seeds."""
        parts = list(parts)
        halves = [replace(part, seeds=part.seeds[:1]) for part in parts]
        halves += [replace(part, seeds=part.seeds[1:]) for part in parts if len(part.seeds) > 1]
        return sorted(halves, key=lambda part: part.tier)
