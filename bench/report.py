"""Show the rows of benchmarks as tables, judge them by the targets, and compare runs.

With one file: its table, with ratios to peers, and the verdict on each target of targets.yaml. With several: the values
side by side, the ratio of the last to the first, and the spread (largest over smallest, minus 1). `key=value` words
choose rows (`key!=value` leaves rows out, `key=` chooses those without the key); files of `pytest bench` are read too.

A ratio of few steps (fewer than 3), or of times that vary by more than half (p20 to p80, as on a busy machine), is not
shown: it reads "unsteady".

With --docs, the tables and numbers of the documentation are written, from bench/results. They are between comments:

    <!-- bench report FILE WORDS -->, a blank line, the table, a blank line, <!-- end -->
    <!-- bench value FILE WORDS "METRIC" -->78.5 ms<!-- end -->

WORDS are those of this command. With --check nothing is written, and the exit code is 1 if a page differs.
"""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sparse_opt.analysis.output_files import require_matplotlib
from sparse_opt.errors import ConfigError
from sparse_opt.options import CommandParser
from sparse_opt.tables import markdown_table, table

from . import plot, rows
from .rows import SHARES, Case, Row, Run, described, in_common, label, number, quantity, scale_of

TARGETS = Path(__file__).with_name("targets.yaml")
RESULTS = Path("bench/results")
PAGES = ("README.md", "docs")
FEWEST, WIDEST = 3, 0.5
UNSTEADY = "unsteady"

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
    """A target that applies to a row, and what was found."""

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
def targets() -> list[dict[str, Any]]:
    """The targets of targets.yaml, each with what its suite says for all."""
    found = []
    for suite, of_suite in yaml.safe_load(TARGETS.read_text(encoding="utf-8")).items():
        for target in of_suite["targets"]:
            where = of_suite.get("where", {}) | target.get("where", {})
            found.append({"suite": suite, "gpu": of_suite.get("gpu", "")} | target | {"where": where})
    return found


def judge(run: Run) -> list[Verdict]:
    """The verdicts on all targets that can be computed from the rows."""
    return [verdict for row in run.rows for target in targets() for verdict in _verdict(run, row, target)]


def _verdict(run: Run, row: Row, target: Mapping[str, Any]) -> list[Verdict]:
    machine = rows.machine_name(run.environment_of(row))
    applies = (row.suite, row.metric) == (target["suite"], target["metric"]) and target["gpu"] in machine
    if not applies or not all(_fits(row.case.get(name), value) for name, value in target["where"].items()):
        return []
    value, unit = row.value, row.unit
    if peer := target.get("over"):
        found = ratio(run, row, peer)
        value, unit = found or 0.0, f"x {peer}"
        if found is None:
            return []
    verdicts = []
    for kind, sign in (("at_most", "<="), ("at_least", ">="), ("exactly", "=")):
        if (limit := target.get(kind)) is not None:
            met = {"<=": value <= limit, ">=": value >= limit, "=": value == limit}[sign]
            shown = f"{limit:g} {unit}" if target.get("over") else quantity(limit, unit)
            name = label(row.case, in_common([other.case for other in run.rows]))
            verdicts.append(Verdict(row, name, f"{sign} {shown}".strip(), value, met, target["reason"]))
    return verdicts


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
    metrics = list(dict.fromkeys(row.metric for row in found))
    columns = case_columns([next(iter(group.values())).case for group in groups])
    columns += environment_columns(run, groups)
    for i, metric in enumerate(metrics):
        columns += _metric_columns(run, metric, [group.get(metric) for group in groups], with_spread=i == 0)
    return _rendered(columns, _verdict_columns(groups, verdicts), markdown=markdown)


def _rendered(columns: Sequence[Column], last: Sequence[Column] = (), *, markdown: bool) -> str:
    headers, n_words = [column.name for column in (*columns, *last)], sum(column.left for column in columns)
    body = list(map(list, zip(*(column.cells for column in (*columns, *last)), strict=True)))
    if markdown:
        return markdown_table(headers, body, n_words=n_words)
    return table(headers, body, n_words=n_words, n_last_words=len(last))


