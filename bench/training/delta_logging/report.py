"""Tables and target of the benchmark of a logging loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.harness import Report
from ...common.report import Columns, machine_line, render
from ...kernels.table.targets import Verdict

LIMIT_MS = 10.0
COLUMNS: Columns = {
    "mode": "{mode}",
    "ms a step": "{plain_ms[median]:.2f}",
    "logged": "{logged_ms[median]:.2f}",
    "slower by, mean": "{slower_mean_ms:.2f}",
    "median": "{slower_median_ms:.2f}",
    "append, host": "{append_host_ms[median]:.2f}",
    "changed": "{share_changed:.2%}",
    "MB a step": lambda row: f"{row['bytes_per_step'] / 1e6:.2f}",
    "behind": "{behind_s:.2f} s",
}
PART_COLUMNS: Columns = {
    "mode": "{mode}",
    "part of an append": "{part}",
    "ms": "{ms:.2f}",
    "host ms": "{host_ms:.2f}",
    "wall ms": "{wall_ms:.2f}",
}


def judge(report: Mapping[str, Any]) -> list[Verdict]:
    """The verdict of each mode, on a GPU and at the 3B shape."""
    if report["settings"]["small"] or "gpu" not in report["environment"]["machine"]:
        return []
    return [
        Verdict(
            f"a log of every step, mode {row['mode']}",
            "cuda",
            None,
            "ms a step",
            max(row["slower_mean_ms"], row["slower_median_ms"]),
            LIMIT_MS,
            True,
        )
        for row in report["rows"]
    ]


def tables(report: Mapping[str, Any], *, markdown: bool = False) -> list[str]:
    """The tables: each mode, and the parts of an append."""
    parts = [
        {"mode": row["mode"], "part": name, **part} for row in report["rows"] for name, part in row["parts"].items()
    ]
    return [
        render(COLUMNS, report["rows"], markdown=markdown),
        "",
        render(PART_COLUMNS, parts, n_words=2, markdown=markdown),
        *([""] if markdown else []),
        *memory_lines(report),
    ]


def text(report: Report) -> str:
    where = f"{machine_line(report)}; level {report['settings']['level']}, file system {report['file_system']}"
    return "\n".join([where, *tables(report)])


def memory_lines(report: Mapping[str, Any]) -> list[str]:
    """List the time until a step is on disk, and the memory that the log adds, by mode."""
    lines = []
    for row in report["rows"]:
        peaks = row["peaks"]
        lines.append(
            f"- {row['mode']}: on disk {row['on_disk_ms']['median']:.1f} ms after the append, "
            f"{row['on_disk_bytes_per_s'] / 1e6:.0f} MB/s; the base took {row['create_s']:.1f} s"
        )
        if peaks["plain"]["device_bytes"] is not None:
            more = {key: peaks["logged"][key] - peaks["plain"][key] for key in peaks["plain"]}
            lines.append(
                f"- {row['mode']}: the log adds {more['device_bytes'] / 2**30:.2f} GiB to the device's peak of "
                f"{peaks['plain']['device_bytes'] / 2**30:.2f} GiB (a state is {row['state_bytes'] / 2**30:.2f}), and "
                f"{more['pinned_bytes'] / 2**20:.0f} MiB of pinned memory"
            )
    return lines


def document_text(report: Mapping[str, Any]) -> str:
    """The run as the tables of docs/delta_logs.md."""
    settings = report["settings"]
    lines = [
        f"{report['rows'][0]['numel'] / 1e9:.2f} B bf16 weights, {settings['batch_size']} pair(s) of "
        f"{settings['sequence_length']} tokens a step of DPO, level {settings['level']}, file system "
        f"{report['file_system']}.",
        "",
        *tables(report, markdown=True),
    ]
    return "\n".join(lines)
