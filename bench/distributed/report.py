"""Report of `bench distributed`: the table of the rows, the checks of their results, and the targets."""

from __future__ import annotations

from collections.abc import Callable

from ..common.harness import Report
from ..common.report import Columns, machine_line, render
from .results import Row, find, timed
from .targets import BOUND_COLUMNS, EFFICIENCY_COLUMNS, RATIO_COLUMNS, bounds, efficiencies, ratios


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
        "x nnz": lambda row: f"{row['reduced_bytes'] / row['nnz']:.4f}" if row["nnz"] else "",
        "other MB": lambda row: f"{row['other_bytes'] / 1e6:.1f}",
    }


def _gib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f}"


def heading(report: Report) -> str:
    """What a step is, in one line."""
    settings = report["settings"]
    notes = ", activations checkpointed" if settings["gradient_checkpointing"] else ""
    notes += ", layers compiled" if settings.get("compile") else ""
    notes += ", DPO against the base weights" if settings["dpo"] else ""
    in_a_row = settings.get("steps_in_a_row", 1)
    notes += f", up to {in_a_row} steps in a row" if in_a_row > 1 else ""
    notes += "" if settings.get("share_cores", True) else ", each process on its own cores"
    limit = settings.get("limit_gib")
    notes += "" if limit is None else f", at most {limit:g} GiB of each GPU"
    return (
        f"Llama of the shape {settings['shape']}, random bf16 weights; one pair of {settings['sequence_length']} "
        f"tokens per GPU, forward, backward and step{notes}; {settings['density']:.1%} of the matrices' elements active"
    )


def text(report: Report, *, markdown: bool = False) -> str:
    """The report for a terminal, or in Markdown: the rows, the checks, the targets and the efficiency."""
    parts = [
        f"{heading(report)}." if markdown else f"{heading(report)}\n{machine_line(report)}",
        render(columns(report), timed(report), n_words=1, markdown=markdown),
        check_line(report),
    ]
    if found := ratios(report):
        parts.append(render(RATIO_COLUMNS, found, n_words=3, n_last_words=1, markdown=markdown))
    if found := bounds(report):
        parts.append(render(BOUND_COLUMNS, found, n_words=2, n_last_words=1, markdown=markdown))
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


def missing_lines(report: Report) -> list[str]:
    """One line that names the rows without a time, if there are any."""
    found: dict[str, list[str]] = {}
    for row in report["missing"]:
        found.setdefault(f"{row['world_size']} x {row['network']}", []).append(row["variant"])
    names = "; ".join(f"{where}: {', '.join(variants)}" for where, variants in found.items())
    return [f"not measured: {names}; the same command with --resume measures them"] if names else []


def check_line(report: Report) -> str:
    """What was checked."""
    found = [row["check"] for row in report["rows"] if row["check"] is not None]
    n_met = sum(check["met"] for check in found)
    commits = sorted({(row["commit"] or "unknown")[:9] for row in report["rows"]})
    several = f" Rows of commits {', '.join(commits)}." if len(commits) > 1 else ""
    checked = f"{n_met} of {len(found)} checked rows"
    return f"The first update is that of one device on the pairs of all GPUs in {checked}.{several}"