def case_columns(cases: Sequence[Case]) -> list[Column]:
    """A column for each key that differs between cases; keys that few cases have are words behind the first column."""
    common = in_common(cases)
    names = [name for name in dict.fromkeys(name for case in cases for name in case) if name not in common]
    own = [name for name in names if 2 * sum(name in case for case in cases) > len(cases)]
    own.sort(key=lambda name: sum(name not in case for case in cases))  # the first is one that all have
    rest = [name for name in names if name not in own]
    if not own:
        return [Column("", [label({k: c[k] for k in rest if k in c}) or "otherwise" for c in cases], left=True)]
    columns = [Column(name.replace("_", " "), [_cell(case, name) for case in cases], left=True) for name in own]
    more = [[described(name, case[name]) for name in rest if name in case] for case in cases]
    first = [", ".join(filter(None, [cell, *words])) for cell, words in zip(columns[0].cells, more, strict=True)]
    return [columns[0]._replace(cells=first), *columns[1:]]


def environment_columns(run: Run, groups: Sequence[Mapping[str, Row]]) -> list[Column]:
    """Machine and commit, if they differ between rows."""
    environments = [run.environment_of(next(iter(group.values()))) for group in groups]
    facts = {
        "machine": [rows.machine_name(environment) for environment in environments],
        "commit": [(environment["commit"] or "unknown")[:9] for environment in environments],
    }
    return [Column(name, cells, left=True) for name, cells in facts.items() if len(set(cells)) > 1]


def _cell(case: Case, name: str) -> str:
    value = case.get(name, "")
    if value is True:
        return "yes"
    return value if isinstance(value, str) else described("", value if name not in SHARES else f"{value:.1%}").strip()


def _metric_columns(run: Run, metric: str, found: Sequence[Row | None], *, with_spread: bool) -> list[Column]:
    present = [row for row in found if row is not None]
    divisor, unit = scale_of(present[0].unit, max(abs(row.value) for row in present))

    def cells(value: Any) -> list[str]:
        numbers = [None if row is None or value(row) is None else value(row) for row in found]
        if not unit and all(n is None or float(n).is_integer() for n in numbers):
            return ["" if n is None else f"{n:,.0f}" for n in numbers]
        return ["" if n is None else number(n / divisor) for n in numbers]

    def named(name: str) -> str:
        return f"{name}, {unit}" if unit else name

    columns = [Column(named(metric), cells(lambda row: row.value))]
    if with_spread and any(row.p20 is not None for row in present):
        low, high = cells(lambda row: row.p20), cells(lambda row: row.p80)
        columns.append(Column("p20 - p80", [f"{a} - {b}" if a else "" for a, b in zip(low, high, strict=True)]))
    rare: list[list[str]] = [[] for _ in found]  # ratios of few rows share a column
    for peer in dict.fromkeys(name for row in present for name in row.peers):
        values = [None if row is None else row.peers.get(peer) for row in found]
        if any(isinstance(value, float | int) for value in values):
            shown = ["" if v is None or isinstance(v, dict) else number(v / divisor) for v in values]
            columns.append(Column(named(peer), shown))
        ratios = ["" if row is None else ratio_cell(run, row, peer) for row in found]
        if isinstance(next(filter(None, values)), dict) and 2 * sum(map(bool, ratios)) < len(present):
            for cells_of_line, found_ratio in zip(rare, ratios, strict=True):
                cells_of_line += [f"{found_ratio} x {peer}"] if found_ratio else []
        elif any(ratios):
            columns.append(Column(f"x {peer}", ratios))
    if any(rare):
        columns.append(
            Column(f"{metric} compared" if len(rare) > 1 else "compared", ["; ".join(line) for line in rare])
        )
    return columns


def _verdict_columns(groups: Sequence[Mapping[str, Row]], verdicts: Sequence[Verdict]) -> list[Column]:
    keys = [{row.key for row in group.values()} for group in groups]
    own = [[verdict for verdict in verdicts if verdict.row.key in of_line] for of_line in keys]
    if not any(own):
        return []
    met = ["" if not found else "met" if all(v.met for v in found) else "missed" for found in own]
    several = [len(group) > 1 for group in groups]
    texts = [
        "; ".join(f"{v.row.metric} {v.target}" if more else v.target for v in found)
        for found, more in zip(own, several, strict=True)
    ]
    return [Column("verdict", met, left=True), Column("target", texts, left=True)]


# Several runs


