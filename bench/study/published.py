"""Tables of docs/study.md, from the finished runs in an output folder of the study."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .plan import CLAIMS, SETTINGS, Choice, Part, Trained
from .report import verdict_table
from .results import RESULTS_FILE, Results, read_starts, settings_digest
from .schedule import parts_of
from .tables import at_equal_time_table, score_table, source_table
from .timing import Times, read_times


class Finished(NamedTuple):
    """A study of all claims, tasks and three seeds, as far as it is finished."""

    settings: dict[str, Any]
    choice: Choice
    results: Results
    parts: Sequence[Part]
    starts: dict[str, dict[str, Any]]
    times: Times


@cache
def _read(folder: Path) -> Finished:
    if not (file := folder / RESULTS_FILE).is_file():
        raise FileNotFoundError(file)
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))["smollm2"]
    results = Results(file, {"settings": settings_digest(settings)})
    choice = Choice(list(CLAIMS), settings["tasks"], (0, 1, 2))
    parts, starts = parts_of(choice, results, settings), read_starts(folder, results)
    return Finished(settings, choice, results, parts, starts, read_times(folder, results))


def verdicts(folder: Path) -> str:
    """The verdicts on all claims; raises FileNotFoundError if the folder has no runs."""
    found = _read(folder)
    return verdict_table(found.results, found.parts, found.choice, found.starts, found.settings)


def scores(folder: Path) -> str:
    """What was learned and forgotten under each choice of what is trained, without masks of one seed, which are in
    `sources`; raises like `verdicts`."""
    found = _read(folder)
    parts = [part for part in found.parts if len(part.seeds) != 1 or not Trained.parse(part.subject.trained).is_mask]
    return score_table(found.results, parts, found.starts, found.times)


def sources(folder: Path) -> str:
    """The held-out scores of all sources of masks, on the first task; raises like `verdicts`."""
    found = _read(folder)
    of_claim = [part for part in found.parts if 4 in part.claims]
    return "\n\n".join(source_table(found.results, of_claim, found.choice.tasks[0]))


def at_equal_time(folder: Path) -> str:
    """The held-out scores in the time of dense training; raises like `verdicts`."""
    found = _read(folder)
    of_claim = [part for part in found.parts if 4 in part.claims]
    return "\n\n".join(at_equal_time_table(found.results, of_claim, found.settings, found.times))
