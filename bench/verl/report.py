"""Report of `bench verl`: the table of the engines, the comparison of their first updates, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.harness import Report
from ..common.report import Columns, machine_line, render

Row = Mapping[str, Any]
DENSE, SPARSE = "fsdp2", "sparse_fsdp2"

# Of the 3B shape on GPUs: value -> the largest ratio of the sparse engine's to that of verl's.
TARGETS = {"ms": 0.85, "peak_memory_bytes": 0.6}
_NAMES = {"ms": "time", "peak_memory_bytes": "peak memory"}


def find(report: Report, engine: str) -> Row | None:
    """The row of an engine, or None."""
    return next((row for row in report["rows"] if row["engine"] == engine), None)


def columns(report: Report) -> Columns:
    """Columns of the table; ratios are to verl's engine."""
    dense = find(report, DENSE)

    def gib(name: str) -> Any:
        return lambda row: "" if row[name] is None else f"{row[name] / 2**30:.2f}"

    return {
        "engine": lambda row: f"{row['engine']}, {'SparseAdamW' if row['engine'] == SPARSE else 'AdamW'}",
        "ms": "{ms:.1f}",
        "p20 - p80": "{p20_ms:.1f} - {p80_ms:.1f}",
        "x fsdp2": lambda row: "" if dense is None or row is dense else f"{row['ms'] / dense['ms']:.2f}",
        "peak GiB": gib("peak_memory_bytes"),
        "between updates GiB": gib("held_bytes"),
    }


def heading(report: Report) -> str:
    """What an update is, in one line."""
    settings = report["settings"]
    fused = settings.get("fused_kernels", "none")  # added later
    notes = ", log-probabilities not fused" if fused == "none" else f", fused log-probabilities ({fused})"
    notes += ", activations checkpointed" if settings["gradient_checkpointing"] else ""
    return (
        f"Actor update of verl {settings['verl']} on {settings['gpus']} ranks: Llama of the shape {settings['shape']}, "
        f"{settings['model_dtype']} weights, bf16 forward pass, {settings['attention']} attention; on each rank "
        f"{settings['batch_size']} sequences of {settings['sequence_length']} tokens in micro-batches of "
        f"{settings['micro_batch_size']}{notes}; {settings['density']:.1%} of the matrices' elements active, "
        f"{settings['pattern']}"
    )


def text(report: Report, *, markdown: bool = False) -> str:
    """The report for a terminal, or in Markdown."""
    if not report["rows"]:
        return "no engine was measured"
    check = report["check"]
    parts = [
        f"{heading(report)}." if markdown else f"{heading(report)}\n{machine_line(report)}",
        render(columns(report), report["rows"], n_words=1, markdown=markdown),
        f"The first updates agree: {_errors(check)}.",
    ]
    if found := verdicts(report):
        parts.append(render(TARGET_COLUMNS, found, n_words=1, n_last_words=1, markdown=markdown))
    return "\n\n".join(parts)


def _errors(check: Row) -> str:
    return (
        f"gradients of the active elements differ by {check['moment_error']:.1e}, expected at most "
        f"{check['moment_tolerance']:.1e}; updates by {check['update_error']:.1e}, expected at most "
        f"{check['update_tolerance']:.1e}"
    )


def wrong_line(check: Row) -> str:
    """The error of engines whose first updates differ, which are not timed."""
    return f"the first updates of the engines differ: {_errors(check)}"


TARGET_COLUMNS: Columns = {
    "sparse_fsdp2 / fsdp2": "{what}",
    "ratio": "{ratio:.3f}",
    "target": "<= {at_most:g}",
    "verdict": lambda found: "met" if found["met"] else "missed",
}


def verdicts(report: Report) -> list[dict[str, Any]]:
    """The ratios that have a target: of the 3B shape on GPUs."""
    settings = report["settings"]
    dense, sparse = find(report, DENSE), find(report, SPARSE)
    if dense is None or sparse is None or (settings["shape"], settings["device"]) != ("3b", "cuda"):
        return []
    found = []
    for name, at_most in TARGETS.items():
        ratio = sparse[name] / dense[name]
        found.append({"what": _NAMES[name], "ratio": ratio, "at_most": at_most, "met": ratio <= at_most})
    return found
