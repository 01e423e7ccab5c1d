"""Report of `bench distributed`: the results file, the tables, and ratios to targets."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_opt.errors import ConfigError

from ..common.environment import environment
from ..common.harness import Report
from ..common.report import Columns, machine_line, render
from .variants import VARIANTS

Row = Mapping[str, Any]

# A file has rows of one of each.
SETTINGS = (
    *("shape", "sequence_length", "density", "learning_rate", "seed"),
    *("gradient_checkpointing", "compile", "dpo", "device"),
)


def read_report(args: Namespace) -> Report:
    """The results file, or a report without rows if it does not exist.

    Raises:
        ConfigError: the file is of other settings, or no report of this benchmark.
    """
    path: Path = args.output
    settings = {name: getattr(args, name) for name in SETTINGS}
    if not path.is_file():
        here = environment(args.device)
        return {"benchmark": "distributed", "environment": here, "completed": False, "settings": settings, "rows": []}
    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
        found = report["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--output {path}: expected a results file of this benchmark: {error!r}") from error
    for name, value in settings.items():
        if found.get(name) != value:
            raise ConfigError(
                f"--output {path} has rows of {name} {found.get(name)}, expected {value}: name another file"
            )
    return report


def find(report: Report, world_size: int, network: str, variant: str) -> Row | None:
    """The timed row, or None."""
    for row in timed(report):
        if (row["world_size"], row["network"], row["variant"]) == (world_size, network, variant):
            return row
    return None


def timed(report: Report) -> list[Row]:
    """The timed rows by network, number of GPUs and variant."""
    names = list(VARIANTS)
    rows = [row for row in report["rows"] if row["ms"] is not None]
    return sorted(rows, key=lambda row: (row["network"], row["world_size"], names.index(row["variant"])))


def columns(report: Report) -> Columns:
    """Columns of the table; a ratio is to another row of as many GPUs."""

    def time_to(variant: str, network: str = "{network}") -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            name = variant.format_map(row)
            other = find(report, row["world_size"], network.format_map(row), name)
            return "" if other is None or name == row["variant"] else f"{row['ms'] / other['ms']:.2f}"

        return cell

    return {
        "network": "{network}",
        "GPUs": "{world_size}",
        "step": lambda row: " ".join(filter(None, (row["layout"], row["pattern"]))),
        "gradients": lambda row: row["grad_dtype"] or "bf16",
        "ms": "{ms:.1f}",
        "p20 - p80": "{p20_ms:.1f} - {p80_ms:.1f}",
        "x local": time_to("local_{pattern}_{grad_dtype}", "default"),
        "x ddp": time_to("ddp"),
        "x fsdp2": time_to("fsdp2"),
        "peak GiB": lambda row: _gib(row["peak_memory_bytes"]),
        "reduced MB": lambda row: f"{row['reduced_bytes'] / 1e6:.1f}",
        "x nnz": _bytes_per_nnz,
        "other MB": lambda row: f"{row['other_bytes'] / 1e6:.1f}",
    }


def _gib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f}"


def _bytes_per_nnz(row: Row) -> str:
    """Reduced bytes per active element, exactly if they are whole."""
    if not row["nnz"]:
        return ""
    whole, rest = divmod(row["reduced_bytes"], row["nnz"])
    return f"{row['reduced_bytes'] / row['nnz']:.4f}" if rest else f"{whole}"


def heading(report: Report) -> str:
    """What a step is, in one line."""
    settings = report["settings"]
    notes = ", activations checkpointed" if settings["gradient_checkpointing"] else ""
    notes += ", layers compiled" if settings.get("compile") else ""
    notes += ", DPO against the base weights" if settings["dpo"] else ""
    return (
        f"Llama of the shape {settings['shape']}, random bf16 weights; one pair of {settings['sequence_length']} "
        f"tokens per GPU, forward, backward and step{notes}; {settings['density']:.1%} of the matrices' elements active"
    )


def text(report: Report, *, markdown: bool = False) -> str:
    """The report for a terminal, or in Markdown: the rows, the checks, the ratios to targets and the efficiency."""
    parts = [
        f"{heading(report)}." if markdown else f"{heading(report)}\n{machine_line(report)}",
        render(columns(report), timed(report), n_words=1, markdown=markdown),
        check_line(report),
    ]
    if found := ratios(report):
        parts.append(render(RATIO_COLUMNS, found, n_words=3, n_last_words=1, markdown=markdown))
    if found := efficiencies(report):
        parts.append(render(EFFICIENCY_COLUMNS, found, n_last_words=1, markdown=markdown))
    return "\n\n".join(parts)


def progress_line(row: Row) -> str:
    """A row while the benchmark runs."""
    where = f"{row['world_size']} x {row['network']}, {row['variant']}"
    check = row["check"]
    if check is not None and not check["met"]:
        return f"{where}: {wrong_line(row)}"
    if "ms" in row:
        return f"{where}: {row['ms']:.1f} ms ({row['p20_ms']:.1f} - {row['p80_ms']:.1f})"
    checked = "not checked" if check is None else f"update within {check['update_error']:.1e} of one device's"
    peak = f", peak {_gib(row['peak_memory_bytes'])} GiB" if row["peak_memory_bytes"] is not None else ""
    return f"{where}: {checked}{peak}, {row['reduced_bytes'] / 1e6:.1f} MB reduced"


def wrong_line(row: Row) -> str:
    """The error of a row whose update is not that of one device."""
    check = row["check"]
    return (
        f"first moments are off by {check['moment_error']:.2e}, expected at most {check['moment_tolerance']:.2e}; "
        f"updates by {check['update_error']:.2e}, expected at most {check['update_tolerance']:.2e}; most of "
        f"the former is in {check['worst_parameter']}"
    )


def wrong_lines(report: Report) -> list[str]:
    """An error for each row with a wrong result."""
    return [
        f"{row['world_size']} x {row['network']}, {row['variant']}: WRONG RESULT: {wrong_line(row)}"
        for row in report["rows"]
        if row["check"] is not None and not row["check"]["met"]
    ]


def check_line(report: Report) -> str:
    """What was checked."""
    found = [row["check"] for row in report["rows"] if row["check"] is not None]
    n_met = sum(check["met"] for check in found)
    commits = sorted({(row["commit"] or "unknown")[:9] for row in report["rows"]})
    several = f" Rows of commits {', '.join(commits)}." if len(commits) > 1 else ""
    checked = f"{n_met} of {len(found)} checked rows"
    return f"The first update is that of one device on the pairs of all GPUs in {checked}.{several}"


@dataclass(frozen=True)
class Target:
    """A bound on the ratio of a row to another row of as many GPUs."""

    layout: str
    network: str
    other: str  # the other row's variant, with the row's values in braces
    other_network: str
    at_most: float
    field: str = "ms"


TARGETS = (
    Target("replicate", "default", "local_{pattern}_{grad_dtype}", "default", 1.03),
    Target("replicate", "default", "ddp", "default", 0.70),
    Target("replicate", "sockets", "ddp", "sockets", 1 / 18),
    Target("replicate", "sockets", "{variant}", "default", 1.5),
    Target("fsdp2", "default", "fsdp2", "default", 0.85),
    Target("fsdp2", "default", "fsdp2", "default", 0.70, "peak_memory_bytes"),
)
TARGET_EFFICIENCY = 0.95
RATIO_COLUMNS: Columns = {
    "row": "{row[variant]}, {row[network]}, {row[world_size]} GPUs",
    "compared with": "{other[variant]}, {other[network]}",
    "what": lambda found: {"ms": "time", "peak_memory_bytes": "peak memory"}[found["field"]],
    "ratio": "{ratio:.3f}",
    "target": "<= {at_most:.3f}",
    "verdict": lambda found: _verdict(found["ratio"] <= found["at_most"]),
}
EFFICIENCY_COLUMNS: Columns = {
    "time on one GPU / time": "{variant}",
    "GPUs": "{world_size}",
    "efficiency": "{efficiency:.3f}",
    "target": lambda found: f">= {TARGET_EFFICIENCY}" if found["pattern"] else "",
    "verdict": lambda found: _verdict(found["efficiency"] >= TARGET_EFFICIENCY) if found["pattern"] else "",
}


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def ratios(report: Report) -> list[dict[str, Any]]:
    """The ratio of each target whose two rows were measured, on the largest number of GPUs of each target's row."""
    largest = max((row["world_size"] for row in report["rows"]), default=1)
    found = []
    for target in TARGETS:
        for row in timed(report):
            if (row["layout"], row["network"], row["world_size"]) != (target.layout, target.network, largest):
                continue
            other = find(report, largest, target.other_network, target.other.format_map(row))
            if row["pattern"] is None or other is None or other[target.field] is None:
                continue
            ratio = row[target.field] / other[target.field]
            found.append({**vars(target), "row": row, "other": other, "ratio": ratio})
    return found if largest > 1 else []


def efficiencies(report: Report) -> list[dict[str, Any]]:
    """Time on one GPU over the time on more, at the same work per GPU; one GPU of replicate is local."""
    found = []
    for row in timed(report):
        name = row["variant"].replace("replicate", "local")
        alone = find(report, 1, "default", name)
        if alone is not None and row["network"] == "default" and row["world_size"] > 1 and row["layout"] != "local":
            found.append({**row, "efficiency": alone["ms"] / row["ms"]})
    return found
