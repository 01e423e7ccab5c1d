"""Writes results as JSON files, and shows their rows as tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_opt.files import written_aside
from sparse_opt.tables import markdown_table, table


def why_unwritable(path: Path) -> str:
    """Empty if results can be written to ``path``, else the reason why not. Call this before a long measurement.

    Creates the folder.
    """
    probe = path.with_name(f"{path.name}.probe{os.getpid()}")  # processes of torchrun may call this at once
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


# Heading -> cell: a format string of the row's values, or a function of the row.
Columns = Mapping[str, str | Callable[[Mapping[str, Any]], str]]


def cells(columns: Columns, row: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    return [cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()]


def render(
    columns: Columns,
    rows: Sequence[Mapping[str, Any]],
    *,
    n_words: int = 1,
    n_last_words: int = 0,
    markdown: bool = False,
) -> str:
    """The rows as a table, for a terminal or in Markdown; see `sparse_opt.tables`."""
    headers, lines = list(columns), [cells(columns, row) for row in rows]
    if markdown:
        return markdown_table(headers, lines, n_words=n_words)
    return table(headers, lines, n_words=n_words, n_last_words=n_last_words)


def machine_name(report: Mapping[str, Any]) -> str:
    """The name of the GPU, or of the CPU if the report is of a CPU."""
    machine: dict[str, Any] = report["environment"]["machine"]
    name: str = machine.get("gpu", {}).get("name", machine["cpu"])
    return name


def machine_line(report: Mapping[str, Any]) -> str:
    """Machine, versions, date and commit of a report."""
    environment = report["environment"]
    machine, versions = environment["machine"], environment["versions"]
    gpu = machine.get("gpu")
    name = f"{gpu['name']}, driver {gpu['driver']}" if gpu else f"{machine['cpu']}, {machine['logical_cpus']} cores"
    triton = f", triton {versions['triton']}" if gpu else ""
    commit, dirty, _ = (environment["commit"] or "unknown").partition("-dirty")
    return f"{name}, torch {versions['torch']}{triton}, {environment['date'][:10]}, commit {commit[:9]}{dirty}"
