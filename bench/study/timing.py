"""Times of steps with the device to themselves, for studies whose runs share it.

For each choice of what is trained, a few steps of a run on its first task. Results are lines of JSON in times.jsonl:
algorithm, task, trained, n_steps, step_time_s and optimizer_time_s (medians), peak_memory_bytes on a GPU, and the
header of the results. Masks of all sources are timed as random ones of the same size and pattern, except for lean runs.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.training import finish
from .plan import SOURCES, TUNING_SEED, Part, Run, Subject, Trained, first_rates
from .results import Results
from .runs import LOOPS, Chore, do_chore, needed_by, options_of
from .world import DATA, World

TIMES_FILE = "times.jsonl"
# (algorithm, trained) -> a row of times.jsonl.
Times = dict[tuple[str, str], dict[str, Any]]


def read_times(folder: Path, results: Results) -> Times:
    """The times with the settings of the results."""
    file = folder / TIMES_FILE
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
    return {(row["algorithm"], row["trained"]): row for row in rows if row["settings"] == results.header["settings"]}


def timed_as(subject: Subject) -> tuple[str, str] | None:
    """The key of the times that a subject has; None for the weights that a dense run changed, which are not timed."""
    trained = Trained.parse(subject.trained)
    if trained.source == "subnetwork":
        return None
    if trained.source in SOURCES:
        trained = replace(trained, source="random")
    return subject.algorithm, "dense" if trained.source == "again" else str(trained)


def steps_in_dense_time(times: Times, subject: Subject, n_steps: int) -> int | None:
    """How many steps a subject makes in the time of so many dense ones; None if one of both was not timed.

    Finding a mask in the first part of a dense run takes this part of the time. Other sources take at most a backward
    pass of one batch, which is not counted.
    """
    key = timed_as(subject)
    dense = times.get((subject.algorithm, "dense"))
    if key is None or key not in times or dense is None:
        return None
    source = Trained.parse(subject.trained).source
    share = int(source.removeprefix("early")) / 100 if source.startswith("early") else 0.0
    return int((1 - share) * n_steps * dense["step_time_s"] / times[key]["step_time_s"])


def time_steps(world: World, parts: Sequence[Part], results: Results, n_steps: int, deadline: float) -> bool:
    """Measure what the parts train and has no time yet; return whether all was done in time.

    Args:
        n_steps: steps of each.
        deadline: begin none later, by `time.monotonic()`.
    """
    known = read_times(world.folder, results)
    for part in parts:
        key = timed_as(part.subject)
        if key is None or key in known:
            continue
        if time.monotonic() >= deadline:
            return False
        algorithm, trained = key
        rate = first_rates(world.settings, Subject(algorithm, part.subject.task, trained))[0]
        known[key] = _time(world, Run(algorithm, part.subject.task, trained, rate, TUNING_SEED), n_steps)
        with open(world.folder / TIMES_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps({**known[key], **results.header}) + "\n")
        print(f"{algorithm} {trained}: {known[key]['step_time_s']:.3f} s a step", file=sys.stderr, flush=True)
    return True


def _time(world: World, run: Run, n_steps: int) -> dict[str, Any]:
    while isinstance(chore := needed_by(world, run), Chore):
        do_chore(world, chore)
    folder = world.folder / "timing" / run.name
    shutil.rmtree(folder, ignore_errors=True)
    module, config = LOOPS[run.algorithm]
    options = options_of(world, run) | {"n_steps": n_steps}
    summary = finish(
        importlib.import_module(module), config, options, world.data(run.task, DATA[run.algorithm]), folder
    )
    shutil.rmtree(folder)
    return {
        "algorithm": run.algorithm,
        "task": run.task,
        "trained": run.trained,
        "n_steps": n_steps,
        "step_time_s": summary["median"]["step_time_s"],
        "optimizer_time_s": summary["median"]["optimizer_time_s"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
    }
