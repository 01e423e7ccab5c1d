"""Show the rows of benchmarks as tables, judge them by the targets, and compare runs.

With one file: its table, with ratios to peers, and the verdict on each target of targets.yaml. With several: the table
of the last, next to the values of the others, and its ratios to them. Words choose rows: `key=value`, `key!=value` for
the others, and `key=` for those without the key. Files of `pytest bench` are read too.

A ratio of few steps (fewer than 3), or of times that vary by more than half (p20 to p80, as on a busy machine), is not
shown: it reads "unsteady".

With --docs, the tables and numbers of the documentation are written, from bench/results. They are between comments:

    <!-- bench report FILE WORDS -->, a blank line, the table, a blank line, <!-- end -->
    <!-- bench value FILE WORDS "METRIC" -->78.5 ms<!-- end -->

WORDS are those of this command. With --check nothing is written, and the exit code is 1 if a page differs.
"""

from __future__ import annotations

import functools
import operator
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sparse_opt.analysis.plots import require_matplotlib
from sparse_opt.errors import ConfigError
from sparse_opt.options import CommandParser
from sparse_opt.tables import markdown_table, table

from . import plot, rows
from .rows import Case, Row, Run, described, in_common, label, number, quantity, scale_of, worded

TARGETS = Path(__file__).with_name("targets.yaml")
RESULTS = Path("bench/results")
FEWEST, WIDEST = 3, 0.5
UNSTEADY = "unsteady"
# Of a target: name in targets.yaml -> sign, and whether a value meets the limit.
LIMITS = {"at_most": ("<=", operator.le), "at_least": (">=", operator.ge), "exactly": ("=", operator.eq)}

# Ratios


def is_unsteady(row: Row) -> bool:
    """Whether a measured value says too little for a ratio."""
    if row.p20 is None or row.p80 is None:
        return False
    return row.n < FEWEST or row.p80 - row.p20 > WIDEST * row.value


def ratio(run: Run, row: Row, peer: str) -> float | None:
    """The row's value over that of a peer; None if the peer was not measured."""
    other = run.peer(row, peer)
    value = other.value if isinstance(other, Row) else other
    return row.value / value if value else None


def ratio_cell(run: Run, row: Row, peer: str) -> str:
    found, other = ratio(run, row, peer), run.peer(row, peer)
    if found is None:
        return ""
    return UNSTEADY if is_unsteady(row) or (isinstance(other, Row) and is_unsteady(other)) else f"{found:.3g}"


# Targets


class Verdict(NamedTuple):
    """A target that applies to a row, whose case is in words the name, and what was found."""

    row: Row
    name: str
    target: str
    found: float
    met: bool
    reason: str

    @property
    def text(self) -> str:
        return f"{self.name}: {self.row.metric} {self.found:.4g}, expected {self.target} ({self.reason})"


@functools.cache
def targets() -> dict[str, list[dict[str, Any]]]:
    """The targets of targets.yaml by suite, each with what its suite says for all."""
    found = {}
    for suite, shared in yaml.safe_load(TARGETS.read_text(encoding="utf-8")).items():
        where = shared.pop("where", {})
        found[suite] = [shared | one | {"where": where | one.get("where", {})} for one in shared.pop("targets")]
    return found


def judge(run: Run) -> list[Verdict]:
    """The verdicts on all targets that can be computed from the rows."""
    common, found = in_common([row.case for row in run.rows]), []
    for row in run.rows:
        machine = rows.machine_name(run.environment_of(row))
        for target in targets().get(row.suite, []):
            applies = target["metric"] == row.metric and target.get("gpu", "") in machine
            if not applies or not all(_fits(row.case.get(name), value) for name, value in target["where"].items()):
                continue
            peer = target.get("over")
            value = ratio(run, row, peer) if peer else row.value
            for kind, (sign, holds) in LIMITS.items():
                if value is not None and (limit := target.get(kind)) is not None:
                    shown = f"{sign} {f'{limit:g} x {peer}' if peer else quantity(limit, row.unit)}"
                    met = holds(value, limit)
                    found.append(Verdict(row, label(row.case, common), shown, value, met, target["reason"]))
    return found


def _fits(value: Any, expected: Any) -> bool:
    return value in expected if isinstance(expected, list) else value == expected


# Tables


