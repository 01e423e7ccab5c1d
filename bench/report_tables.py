"""The tables of the pages in docs/ that show measured runs, made from the JSON of measured runs.

A table is between the lines `<!-- table: NAME -->` and `<!-- end -->`; everything between them is replaced. With
`--check` nothing is written, and the exit code is 1 if a table differs from the results.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_opt.cli.parser import CommandParser
from sparse_opt.tables import markdown_table

from .common import spread
from .common.harness import exit_code
from .common.report import Columns, machine_line, render
from .delta import report as delta_report
from .distributed import report as distributed_report
from .kernels import access_rates, bounds, dram_bytes
from .kernels.table import main as kernels
from .kernels.table import targets
from .scale import report as scale_report
from .training import trl_memory
from .training.baseline import report as baseline_report
from .training.delta_logging import report as logging_report
from .verl import report as verl_report
from .weight_sync import report as weight_sync_report

DOCUMENT, RESULTS = Path("docs/performance_tables.md"), Path("bench/results")
DOCUMENTS = (
    DOCUMENT,
    Path("docs/from_peft.md"),
    Path("docs/integrations.md"),
    Path("docs/delta_logs.md"),
    Path("docs/distributed.md"),
    Path("docs/weight_sync.md"),
    Path("docs/verl.md"),
)
SPAN = re.compile(r"(?<=^<!-- table: )([a-z0-9_]+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
# pytest-benchmark's files of a machine, as `make bench-baseline` names them.
PYTEST_BASELINE = "pytest/*/*_cpu.json"
# Runs of `sparse-opt bench baseline` with mode tiles.
TILE_BASELINES = "baseline_*_tiles*.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables into the documents; return 0 if that succeeded, or with --check if nothing differs."""
    parser = CommandParser(prog="python -m sparse_opt.bench.report_tables", description=__doc__)
    parser.add_argument("--document", type=Path, help=f"(all of {', '.join(map(str, DOCUMENTS))})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--check", action="store_true", help="only compare")

    def write_all() -> int:
        args = parser.parse_words(sys.argv[1:] if argv is None else argv)
        documents = DOCUMENTS if args.document is None else (args.document,)
        for document in documents:
            if not document.is_file():
                parser.error(f"document {document}: no such file; run from the repository's root, or name it")
        return max(_write(document, args.results, args.check, parser.prog) for document in documents)

    return exit_code(write_all)


def _write(document: Path, results: Path, check: bool, command: str) -> int:
    text = document.read_text(encoding="utf-8")
    try:
        expected = filled(text, results)
    except (OSError, ValueError) as error:
        print(f"{document}: {error}", file=sys.stderr)
        return 1
    if check:
        if expected != text:
            print(f"{document} differs from {results}: run {command}", file=sys.stderr)
        return int(expected != text)
    document.write_text(expected, encoding="utf-8")
    print(f"{document}: {len(SPAN.findall(text))} tables")
    return 0


def filled(text: str, results: Path) -> str:
    """The document with its tables made anew.

    Raises:
        ValueError: the document has no table, or an unknown one.
        OSError: a results file cannot be read.
    """
    unknown = {name for name, _ in SPAN.findall(text)} - set(TABLES)
    if unknown or not SPAN.search(text):
        raise ValueError(f"found {sorted(unknown) or 'no table'}, expected tables of {', '.join(TABLES)}")
    return SPAN.sub(lambda span: f"{span[1]}{span[2]}\n{TABLES[span[1]](results)}\n\n", text)


def kernel_table(results: Path) -> str:
    """The table of kernels of the last full run on a GPU, with verdicts if its bounds were counted in a known way."""
    report = _load(results / "gpu_check.json")
    found = report["kernels"]
    rows = [row for row in found["rows"] if not targets.is_weight_gradient(row)]  # see tile_table
    judged = found.get("floor_counting") in bounds.JUDGED_COUNTINGS
    verdicts = targets.judge(rows) if judged else []
    missed = [verdict for verdict in verdicts if not verdict.met]
    columns = dict(kernels.columns(verdicts))
    lines = [
        f"{machine_line(report)}. {found['numel'] / 1e9:.2f} B bf16 weights in {found['n_matrices']} "
        f"matrices, deltas of {found['delta_numel']} elements, copy {found['copy_gb_per_s']:.0f} GB/s.",
        *(f"\n{line}." for line in [access_rates.line(found)] if line),
        "",
    ]
    if not judged:
        del columns["verdict"], columns["target"]
        lines += [
            *(render(columns, rows, n_words=2, markdown=True), ""),
            "This run counted its bounds in another way than `bounds.py` does now. It must be repeated before its rows "
            "can be judged.",
        ]
        return "\n".join(lines)
    lines += [render(columns, rows, n_words=2, markdown=True), ""]
    lines.append(f"{len(verdicts)} targets: {len(verdicts) - len(missed)} met, {len(missed)} missed.")
    lines += [f"- missed: {verdict.text}" for verdict in missed]
    lines += [f"- not timed: {work}: {why}" for work, why in found["left_out"].items()]
    return "\n".join(lines)


