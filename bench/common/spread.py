"""The spread between runs of the same code, from several files of pytest-benchmark.

For each case, the ratio of the slowest to the fastest run, minus 1, by median and by fastest call. The table has its
median, 90 % quantile and maximum over the cases. A threshold for `--benchmark-compare-fail` must be larger.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import ConfigError
from sparse_opt.tables import table

from .harness import Benchmark, Report

STATISTICS = ("median", "min")


def options(parser: CommandParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", help="files of --benchmark-json, at least two")


def compare(args: Namespace, report: Report) -> None:
    """Compare the runs; the environment is that of the last one."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    report |= {"environment": runs[-1]["machine_info"]["sparse_opt"], "n_runs": len(runs), **spread(runs)}


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The number of cases, and for each statistic the quantiles of slowest / fastest - 1 over the cases.

    Raises:
        ConfigError: the runs have different cases.
    """
    stats = [{bench["fullname"]: bench["stats"] for bench in run["benchmarks"]} for run in runs]
    odd = sorted(set.union(*map(set, stats)) - set.intersection(*map(set, stats)))
    if odd:
        raise ConfigError(f"the runs have different cases: {odd[0]} and {len(odd) - 1} more are not in all")
    found: dict[str, Any] = {"n_cases": len(stats[0])}
    for name in STATISTICS:
        apart = sorted(
            max(run[case][name] for run in stats) / min(run[case][name] for run in stats) - 1 for case in stats[0]
        )
        found[name] = {"half": apart[len(apart) // 2], "nine_in_ten": apart[len(apart) * 9 // 10], "all": apart[-1]}
    return found


HEADERS = ("statistic", "median", "90 %", "maximum")


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The table's lines, in the order of HEADERS."""
    names = {"median": "by their medians", "min": "by their fastest calls"}
    return [
        [names[name], *(f"{report[name][share]:.0%}" for share in ("half", "nine_in_ten", "all"))]
        for name in STATISTICS
    ]


main = Benchmark(
    name="pytest_spread",
    command="python -m sparse_opt.bench.common.spread",
    doc=__doc__,
    options=options,
    problem=lambda args: "" if len(args.files) > 1 else f"found one run, {args.files[0]}; expected two or more",
    measure=compare,
    text=lambda report: table(HEADERS, rows(report)),
    output="bench/results/pytest_spread.json",
).main

if __name__ == "__main__":
    sys.exit(main())
