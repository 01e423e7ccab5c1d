"""Reads and writes results as JSON files."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from sparse_opt.files import written_aside
from sparse_opt.tables import markdown_table as markdown_table
from sparse_opt.tables import table as table


def why_unwritable(path: Path) -> str:
    """Empty if results can be written to ``path``, else the reason why not. Call this before a long measurement.

    Creates the folder.
    """
    probe = path.with_name(f"{path.name}.probe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(probe) as aside:
            aside.touch()
        probe.unlink()
    except OSError as error:
        return f"results cannot be written to {path}: {error.strerror}"
    return ""


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` atomically. NaN is an error, because no valid result contains one."""
    with written_aside(path) as aside:
        aside.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def kernel_report(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """Read the report of `kernels` or `gpu_check` for a plot; exit with an error if it or matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed, which draws the figure: pip install 'sparse-opt[plot]'")
    if not path.is_file():
        parser.error(f"results {path}: no such file")
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        parser.error(f"results {path}: not JSON: {error}")
    if "kernels" not in report:
        parser.error(f"results {path}: they hold {', '.join(report)}, wanted 'kernels'")
    return report