def text(run: Run, *, markdown: bool = False) -> str:
    """Everything about a run: machine, the table of each suite, the missed targets, and its notes."""
    if not run.rows:
        return "no row was measured"
    parts = [f"{heading(run)}."]
    verdicts = judge(run)
    for suite in dict.fromkeys(row.suite for row in run.rows):
        parts.append(suite_table(run, [row for row in run.rows if row.suite == suite], verdicts, markdown=markdown))
    point, lines = "- " if markdown else "", []
    if verdicts:
        missed = [verdict for verdict in verdicts if not verdict.met]
        lines.append(f"{len(verdicts)} targets: {len(verdicts) - len(missed)} met, {len(missed)} missed.")
        lines += [f"{point}missed: {verdict.text}" for verdict in missed]
    lines += [f"{point}{note}" for note in run.notes]
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def heading(run: Run) -> str:
    """The machine, and what all cases have in common, in one line."""
    common = in_common([row.case for row in run.rows])
    settings = ", ".join(described(name, value) for name, value in common.items())
    return ". ".join(filter(None, [rows.machine_line(run.environment), settings]))


class Column(NamedTuple):
    name: str
    cells: list[str]
    left: bool = False


def suite_table(run: Run, found: Sequence[Row], verdicts: Sequence[Verdict], *, markdown: bool = False) -> str:
    """One line for each case, with the values of its metrics next to each other."""
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        lines.setdefault(tuple(sorted(row.case.items())), {})[row.metric] = row
    groups = list(lines.values())
    first = [next(iter(group.values())) for group in groups]
    columns = case_columns([row.case | _where(run, row) for row in first] if len(first) > 1 else [first[0].case])
    for i, metric in enumerate(dict.fromkeys(row.metric for row in found)):
        columns += _metric_columns(run, metric, [group.get(metric) for group in groups], with_spread=i == 0)
    own = [[verdict for verdict in verdicts if verdict.row in group.values()] for group in groups]
    texts = [
        "; ".join(f"{v.row.metric} {v.target}: {'met' if v.met else 'missed'}" for v in of_line) for of_line in own
    ]
    n_words, last = sum(column.left for column in columns), [Column("targets", texts)] if any(texts) else []
    headers = [column.name for column in (*columns, *last)]
    body = list(map(list, zip(*(column.cells for column in (*columns, *last)), strict=True)))
    if markdown:
        return markdown_table(headers, body, n_words=n_words)
    return table(headers, body, n_words=n_words, n_last_words=len(last))


def _where(run: Run, row: Row) -> Case:
    """Machine and commit of a row, which have columns if they differ."""
    environment = run.environment_of(row)
    return {"machine": rows.machine_name(environment), "commit": (environment["commit"] or "unknown")[:9]}


def case_columns(cases: Sequence[Case]) -> list[Column]:
    """A column for each key that differs between cases; keys that few cases have are words behind the first column."""
    common = in_common(cases)
    names = [name for name in dict.fromkeys(name for case in cases for name in case) if name not in common]
    own = [name for name in names if 2 * sum(name in case for case in cases) > len(cases)]
    own.sort(key=lambda name: sum(name not in case for case in cases))  # the first is one that all have
    first, *others = [
        Column(name.replace("_", " "), [worded(name, case.get(name, "")) for case in cases], left=True)
        for name in own or [""]
    ]
    more = [[described(name, case[name]) for name in names if name not in own and name in case] for case in cases]
    cells = [", ".join(filter(None, [cell, *words])) for cell, words in zip(first.cells, more, strict=True)]
    return [first._replace(cells=cells), *others]


def _metric_columns(run: Run, metric: str, found: Sequence[Row | None], *, with_spread: bool) -> list[Column]:
    """The values of a metric, how they vary, the peers that are numbers, and the ratios to peers."""
    present = [row for row in found if row is not None]
    divisor, unit = scale_of(present[0].unit, max(abs(row.value) for row in present))

    def shown(value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f}" if not unit and float(value).is_integer() else number(value / divisor)

    def column(name: str, values: Sequence[float | None]) -> Column:
        return Column(f"{name}, {unit}" if unit else name, list(map(shown, values)))

    columns = [column(metric, [None if row is None else row.value for row in found])]
    if with_spread and any(row.p20 is not None for row in present):
        spreads = [f"{shown(row.p20)} - {shown(row.p80)}" if row and row.p20 is not None else "" for row in found]
        columns.append(Column("p20 - p80", spreads))
    for peer in dict.fromkeys(name for row in present for name in row.peers):
        others = [None if row is None else row.peers.get(peer) for row in found]
        numbers = [None if isinstance(other, dict) else other for other in others]
        if any(n is not None for n in numbers):
            columns.append(column(peer, numbers))
        ratios = ["" if row is None else ratio_cell(run, row, peer) for row in found]
        if any(ratios):
            columns.append(Column(f"x {peer}", ratios))
    return columns


# Several runs


