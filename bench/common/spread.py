"""How far runs of one state lie apart: several files of pytest-benchmark, case by case.

Of each case the slowest over the fastest of its runs, less 1, by median and by fastest call; of these the half, nine in
ten and all. A threshold for `--benchmark-compare-fail` has to stand above it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import table, why_unwritable, write_json

STATISTICS = ("median", "min")


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the spread; return 0 on success."""
    parser = argparse.ArgumentParser(prog="python -m sparse_opt.bench.common.spread", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="of --benchmark-json, two or more")
    parser.add_argument(
        "--output", type=Path, default=Path("bench/results/pytest_spread.json"), help="JSON (%(default)s)"
    )
    args = parser.parse_args(argv)
    if len(args.files) < 2:
        parser.error(f"{args.files[0]} is one run, wanted two or more to compare")
    if problem := why_unwritable(args.output):
        parser.error(problem)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    try:
        report = {
            "benchmark": "pytest_spread",
            "environment": runs[-1]["machine_info"]["sparse_opt"],
            "n_runs": len(runs),
            **spread(runs),
        }
    except ValueError as error:
        parser.error(str(error))
    write_json(args.output, report)
    print(f"{table(HEADERS, rows(report))}\n\nresults: {args.output}")
    return 0


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The number of cases, and for each statistic the quantiles of slowest / fastest - 1 over the cases.

    Raises:
        ValueError: the runs hold different cases.
    """
    stats = [{bench["fullname"]: bench["stats"] for bench in run["benchmarks"]} for run in runs]
    odd = sorted(set.union(*map(set, stats)) - set.intersection(*map(set, stats)))
    if odd:
        raise ValueError(f"the runs hold different cases: {odd[0]} and {len(odd) - 1} more are not in all")
    found: dict[str, Any] = {"n_cases": len(stats[0])}
    for name in STATISTICS:
        apart = sorted(
            max(run[case][name] for run in stats) / min(run[case][name] for run in stats) - 1 for case in stats[0]
        )
        found[name] = {"half": apart[len(apart) // 2], "nine_in_ten": apart[len(apart) * 9 // 10], "all": apart[-1]}
    return found


HEADERS = ("of the cases", "half", "nine in ten", "all")


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The table's lines, in the order of HEADERS."""
    names = {"median": "by their medians", "min": "by their fastest calls"}
    return [
        [names[name], *(f"{report[name][share]:.0%}" for share in ("half", "nine_in_ten", "all"))]
        for name in STATISTICS
    ]


if __name__ == "__main__":
    sys.exit(main())
