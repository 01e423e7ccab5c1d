"""Tables of docs/study.md, from the finished runs in a folder of bench/results."""

from __future__ import annotations

from pathlib import Path

import yaml

from .plan import CLAIMS, SETTINGS, Choice
from .report import score_table, verdict_table
from .results import RESULTS_FILE, Results, read_starts, settings_digest
from .schedule import parts_of
from .timing import read_times


def tables(folder: Path, size: str = "smollm2", seeds: tuple[int, ...] = (0, 1, 2)) -> tuple[str, str]:
    """The table of verdicts and that of scores.

    Raises:
        FileNotFoundError: the folder has no runs.
    """
    if not (file := folder / RESULTS_FILE).is_file():
        raise FileNotFoundError(file)
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))[size]
    results = Results(file, {"settings": settings_digest(settings)})
    choice = Choice(list(CLAIMS), settings["tasks"], seeds, size)
    parts, starts = parts_of(choice, results, settings), read_starts(folder, results)
    verdicts = verdict_table(results, parts, choice, starts, settings)
    return verdicts, score_table(results, parts, starts, read_times(folder, results))
