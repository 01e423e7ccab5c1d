"""Size and speed targets of patches, and their comparison with a report of `sparse-opt bench delta`.

The report has the format of the results' JSON, so that stored files can be judged again. Speeds are judged on the case
with about 1 % changed: on a GPU against the targets for an H200, on a CPU per core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparse_opt.delta.codec.words import LEVELS as LEVELS

from ..kernels.table.targets import Verdict

FEW, MORE = "1.2%", "2.6%"
PACKED_BYTES = 1.6  # a changed element
X_ENTROPY = 1.05
OF_RAW = 1.01
PACKED_GB_PER_S, TIGHT_GB_PER_S = 1000.0, 200.0  # on an H200
TIGHT_CPU_GB_PER_S = 0.5  # a core
PULSE = "PULSEPT1, format 3"


def judge(report: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts on all targets that can be computed from the report."""
    return [verdict for case in report["cases"] for verdict in _of_case(case, report["device"], report["threads"])]


def _of_case(case: Mapping[str, Any], device: str, threads: int) -> Iterator[Verdict]:
    rows = {row["coder"]: row for row in case["rows"]}
    where = f"{case['case']}, {case['layout']}"

    def verdict(what: str, unit: str, found: float, limit: float, at_most: bool = True) -> Verdict:
        return Verdict(f"{what}, {where}", device, None, unit, found, limit, at_most)

    for name, row in rows.items():
        if row["is_level"]:
            yield verdict(name, "of the raw tensor", row["share_of_raw"], OF_RAW)
    for level in LEVELS:
        masked, whole = rows.get(f"{level}, over the mask"), rows.get(level)
        if masked and whole:
            yield verdict(f"{level}, over the mask", "x the form without a mask", masked["bytes"] / whole["bytes"], 1.0)
    if case["case"] in (FEW, MORE) and (tight := rows.get("tight")):
        each = tight["bytes_per_change"]
        yield verdict("tight", "x the entropy", each / case["entropy_bytes_per_change"], X_ENTROPY)
        rice = case["computed_rice_bytes_per_change"]
        yield verdict("tight", "x Rice codes by exponent, computed", each / rice, 1.0)
        if pulse := rows.get(PULSE):
            yield verdict("tight", f"x {PULSE}", each / pulse["bytes_per_change"], 1.0)
    if case["case"] == FEW:
        if packed := rows.get("packed"):
            yield verdict("packed", "bytes a changed element", packed["bytes_per_change"], PACKED_BYTES)
        yield from _speeds(rows, verdict, device, threads)


def _speeds(rows: Mapping[str, Mapping[str, Any]], verdict: Any, device: str, threads: int) -> Iterator[Verdict]:
    directions = ("encode", "decode")
    if device == "cuda":
        for level, limit in (("packed", PACKED_GB_PER_S), ("tight", TIGHT_GB_PER_S)):
            if row := rows.get(level):
                for way in directions:
                    yield verdict(f"{level}, {way}", "GB/s", row[f"{way}_gb_per_s"], limit, False)
    elif tight := rows.get("tight"):
        for way in directions:
            rate = tight[f"{way}_gb_per_s"] / threads
            yield verdict(f"tight, {way}", "GB/s a core", rate, TIGHT_CPU_GB_PER_S, False)
