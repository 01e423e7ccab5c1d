"""Targets of `bench distributed`: ratios of rows, bounds on single rows, and the efficiency on more GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..common.harness import Report
from ..common.report import Columns
from .results import Row, find, timed


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def _largest(report: Report) -> int:
    """The largest number of GPUs of the rows; targets are on it."""
    return max((row["world_size"] for row in report["rows"]), default=1)


@dataclass(frozen=True)
class Target:
    """A bound on the ratio of a row with bf16 gradients to another row of as many GPUs and the same network."""

    layout: str
    network: str
    other: str  # the other row's variant, with the row's values in braces
    at_most: float
    field: str = "ms"


TARGETS = (
    Target("replicate", "default", "local_{pattern}_{grad_dtype}", 1.05),
    Target("replicate", "default", "ddp", 0.55),
    Target("replicate", "sockets", "ddp", 1 / 20),
    Target("fsdp2", "default", "fsdp2", 0.85),
    Target("fsdp2", "default", "fsdp2", 0.72, "peak_memory_bytes"),
)
RATIO_COLUMNS: Columns = {
    "row": "{row[variant]}, {row[network]}, {row[world_size]} GPUs",
    "compared with": "{other[variant]}",
    "what": lambda found: {"ms": "time", "peak_memory_bytes": "peak memory"}[found["field"]],
    "ratio": "{ratio:.3f}",
    "target": "<= {at_most:.3f}",
    "verdict": lambda found: _verdict(found["ratio"] <= found["at_most"]),
}


def ratios(report: Report) -> list[dict[str, Any]]:
    """The ratio of each target whose two rows were measured, compiled, on the largest number of GPUs."""
    largest = _largest(report)
    if largest == 1 or not report["settings"]["compile"]:
        return []
    found = []
    for target in TARGETS:
        for row in timed(report):
            where = (row["layout"], row["network"], row["world_size"])
            if where != (target.layout, target.network, largest) or row["grad_dtype"] != "bf16":
                continue
            other = find(report, largest, target.network, target.other.format_map(row))
            if other is not None and other[target.field] is not None:
                ratio = row[target.field] / other[target.field]
                found.append({**vars(target), "row": row, "other": other, "ratio": ratio})
    return found


# A DPO step of the 70B shape on 4 GPUs of 80 GB: the peak of each, from building the model on.
PEAK_SHAPE, PEAK_VARIANTS, PEAK_GPUS = "70b", ("fsdp2_tile64_fp32", "fsdp2_tile64_bf16"), 4
PEAK_GIB = 62
BOUND_COLUMNS: Columns = {
    "row": "{row[variant]}, {row[network]}, {row[world_size]} GPUs",
    "what": "{what}",
    "measured": "{measured}",
    "target": "{target}",
    "verdict": lambda found: _verdict(found["met"]),
}


def bounds(report: Report) -> list[dict[str, Any]]:
    """The bytes of collectives of each sparse row on the largest number of GPUs, and the peak memory of the 70B shape.

    Replicate must send its compact gradients, of 2 or 4 bytes for each active element, and nothing else. FSDP2 gathers
    weights too, but must reduce nothing else.
    """
    found = []
    for row in timed(report):
        if row["world_size"] == _largest(report) > 1 and row["layout"] in ("replicate", "fsdp2") and row["pattern"]:
            found.append(_bytes_bound(row))
        if _has_peak_bound(report, row):
            peak = max(row["peak_memory_bytes"], row["build_peak_bytes"]) / 2**30
            target = {"target": f"<= {PEAK_GIB} GiB", "met": peak <= PEAK_GIB}
            found.append({"row": row, "what": "peak memory of a GPU", "measured": f"{peak:.1f} GiB", **target})
    return found


def _bytes_bound(row: Row) -> dict[str, Any]:
    replicate = row["layout"] == "replicate"
    itemsize = {"fp32": 4, "bf16": 2}[row["grad_dtype"]]
    measured = row["reduced_bytes"] + (row["other_bytes"] if replicate else 0)
    return {
        "row": row,
        "what": "bytes of all collectives" if replicate else "bytes reduced",
        "measured": f"{measured:,}",
        "target": f"= {row['n_reduced']:,} x {itemsize}",
        "met": measured == row["n_reduced"] * itemsize,
    }


def _has_peak_bound(report: Report, row: Row) -> bool:
    settings = report["settings"]
    of_target = settings["shape"] == PEAK_SHAPE and settings["dpo"] and row["world_size"] == PEAK_GPUS
    return of_target and row["variant"] in PEAK_VARIANTS and row["peak_memory_bytes"] is not None


TARGET_EFFICIENCY = 0.95
EFFICIENCY_COLUMNS: Columns = {
    "time on one GPU / time": "{variant}",
    "GPUs": "{world_size}",
    "efficiency": "{efficiency:.3f}",
    "target": lambda found: f">= {TARGET_EFFICIENCY}" if found["has_target"] else "",
    "verdict": lambda found: _verdict(found["efficiency"] >= TARGET_EFFICIENCY) if found["has_target"] else "",
}


def efficiencies(report: Report) -> list[dict[str, Any]]:
    """Time on one GPU over the time on more, at the same work per GPU; one GPU of replicate is local.

    The target is that of compiled rows with a mask on the largest number of GPUs.
    """
    found = []
    for row in timed(report):
        name = row["variant"].replace("replicate", "local")
        alone = find(report, 1, "default", name)
        if alone is not None and row["network"] == "default" and row["world_size"] > 1 and row["layout"] != "local":
            largest = row["world_size"] == _largest(report)
            has_target = bool(row["pattern"] and largest and report["settings"]["compile"])
            found.append({**row, "efficiency": alone["ms"] / row["ms"], "has_target": has_target})
    return found
