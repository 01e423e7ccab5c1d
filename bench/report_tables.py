"""The tables of the pages in docs/ that show measured runs, made from the JSON of measured runs.

A table stands between a line `<!-- table: NAME -->` and a line `<!-- end -->`; everything between them is replaced.
`--check` changes nothing and ends with 1 where a table is not what the results give.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .common import spread
from .common.report import markdown_table
from .delta import report as delta_report
from .kernels import dram_bytes, floors, targets
from .kernels import table as kernels
from .training import trl_memory
from .training.baseline import report as baseline_report

DOCUMENT, RESULTS = Path("docs/performance_tables.md"), Path("bench/results")
DOCUMENTS = (DOCUMENT, Path("docs/from_peft.md"), Path("docs/integrations.md"), Path("docs/delta_logs.md"))
SPAN = re.compile(r"(?<=^<!-- table: )([a-z_]+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
# pytest-benchmark's files of a machine, as `make bench-baseline` names them.
PYTEST_BASELINE = "pytest/*/*_cpu.json"
TILE_HEADERS = (
    *("work", "backend", "density", "ms", "p20 - p80", "x torch.mm"),
    *("floor ms", "x floor", "verdict", "target"),
)
# Runs of `sparse-opt bench baseline` with mode tiles.
TILE_BASELINES = "baseline_*_tiles*.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables into the documents; 0 if that was done, or with --check if there was nothing to do."""
    parser = argparse.ArgumentParser(prog="python -m sparse_opt.bench.report_tables", description=__doc__)
    parser.add_argument("--document", type=Path, help=f"(all of {', '.join(map(str, DOCUMENTS))})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args(argv)
    documents = DOCUMENTS if args.document is None else (args.document,)
    for document in documents:
        if not document.is_file():
            parser.error(f"document {document}: no such file; run from the repository's root, or name it")
    return max(_write(document, args.results, args.check, parser.prog) for document in documents)


def _write(document: Path, results: Path, check: bool, command: str) -> int:
    text = document.read_text(encoding="utf-8")
    try:
        wanted = filled(text, results)
    except (OSError, ValueError) as error:
        print(f"{document}: {error}", file=sys.stderr)
        return 1
    if check:
        if wanted != text:
            print(f"{document} is not what {results} gives: run {command}", file=sys.stderr)
        return int(wanted != text)
    document.write_text(wanted, encoding="utf-8")
    print(f"{document}: {len(SPAN.findall(text))} tables")
    return 0


def filled(text: str, results: Path) -> str:
    """The document with its tables made anew.

    Raises:
        ValueError: it names a table that there is not, or none.
        OSError: a results file cannot be read.
    """
    unknown = {name for name, _ in SPAN.findall(text)} - set(TABLES)
    if unknown or not SPAN.search(text):
        raise ValueError(f"tables {sorted(unknown) or 'missing'}, wanted of {', '.join(TABLES)}")
    return SPAN.sub(lambda span: f"{span[1]}{span[2]}\n{TABLES[span[1]](results)}\n\n", text)


def machine_line(environment: Mapping[str, Any]) -> str:
    """Where and when a run was made."""
    machine, versions = environment["machine"], environment["versions"]
    gpu = machine.get("gpu")
    name = f"{gpu['name']}, driver {gpu['driver']}" if gpu else f"{machine['cpu']}, {machine['logical_cpus']} cores"
    triton = f", triton {versions['triton']}" if gpu else ""
    commit, dirty, _ = (environment["commit"] or "unknown").partition("-dirty")
    return f"{name}, torch {versions['torch']}{triton}, {environment['date'][:10]}, commit {commit[:9]}{dirty}"


def kernel_table(results: Path) -> str:
    """The kernels' table of the last full run on a GPU, its verdicts where its floors were counted as they are now."""
    report = _load(results / "gpu_check.json")
    found = report["kernels"]
    found["rows"] = [row for row in found["rows"] if not targets.is_weight_gradient(row)]  # see tile_table
    judged = found.get("floor_counting") == floors.COUNTING
    verdicts = targets.judge(found["rows"]) if judged else []
    missing = [verdict for verdict in verdicts if not verdict.met]
    rows = [kernels.cells(row, verdicts) for row in found["rows"]]
    columns = len(kernels.HEADERS) if judged else len(kernels.HEADERS) - 2
    lines = [
        f"{machine_line(report['environment'])}. {found['numel'] / 1e9:.2f} B bf16 weights in {found['n_matrices']} "
        f"matrices, deltas of {found['delta_numel']} elements, copy {found['copy_gb_per_s']:.0f} GB/s.",
        "",
        markdown_table(kernels.HEADERS[:columns], [row[:columns] for row in rows], n_words=2),
        "",
    ]
    if not judged:
        lines.append(
            "This run counted its floors in another way than `floors.py` does now: it has to be repeated before its "
            "rows can be judged."
        )
        return "\n".join(lines)
    lines.append(f"{len(verdicts)} targets: {len(verdicts) - len(missing)} met, {len(missing)} missed.")
    lines += [f"- missed: {verdict.text}" for verdict in missing]
    lines += [f"- not timed: {work}: {why}" for work, why in found["left_out"].items()]
    return "\n".join(lines)


def tile_table(results: Path) -> str:
    """The weight gradients of the last full run on a GPU: by tiles, and torch's of whole matrices."""
    report = _load(results / "gpu_check.json")
    rows = [row for row in report["kernels"]["rows"] if targets.is_weight_gradient(row)]
    verdicts = targets.judge(rows)
    missed = [verdict.text for verdict in verdicts if not verdict.met]
    table = markdown_table(TILE_HEADERS, [_tile_cells(row, rows, verdicts) for row in rows], n_words=2)
    where = [f"{machine_line(report['environment'])}.", ""] if rows else []
    return "\n".join([*where, table, *([""] if missed else []), *(f"- missed: {text}" for text in missed)])


def _tile_cells(row: targets.Row, rows: Sequence[targets.Row], verdicts: Sequence[targets.Verdict]) -> list[str]:
    cells = dict(zip(kernels.HEADERS, kernels.cells(row, verdicts), strict=True))
    whole = [other["ms"] for other in rows if other["work"] == targets.dense_gradient(targets.tokens_of(row))]
    cells["x torch.mm"] = f"{row['ms'] / whole[0]:.3f}" if whole else ""
    return [cells[header] for header in TILE_HEADERS]


def dram_table(results: Path) -> str:
    """Bytes as counted beside those of the floors; without a run, how to make one."""
    path = results / "dram_bytes.json"
    if not path.is_file():
        return "Not counted yet: `python -m sparse_opt.bench.kernels.dram_bytes` on a GPU whose counters can be read."
    report = _load(path)
    table = markdown_table(dram_bytes.HEADERS, [dram_bytes.cells(row) for row in report["rows"]], n_words=2)
    return f"{machine_line(report['environment'])}.\n\n{table}"


def pytest_table(results: Path) -> str:
    """The committed pytest-benchmark run on a CPU, bf16 and fp32 at 2.5 %."""
    files = sorted(results.glob(PYTEST_BASELINE))
    if not files:
        return "No run is kept yet: `make bench-baseline`."
    report = _load(files[-1])
    rows = []
    for bench in sorted(report["benchmarks"], key=lambda bench: (bench["group"], bench["params"]["backend"])):
        info, stats = bench["extra_info"], bench["stats"]
        if bench["params"]["density"] == 0.025 and bench["params"]["dtype"] in ("bf16", "fp32"):
            rows.append(
                [
                    bench["group"].partition(" on ")[0],
                    bench["params"]["backend"],
                    f"{1e3 * stats['median']:.3f}",
                    f"{1e3 * stats['q1']:.3f} - {1e3 * stats['q3']:.3f}",
                    f"{info['gb_per_s']:.2f}",
                    f"{info['share_of_floor']:.1%}",
                ]
            )
    info = report["benchmarks"][0]["extra_info"]
    where = machine_line(report["machine_info"]["sparse_opt"])
    headers = ("case", "backend", "median ms", "quartiles", "GB/s", "of the copy rate")
    return (
        f"{where}; {info['numel']} elements, {info['threads']} thread(s), copy {info['copy_gb_per_s']:.1f} GB/s.\n\n"
        f"{markdown_table(headers, rows, n_words=2)}"
    )


def spread_table(results: Path) -> str:
    """How far runs of one state lay apart."""
    report = _load(results / "pytest_spread.json")
    where = f"{machine_line(report['environment'])}; {report['n_runs']} runs of {report['n_cases']} cases"
    return f"{where}.\n\n{markdown_table(spread.HEADERS, spread.rows(report))}"


def baseline_table(results: Path) -> str:
    """Every kept run of training end to end but those of mode tiles."""
    found = _baselines(
        path for path in results.glob("baseline_*.json") if path not in set(results.glob(TILE_BASELINES))
    )
    return found or "No run is kept yet: `sparse-opt bench baseline dpo`."


def tile_baseline_table(results: Path) -> str:
    """Every kept run of training end to end with mode tiles in it."""
    return _baselines(results.glob(TILE_BASELINES))


def _baselines(paths: Iterable[Path]) -> str:
    parts = []
    for path in sorted(paths):
        report = _load(path)
        headers, rows = baseline_report.cells(report)
        parts += [f"{machine_line(report['environment'])}. {baseline_report.heading(report)}.", ""]
        parts += [markdown_table(headers, rows), "", *(f"- {line}" for line in baseline_report.ratio_lines(report)), ""]
    return "\n".join(parts[:-1])


def modes_table(results: Path) -> str:
    """DPO end to end beside PEFT's adapters: times and peaks, and what is trained and held."""
    report = _load(results / "baseline_dpo.json")
    if "shira" not in {row["mode"] for row in report["rows"]}:
        return "Not measured on a GPU with SHiRA yet."
    return "\n\n".join(
        [
            f"{machine_line(report['environment'])}. {baseline_report.heading(report)}.",
            markdown_table(*baseline_report.cells(report)),
            markdown_table(*baseline_report.held_cells(report)),
        ]
    )


def trl_memory_table(results: Path) -> str:
    """DPO in TRL's trainer, theirs and ours."""
    report = _load(results / "trl_memory.json")
    settings = report["settings"]
    where = (
        f"{machine_line(report['environment'])}, TRL {report['versions']['trl']}. {settings['shape'].upper()} shape, "
        f"{settings['batch_size']} pair(s) of {settings['sequence_length']} tokens a step, density "
        f"{settings['density']:.1%}."
    )
    return f"{where}\n\n{markdown_table(trl_memory.HEADERS, trl_memory.cells(report['results']))}"


def delta_table(results: Path, device: str) -> str:
    """Patches of the last run on a CPU or a GPU: speeds, sizes, what was missed; without a run, how to make one."""
    path = results / f"delta_{device}.json"
    if not path.is_file():
        return f"Not measured yet: `sparse-opt bench delta` on a {device.upper()}."
    report = _load(path)
    return f"{machine_line(report['environment'])}. {delta_report.patch_text(report)}"


def delta_logging_table(results: Path) -> str:
    """A training loop with and without a log; without a run on a GPU, how to make one."""
    path = results / "delta_logging.json"
    if not path.is_file():
        return "Not measured yet: `sparse-opt bench delta_logging` on a GPU."
    report = _load(path)
    return f"{machine_line(report['environment'])}. {delta_report.logging_text(report)}"


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
    "delta_gpu": functools.partial(delta_table, device="gpu"),
    "delta_cpu": functools.partial(delta_table, device="cpu"),
    "delta_logging": delta_logging_table,
    "tiles": tile_table,
    "tile_baselines": tile_baseline_table,
}


if __name__ == "__main__":
    sys.exit(main())
