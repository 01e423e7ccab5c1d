"""The results file of `bench distributed`, and its rows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_opt.errors import ConfigError

from ..common.environment import environment
from ..common.harness import Report
from .variants import VARIANTS, default_variants

Row = Mapping[str, Any]

# A file has rows of one of each.
SETTINGS = (
    *("shape", "sequence_length", "density", "learning_rate", "seed"),
    *("gradient_checkpointing", "compile", "dpo", "device", "limit_gib", "steps_in_a_row"),
    "share_cores",
)


def new_report(args: Namespace) -> Report:
    """A report of these options without rows."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    here = environment(args.device)
    return {"benchmark": "distributed", "environment": here, "completed": False, "settings": settings, "rows": []}


def read_report(args: Namespace) -> Report:
    """The report in the results file `output`, or one without rows if the file does not exist.

    Raises:
        ConfigError: the file is of other settings, or no report of this benchmark.
    """
    path: Path = args.output
    if not path.is_file():
        return new_report(args)
    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
        found = report["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--output {path}: expected a results file of this benchmark: {error!r}") from error
    for name in SETTINGS:
        expected = getattr(args, name)
        if found.get(name) != expected:
            raise ConfigError(
                f"--output {path} has rows of {name} {found.get(name)}, expected {expected}: name another file"
            )
    return report


def find(report: Report, world_size: int, network: str, variant: str) -> Row | None:
    """The timed row, or None."""
    for row in timed(report):
        if (row["world_size"], row["network"], row["variant"]) == (world_size, network, variant):
            return row
    return None


def missing_rows(report: Report, args: Namespace) -> list[dict[str, Any]]:
    """The rows of these options that have no time."""
    done = {(row["world_size"], row["network"], row["variant"]) for row in timed(report)}
    return [
        {"world_size": n, "network": network, "variant": name}
        for n in args.gpus
        for network in (args.networks if n > 1 else args.networks[:1])
        for name in args.variants or default_variants(n, network)
        if (n, network, name) not in done
    ]


def timed(report: Report) -> list[Row]:
    """The timed rows by network, number of GPUs and variant."""
    names = list(VARIANTS)
    rows = [row for row in report["rows"] if row["ms"] is not None]
    return sorted(rows, key=lambda row: (row["network"], row["world_size"], names.index(row["variant"])))
