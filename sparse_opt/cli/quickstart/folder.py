"""The folder of a quickstart: it is new or empty, or holds an earlier quickstart, whose files are replaced."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS_FILE = "quickstart.json"


def is_earlier(folder: Path) -> bool:
    """Whether the folder holds an earlier quickstart; raises ConfigError if it holds anything else."""
    from sparse_opt.trainers.run.outputs import check_new_folder

    # os.path.isfile is also False if the folder cannot be read; check_new_folder then reports this.
    earlier = os.path.isfile(folder / RESULTS_FILE)
    if not earlier:
        check_new_folder(folder, "output_dir")
    return earlier


def prepare(folder: Path, contents: Iterable[str]) -> None:
    """Remove the files of an earlier quickstart; refuse any other folder that is not empty.

    Args:
        contents: names of the files and folders of a quickstart. Only these are removed.
    """
    if is_earlier(folder):
        say(f"{folder} holds an earlier quickstart: removing it and starting again")
        for name in contents:
            if (folder / name).exists():
                shutil.rmtree(folder / name)
    # Marks the folder as a quickstart's own, even if the run is interrupted.
    write_results(folder, {"finished": False})


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write quickstart.json, atomically."""
    from ...files import written_aside

    with written_aside(folder / RESULTS_FILE) as aside:
        aside.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def say(line: str) -> None:
    """Print a line about the progress to stderr, because stdout is for the results."""
    print(line, file=sys.stderr, flush=True)
