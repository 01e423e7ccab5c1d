"""Report of `bench scale`: the table of rows, and the largest model that each method trains on a GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from ..common.harness import Report
from ..common.report import Columns, render
from ..training.baseline.run import DPO_BETA
from .cases import SHAPES, SPARSE_OPTIONS, Case, n_parameters

Row = Mapping[str, Any]
# The first step's policy is its reference, so that the loss is ln 2. Its two forward passes may use different kernels.
FIRST_LOSS_ATOL = 0.01
# Compiled passes with and without gradients are fused differently. On the 32B shape the log-probability of a token then
# differs by 0.067 (the root of the mean square; the lab notebook). For the sums over n tokens of two sequences, times
# the beta of DPO, that is 0.1 * 0.067 * sqrt(2 n), and half of it in the loss; twice this is allowed.
COMPILED_TOKEN_RMS = 0.067
# Memory that torch's allocator may use by GPU, in GiB; the rest is CUDA's own.
GPUS = {"80 GB": 78.0, "141 GB": 139.0}


def case_of(row: Row) -> Case:
    """The case of a row, whose values have been through JSON."""
    return Case(**row["case"])


def sorted_rows(report: Report) -> list[Row]:
    """Rows by model size, method, and the other settings."""
    shapes = list(SHAPES)
    return sorted(report["rows"], key=lambda row: (shapes.index(row["case"]["shape"]), case_of(row).key()))


def step_s(row: Row) -> float:
    """The median time of a step after those of the warm-up."""
    return statistics.median(step["step_s"] for step in row["steps"][case_of(row).n_warmup :])


def _peak(row: Row) -> str:
    if not row["fits"]:
        return f"does not fit: more than {row['needs_more_than_bytes'] / 2**30:.1f}"
    return "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.1f}"


def _if_fits(row: Row, cell: str) -> str:
    return cell if row["fits"] else ""


RUN_LABELS = {"compile": "compiled", "cuda_graphs": "graph", "precomputed_reference": "precomputed reference"}
COLUMNS: Columns = {
    "model": lambda row: row["case"]["shape"],
    "parameters": lambda row: f"{n_parameters(row['case']['shape']) / 1e9:.2f} B",
    "method": lambda row: row["case"]["method"],
    "active": lambda row: f"{row['case']['density']:.1%}" if row["case"]["method"] in SPARSE_OPTIONS else "",
    "tokens": lambda row: str(row["case"]["sequence_length"]),
    "activations": lambda row: "checkpointed" if row["case"]["checkpointing"] else "kept",
    "memory": lambda row: (
        row["device_name"] + ("" if row["case"]["limit_gib"] is None else f", limit {row['case']['limit_gib']:g} GiB")
    ),
    "peak GiB": _peak,
    "weights GiB": lambda row: _if_fits(row, f"{row['bytes']['weights'] / 2**30:.1f}" if row["fits"] else ""),
    "run": lambda row: ", ".join(label for name, label in RUN_LABELS.items() if row["case"][name]),
    "commit": lambda row: row["commit"][:9],
    "ms": lambda row: f"{1e3 * step_s(row):.0f}" if row["fits"] else "",
}


def largest(rows: list[Row], gib: float) -> dict[str, str]:
    """Method -> the largest of the measured models that it trains in as many GiB, with its peak.

    A row counts if its process held that much at most, or was limited to it.
    """
    found: dict[str, tuple[int, str]] = {}
    for row in rows:
        if not row["fits"] or row["peak_reserved_bytes"] is None or row["peak_reserved_bytes"] > gib * 2**30:
            continue
        case = case_of(row)
        size = n_parameters(case.shape)
        label = f"{case.shape}, {case.sequence_length} tokens, {row['peak_memory_bytes'] / 2**30:.1f} GiB"
        if size > found.get(case.method, (0, ""))[0]:
            found[case.method] = size, label
    return {method: label for method, (_, label) in found.items()}


def text(report: Report, *, markdown: bool = False) -> str:
    """The table, and a line for each GPU and method."""
    rows, point = sorted_rows(report), "- " if markdown else ""
    lines = [heading(report), "", render(COLUMNS, rows, n_words=7, markdown=markdown), *([""] if markdown else [])]
    for gpu, gib in GPUS.items():
        for method, label in largest(rows, gib).items():
            lines.append(f"{point}largest measured model on one GPU of {gpu} ({gib:g} GiB), {method}: {label}")
    if report["not_begun"]:
        lines.append(f"{point}not begun, because time was up: {'; '.join(report['not_begun'])}")
    return "\n".join(lines)


def heading(report: Report) -> str:
    """What is measured, in one line."""
    case = report["rows"][0]["case"] if report["rows"] else None
    if case is None:
        return "No row was measured."
    return (
        f"A DPO step on one pair, random bf16 weights; sparse and lean: {case['pattern']} masks "
        "with stochastic rounding, lean with bf16 moments and base weights in host memory; "
        f"lora: rank {case['lora_rank']}; dense: with a frozen reference model."
    )


def first_loss_atol(case: Case) -> float:
    """How far the first step's loss may be from ln 2."""
    if not case.compile:
        return FIRST_LOSS_ATOL
    return 2 * 0.5 * DPO_BETA * COMPILED_TOKEN_RMS * math.sqrt(2 * case.sequence_length)


def wrong_lines(report: Report) -> list[str]:
    """The errors in the results, a line each."""
    wrong = [f"{name}: the run failed" for name in report["failed"]]
    for row in report["rows"]:
        if not row["fits"]:
            continue
        name, first = case_of(row).name, row["steps"][0]["loss"]
        if not abs(first - math.log(2)) <= first_loss_atol(case_of(row)):
            wrong.append(f"WRONG RESULT: {name} begins at a DPO loss of {first}, expected ln 2 = {math.log(2):.6f}")
        if not all(step["grad_norm"] > 0 for step in row["steps"]):
            wrong.append(f"WRONG RESULT: {name} has a gradient norm of 0, expected more than 0")
        if row["case"]["method"] in ("sparse", "lean") and row["case"]["pattern"] != "element" and not row["n_tiled"]:
            wrong.append(f"WRONG RESULT: {name} computes no weight gradient by tiles")
    return wrong