def compared(runs: Mapping[str, Run]) -> Run:
    """The rows of the last run that all have, with the values of the others as peers."""
    *earlier, last = ({row.key: row for row in run.rows} for run in runs.values())
    run = Run(list(runs.values())[-1].environment)
    for key, row in last.items():
        others = [of_run[key] for of_run in earlier if key in of_run]
        if len(others) == len(earlier):
            peers: dict[str, float | Case] = {name: other.value for name, other in zip(runs, others, strict=False)}
            n = min(0 if is_unsteady(other) else row.n for other in others)
            run.rows.append(replace(row, peers=peers, n=n))
    if not run.rows:
        raise ConfigError(f"{', '.join(runs)} have no row in common")
    if odd := {key for of_run in (*earlier, last) for key in of_run} - {row.key for row in run.rows}:
        run.note(f"{len(odd)} rows are not in all runs")
    return run


# Choosing rows


def chosen(run: Run, words: Sequence[str], metrics: Sequence[str] | None = None) -> Run:
    """The run with the rows that the words and metrics choose.

    Raises:
        ConfigError: a word is not key=value or key!=value, or no row is left.
    """
    left = run.rows if metrics is None else [row for row in run.rows if row.metric in metrics]
    for word in words:
        name, equals, value = word.partition("!=" if "!=" in word else "=")
        if not equals:
            raise ConfigError(f"cannot read '{word}': expected key=value or key!=value")
        allowed = value.split("|")
        left = [row for row in left if (f"{row.case.get(name, '')}" in allowed) == (equals == "=")]
    if not left:
        raise ConfigError(f"no row is left by {' '.join(words) or metrics}")
    if metrics is not None:
        left = sorted(left, key=lambda row: metrics.index(row.metric))
    whole = len(left) == len(run.rows)
    return Run(run.environment, left, run.notes if whole else [], run.wrong, run.completed, peers=run.rows)


# The documentation

TABLE = re.compile(r"(?<=^<!-- bench report )([^\n]+?)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
VALUE = re.compile(r"(?<=<!-- bench value )([^\n]+?)( -->).*?(?=<!-- end -->)")


def filled(page: str, results: Path) -> str:
    """The page with its tables and values made anew from the folder of results."""

    def shown(words: str) -> str:
        args = _parser().parse_words(shlex.split(words))
        return text(_chosen_by(args, results / args.files[0]), markdown=True)

    def value(words: str) -> str:
        file, *which, metric = shlex.split(words)
        run = chosen(rows.read(results / file), which, [metric])
        if len(run.rows) != 1:
            raise ConfigError(f"value {words}: expected one row, found {len(run.rows)}")
        return quantity(run.rows[0].value, run.rows[0].unit)

    page = TABLE.sub(lambda span: f"{span[1]}{span[2]}\n{shown(span[1])}\n\n", page)
    return VALUE.sub(lambda span: f"{span[1]}{span[2]}{value(span[1])}", page)


def write_pages(pages: Sequence[Path], results: Path, *, check: bool) -> int:
    """Fill the pages that have tables or values; return 1 if, with `check`, one differs."""
    code = 0
    for page in pages:
        before = page.read_text(encoding="utf-8")
        after = filled(before, results)
        if check and after != before:
            print(f"{page} differs from {results}: make performance-tables", file=sys.stderr)
            code = 1
        elif after != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page}: written")
    return code


# The command


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt bench report", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE|key=value", help="JSON of runs, and words that choose rows")
    parser.add_argument("--metrics", type=lambda words: words.split(","), help="show these alone, by commas")
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows of one file; needs matplotlib")
    drawing.add_argument("--x", help="number of the cases to draw lines against; default: bars")
    docs = parser.add_argument_group("documentation")
    docs.add_argument("--docs", action="store_true", help="write the tables of README.md and docs/")
    docs.add_argument("--check", action="store_true", help="with --docs: only compare")
    return parser


def _chosen_by(args: Any, file: Path) -> Run:
    return chosen(rows.read(file), [word for word in args.files if "=" in word], args.metrics)


def main(argv: Sequence[str] | None = None) -> int:
    """Show, compare or draw runs; return 0 if that succeeded. ConfigError if the command line is wrong."""
    parser = _parser()
    args = parser.parse_words(sys.argv[1:] if argv is None else argv)
    files = [Path(word) for word in args.files if "=" not in word]
    if args.docs:
        if files or not RESULTS.is_dir():
            parser.error("--docs takes no file, and runs in the repository's root")
        return write_pages(sorted([*Path().glob("README.md"), *Path("docs").glob("*.md")]), RESULTS, check=args.check)
    if not files:
        parser.error("expected a file")
    if args.plot is not None and len(files) > 1:
        parser.error(f"--plot draws one file, and {len(files)} are given")
    runs = {str(file): _chosen_by(args, file) for file in files}
    first = next(iter(runs.values()))
    if args.plot is not None:
        require_matplotlib("plot")
        plot.draw(first.rows, args.plot, title=heading(first), x=args.x)
        print(f"plot: {args.plot}")
    else:
        print(text(compared(runs) if len(runs) > 1 else first))
    return 0