def tile_table(results: Path) -> str:
    """The weight gradients of the last full run on a GPU: by tiles, and torch's of whole matrices."""
    report = _load(results / "gpu_check.json")
    rows = [row for row in report["kernels"]["rows"] if targets.is_weight_gradient(row)]
    verdicts = targets.judge(rows)

    def x_whole(row: Mapping[str, Any]) -> str:
        whole = [other["ms"] for other in rows if other["work"] == targets.dense_gradient(targets.tokens_of(row))]
        return f"{row['ms'] / whole[0]:.3f}" if whole else ""

    found = kernels.columns(verdicts)
    shown = ("work", "backend", "density", "ms", "p20 - p80", "x torch.mm", "bound ms", "x bound", "verdict", "target")
    columns: Columns = {name: x_whole if name == "x torch.mm" else found[name] for name in shown}
    where = [f"{machine_line(report)}.", ""] if rows else []
    lines = [*where, render(columns, rows, n_words=2, markdown=True)]
    missed = [f"- missed: {verdict.text}" for verdict in verdicts if not verdict.met]
    return "\n".join([*lines, *([""] if missed else []), *missed])


PYTEST_COLUMNS: Columns = {
    "case": lambda bench: bench["group"].partition(" on ")[0],
    "backend": "{params[backend]}",
    "median ms": lambda bench: f"{1e3 * bench['stats']['median']:.3f}",
    "quartiles": lambda bench: f"{1e3 * bench['stats']['q1']:.3f} - {1e3 * bench['stats']['q3']:.3f}",
    "GB/s": "{extra_info[gb_per_s]:.2f}",
    "of the copy rate": "{extra_info[share_of_floor]:.1%}",
}


def pytest_table(results: Path) -> str:
    """The committed pytest-benchmark run on a CPU, bf16 and fp32 at 2.5 %."""
    files = sorted(results.glob(PYTEST_BASELINE))
    if not files:
        return "No run is kept yet: `make bench-baseline`."
    report = _load(files[-1])
    rows = [
        bench
        for bench in sorted(report["benchmarks"], key=lambda bench: (bench["group"], bench["params"]["backend"]))
        if bench["params"]["density"] == 0.025 and bench["params"]["dtype"] in ("bf16", "fp32")
    ]
    info = report["benchmarks"][0]["extra_info"]
    where = machine_line({"environment": report["machine_info"]["sparse_opt"]})
    return (
        f"{where}; {info['numel']} elements, {info['threads']} thread(s), copy {info['copy_gb_per_s']:.1f} GB/s.\n\n"
        f"{render(PYTEST_COLUMNS, rows, n_words=2, markdown=True)}"
    )


def spread_table(results: Path) -> str:
    """The spread of several runs of the same code."""
    report = _load(results / "pytest_spread.json")
    where = f"{machine_line(report)}; {report['n_runs']} runs of {report['n_cases']} cases"
    return f"{where}.\n\n{markdown_table(spread.HEADERS, spread.rows(report))}"


def baseline_table(results: Path) -> str:
    """Every kept run of training end to end except those with mode tiles."""
    found = _baselines(
        path for path in results.glob("baseline_*.json") if path not in set(results.glob(TILE_BASELINES))
    )
    return found or "No run is kept yet: `sparse-opt bench baseline dpo`."


def tile_baseline_table(results: Path) -> str:
    """Every kept run of training end to end that includes mode tiles."""
    return _baselines(results.glob(TILE_BASELINES))


