"""A run of `sparse-opt bench delta` as the tables of docs/delta_logs.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_opt.tables import markdown_table

from . import targets as delta_targets

SPEED_HEADERS = ("1.2 % changed", "bytes a change", "encode ms", "GB/s", "of the copy rate", "decode ms", "GB/s")


def patch_text(report: Mapping[str, Any]) -> str:
    """The cases, speeds at about 1 % changed, bytes per change of every case, and the targets."""
    one = [case for case in report["cases"] if case["layout"] == "one tensor"]
    threads = "" if report["device"] == "cuda" else f" on {report['threads']} core(s)"
    lines = [f"{one[0]['numel'] / 1e6:.0f} M bf16 weights{threads}, copy {one[0]['copy_gb_per_s']:.0f} GB/s.", ""]
    speeds = [
        _speed_cells(row, row["coder"] if case["layout"] == "one tensor" else f"{row['coder']}, {case['layout']}")
        for case in report["cases"]
        if case["case"] == delta_targets.FEW
        for row in case["rows"]
    ]
    lines += [markdown_table(SPEED_HEADERS, speeds), ""]
    coders = list(dict.fromkeys(row["coder"] for case in one for row in case["rows"]))
    sizes = []
    for coder in coders:
        found = [_bytes_of(case, coder) for case in one]
        sizes.append([coder, *("" if size is None else f"{size:.2f}" for size in found)])
    sizes += [
        ["entropy (computed)", *(f"{case['entropy_bytes_per_change']:.2f}" for case in one)],
        ["Rice codes by exponent (computed)", *(f"{case['computed_rice_bytes_per_change']:.2f}" for case in one)],
    ]
    headers = ["bytes a change", *(f"{case['case']}: {case['share']:.2%}" for case in one)]
    lines += [markdown_table(headers, sizes), ""]
    verdicts = delta_targets.judge(report)
    missed = [verdict for verdict in verdicts if not verdict.met]
    lines.append(f"{len(verdicts)} targets: {len(verdicts) - len(missed)} met, {len(missed)} missed.")
    lines += [f"- missed: {verdict.text}" for verdict in missed]
    lines += [f"- not timed: {name}: {why}" for name, why in report["left_out"].items()]
    return "\n".join(lines)


def _speed_cells(row: Mapping[str, Any], name: str) -> list[str]:
    key = "ms" if row["clock"] == "device" else "wall_ms"
    return [
        name,
        f"{row['bytes_per_change']:.2f}",
        f"{row['encode'][key]:.2f}",
        f"{row['encode_gb_per_s']:.2f}",
        f"{row['encode_share_of_copy']:.0%}",
        f"{row['decode'][key]:.2f}",
        f"{row['decode_gb_per_s']:.2f}",
    ]


def _bytes_of(case: Mapping[str, Any], coder: str) -> float | None:
    return next((row["bytes_per_change"] for row in case["rows"] if row["coder"] == coder), None)