def compared(runs: Mapping[str, Run], *, markdown: bool = False) -> str:
    """The values of several runs next to each other, of rows that all have."""
    found = [{row.key: row for row in run.rows} for run in runs.values()]
    keys = [key for key in found[0] if all(key in other for other in found)]
    odd = {key for other in found for key in other} - set(keys)
    if not keys:
        return "the runs have no row in common"
    of_key = [[other[key] for other in found] for key in keys]
    columns = case_columns([same[0].case for same in of_key])
    columns.append(Column("metric", [f"{same[0].metric}, {same[0].unit}" for same in of_key], left=True))
    for i, name in enumerate(runs):
        columns.append(Column(name, [number(same[i].value) for same in of_key]))
    last, apart = [], []
    for same in of_key:
        values = [row.value for row in same]
        unsteady = any(map(is_unsteady, same))
        last.append("" if not values[0] else UNSTEADY if unsteady else f"{values[-1] / values[0]:.3f}")
        apart.append(f"{max(values) / min(values) - 1 if min(values) > 0 else 0.0:.1%}")
    columns += [Column("last / first", last), Column("spread", apart)]
    left_out = f"\n\n{len(odd)} rows are not in all runs" if odd else ""
    return _rendered(columns, markdown=markdown) + left_out


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
        left = [row for row in left if (_raw(row.case.get(name)) in allowed) == (equals == "=")]
    if not left:
        raise ConfigError(f"no row is left by {' '.join(words) or metrics}")
    if metrics is not None:
        left = sorted(left, key=lambda row: metrics.index(row.metric))
    whole = len(left) == len(run.rows)
    return Run(run.environment, left, run.notes if whole else [], run.wrong, run.completed, peers=run.rows)


def _raw(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# The documentation

TABLE = re.compile(r"(?<=^<!-- bench report )([^\n]+?)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
VALUE = re.compile(r"(?<=<!-- bench value )([^\n]+?)( -->).*?(?=<!-- end -->)")


def filled(page: str, results: Path) -> str:
    """The page with its tables and values made anew from the folder of results."""

    def arguments(words: str) -> tuple[Run, Any]:
        args = _parser().parse_words(shlex.split(words))
        return chosen(rows.read(results / args.files[0]), _words(args), args.metrics), args

    def value(words: str) -> str:
        *before, metric = shlex.split(words)
        run = chosen(rows.read(results / before[0]), before[1:], [metric])
        if len(run.rows) != 1:
            raise ConfigError(f"value {words}: expected one row, found {len(run.rows)}")
        return quantity(run.rows[0].value, run.rows[0].unit)

    page = TABLE.sub(lambda span: f"{span[1]}{span[2]}\n{text(arguments(span[1])[0], markdown=True)}\n\n", page)
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
    parser.add_argument("--markdown", action="store_true", help="write tables in Markdown")
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows of one file; needs matplotlib")
    drawing.add_argument("--x", help="number of the cases to draw lines against; default: bars")
    drawing.add_argument("--series", help="key of the cases whose values have a colour each")
    docs = parser.add_argument_group("documentation")
    docs.add_argument("--docs", action="store_true", help="write the tables of README.md and docs/")
    docs.add_argument("--check", action="store_true", help="with --docs: only compare")
    return parser


def _words(args: Any) -> list[str]:
    return [word for word in args.files if "=" in word]


def main(argv: Sequence[str] | None = None) -> int:
    """Show, compare or draw runs; return 0 if that succeeded. ConfigError if the command line is wrong."""
    parser = _parser()
    args = parser.parse_words(sys.argv[1:] if argv is None else argv)
    files = [Path(word) for word in args.files if "=" not in word]
    if args.docs:
        if files or not RESULTS.is_dir():
            parser.error("--docs takes no file, and runs in the repository's root")
        pages = [page for name in PAGES for page in ([Path(name)] if Path(name).is_file() else Path(name).glob("*.md"))]
        return write_pages(sorted(pages), RESULTS, check=args.check)
    if not files:
        parser.error("expected a file")
    runs = {str(file): chosen(rows.read(file), _words(args), args.metrics) for file in files}
    first = next(iter(runs.values()))
    if args.plot is not None:
        require_matplotlib("plot")
        plot.draw(first.rows, args.plot, title=heading(first), x=args.x, series=args.series)
        print(f"plot: {args.plot}")
    elif len(runs) > 1:
        print(compared(runs, markdown=args.markdown))
    else:
        print(text(first, markdown=args.markdown))
    return 0