def _baselines(paths: Iterable[Path]) -> str:
    parts = []
    for path in sorted(paths):
        report = _load(path)
        headers, rows = baseline_report.cells(report)
        parts += [f"{machine_line(report)}. {baseline_report.heading(report)}.", ""]
        parts += [markdown_table(headers, rows), "", *(f"- {line}" for line in baseline_report.ratio_lines(report)), ""]
    return "\n".join(parts[:-1])


def modes_table(results: Path) -> str:
    """DPO end to end next to PEFT's adapters: times, peaks, trained values and memory by purpose."""
    report = _load(results / "baseline_dpo.json")
    if "shira" not in {row["mode"] for row in report["rows"]}:
        return "Not measured on a GPU with SHiRA yet."
    return "\n\n".join(
        [
            f"{machine_line(report)}. {baseline_report.heading(report)}.",
            markdown_table(*baseline_report.cells(report)),
            markdown_table(*baseline_report.held_cells(report)),
        ]
    )


def scale_table(results: Path) -> str:
    """Peak memory and time by model size."""
    report = _load(results / "scale_h200.json")
    return f"{machine_line(report)}. {scale_report.text(report, markdown=True)}"


def trl_memory_table(results: Path) -> str:
    """DPO in TRL's trainer and in the sparse version of it."""
    report = _load(results / "trl_memory.json")
    settings = report["settings"]
    where = (
        f"{machine_line(report)}, TRL {report['versions']['trl']}. {settings['shape'].upper()} shape, "
        f"{settings['batch_size']} pair(s) of {settings['sequence_length']} tokens a step, density "
        f"{settings['density']:.1%}."
    )
    return f"{where}\n\n{render(trl_memory.COLUMNS, report['results'], markdown=True)}"


def _if_measured(file: str, text: Callable[[dict[str, Any]], str], missing: str) -> Callable[[Path], str]:
    """The table of one results file: machine and text; `missing` without the file."""

    def table(results: Path) -> str:
        path = results / file
        if not path.is_file():
            return missing
        report = _load(path)
        return f"{machine_line(report)}.{text(report)}"

    return table


dram_table = _if_measured(
    "dram_bytes.json",
    lambda report: f"\n\n{render(dram_bytes.COLUMNS, report['rows'], n_words=2, markdown=True)}",
    "Not counted yet: `python -m sparse_opt.bench.kernels.dram_bytes` on a GPU whose counters can be read.",
)
delta_tables = {
    f"delta_{device}": _if_measured(
        f"delta_{device}.json",
        lambda report: f" {delta_report.patch_text(report)}",
        f"Not measured yet: `sparse-opt bench delta` on a {device.upper()}.",
    )
    for device in ("gpu", "cpu")
}
delta_logging_table = _if_measured(
    "delta_logging_gpu.json",
    lambda report: f" {logging_report.document_text(report)}",
    "Not measured yet: `sparse-opt bench delta_logging` on a GPU.",
)
distributed_table = _if_measured(
    "distributed.json",
    lambda report: f" {distributed_report.text(report, markdown=True)}",
    "Not measured yet: `sparse-opt bench distributed` on several GPUs.",
)
distributed_70b_table = _if_measured(
    "distributed_70b.json",
    lambda report: f" {distributed_report.text(report, markdown=True)}",
    "Not measured yet: the command with `--shape 70b` below.",
)
weight_sync_table = _if_measured(
    "weight_sync.json",
    lambda report: f" {weight_sync_report.text(report, markdown=True)}",
    "Not measured yet: `sparse-opt bench weight_sync` on two GPUs.",
)


verl_tables = {
    name: _if_measured(
        f"{name}.json",
        lambda report: f" {verl_report.text(report, markdown=True)}",
        "Not measured yet: `sparse-opt bench verl` on two GPUs.",
    )
    for name in ("verl", "verl_unfused")
}


def _load(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


TABLES: dict[str, Callable[[Path], str]] = {
    "kernels": kernel_table,
    "baselines": baseline_table,
    "modes": modes_table,
    "trl_memory": trl_memory_table,
    "dram_bytes": dram_table,
    "pytest_cpu": pytest_table,
    "pytest_spread": spread_table,
    "scale": scale_table,
    **delta_tables,
    "delta_logging": delta_logging_table,
    "distributed": distributed_table,
    "distributed_70b": distributed_70b_table,
    "weight_sync": weight_sync_table,
    "tiles": tile_table,
    "tile_baselines": tile_baseline_table,
    **verl_tables,
}


if __name__ == "__main__":
    sys.exit(main())
