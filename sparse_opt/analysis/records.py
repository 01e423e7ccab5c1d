"""The results of the analyses as records, and tables of them as text and CSV.

A record maps the keys of the CSV and JSON files to raw values; shares are fractions of 1. `COLUMNS` gives each key the
heading and the kind that it has in a table.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from .. import files
from ..masks.parameters import PART_LABELS, component_of, group_by_layer, group_by_part, layer_label
from .changes import ChangeCounts, Coverage, StepChanges, sum_changes
from .ranks import TOP_K, RankStats, measure_concentration

Record = dict[str, Any]
Level = Literal["total", "component", "layer", "expert", "tensor"]
LEVELS: tuple[Level, ...] = get_args(Level)


class Column(NamedTuple):
    """Heading and kind of the values. Values of the kind `percent` are fractions of 1."""

    heading: str
    kind: Literal["text", "shape", "count", "percent", "number"] = "text"


# Key of a record -> its column in every table; other keys are headings themselves, of text.
COLUMNS = {
    "shape": Column("shape", "shape"),
    "numel": Column("elements", "count"),
    "weights": Column("weights", "count"),
    "share": Column("share", "percent"),
    "in_features": Column("in", "count"),
    "out_features": Column("out", "count"),
    "density_bits": Column("bits", "percent"),
    "sparsity_bits": Column("bits", "percent"),
    "sign_flips": Column("flips", "percent"),
    "matrices": Column("matrices", "count"),
    "rank": Column("rank", "count"),
    "full_rank": Column("full rank", "count"),
    "rank_of_full": Column("rank", "percent"),
    "effective_rank": Column("effective rank", "number"),
    "effective_rank_of_full": Column("effective rank", "percent"),
    "stable_rank": Column("stable rank", "number"),
    "frobenius_norm": Column("Frobenius norm", "number"),
    "spectral_norm": Column("spectral norm", "number"),
    "share_above": Column("> tau", "percent"),
    "share_large": Column("large", "percent"),
    "gini": Column("Gini", "number"),
    "entropy": Column("entropy", "number"),
    "top_share": Column(f"top {TOP_K}", "percent"),
    "n_changed": Column("changed", "count"),
}


class Table:
    """Records with a title that describes the values and their unit.

    Args:
        columns: columns that only this table has; see `COLUMNS`.
        keys: the keys to show; those of the first record by default.
    """

    def __init__(
        self,
        title: str,
        records: Sequence[Record],
        columns: Mapping[str, Column] | None = None,
        keys: Iterable[str] | None = None,
    ) -> None:
        self.title, self.records = title, records
        known = COLUMNS | dict(columns or {})
        shown = (records[0] if records else ()) if keys is None else keys
        self.columns = {key: known.get(key) or Column(key) for key in shown}

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns.values()]

    @property
    def texts(self) -> list[list[str]]:
        """The cells of each row as text."""
        return [[_text(record[key], column.kind) for key, column in self.columns.items()] for record in self.records]

    @property
    def is_text(self) -> list[bool]:
        """Whether each column is text, which tables align left."""
        return [column.kind in ("text", "shape") for column in self.columns.values()]


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8. Raises a SparseOptError that names the file if it cannot be written."""
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)


def write_csv(records: Sequence[Record], path: Path) -> None:
    """Write the raw values, at least one record. Raises as `write_text`."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({k: _text(value, "shape") if k == "shape" else value for k, value in record.items()})
    write_text(path, buffer.getvalue())


def _text(value: Any, kind: str) -> str:
    if value is None:
        return ""
    if kind == "shape":
        return "x".join(map(str, value))
    if kind == "count":
        return f"{value:,}"
    if kind == "percent":
        return f"{100 * value:.3f} %" if math.isfinite(value) else "-"
    return f"{value:.4g}" if kind == "number" else str(value)


def threshold_text(value: float) -> str:
    """Format a tolerance or tau for headings and legends: `1e-5`, `2.5e-4`, `0`, `0.01`."""
    mantissa, _, exponent = f"{value:.6e}".partition("e")
    return f"{value:g}" if value == 0 or value >= 0.01 else f"{float(mantissa):g}e{int(exponent)}"


def precision_text(precision: str) -> str:
    """Describe a key of `StepChanges.by_precision`."""
    return "in the stored dtype" if precision == "stored" else "rounded to bf16"


def _place(name: str) -> Record:
    component = component_of(name)
    return {"layer": component.layer, "component": PART_LABELS[component.part]}


def change_records(found: Sequence[StepChanges], tolerances: Sequence[float], level: Level) -> list[Record]:
    """A record for each step, precision and, unless the level is `total`, component, layer, expert or tensor."""
    return [
        {"step": step.step, "precision": precision}
        | keys
        | {"numel": counts.numel}
        | dict(zip(_density_columns(tolerances), _densities(counts), strict=True))
        | dict(zip(_sparsity_columns(tolerances), (1 - share for share in _densities(counts)[:-1]), strict=True))
        for step in found
        for precision in step.by_precision
        for keys, counts in _grouped(step, precision, level)
    ]


def _grouped(step: StepChanges, precision: str, level: Level) -> list[tuple[Record, ChangeCounts]]:
    """The keys that name each group of a level, and its counts. Experts are counted in the stored dtype alone."""
    tensors = step.by_precision[precision]
    if level == "tensor":
        return [({level: name} | _place(name), counts) for name, counts in tensors.items()]
    if level == "component":
        return [({level: PART_LABELS[part]}, sum_changes(of)) for part, of in group_by_part(tensors).items()]
    if level == "layer":
        return [({level: layer_label(layer)}, sum_changes(of)) for layer, of in group_by_layer(tensors).items()]
    if level == "expert":
        experts = step.experts.items() if precision == "stored" else ()
        return [({"layer": layer_label(layer), level: number}, counts) for (layer, number), counts in experts]
    return [({}, sum_changes(tensors.values()))]


def _densities(counts: ChangeCounts) -> tuple[float, ...]:
    return counts.share, *counts.shares_above, counts.share_flipped


def _density_columns(tolerances: Sequence[float]) -> dict[str, Column]:
    above = {f"density_above_{text}": Column(f"> {text}", "percent") for text in map(threshold_text, tolerances)}
    return {"density_bits": COLUMNS["density_bits"], **above, "sign_flips": COLUMNS["sign_flips"]}


def _sparsity_columns(tolerances: Sequence[float]) -> dict[str, Column]:
    at = {f"sparsity_at_{text}": Column(f"<= {text}", "percent") for text in map(threshold_text, tolerances)}
    return {"sparsity_bits": COLUMNS["sparsity_bits"], **at}


def change_tables(found: Sequence[StepChanges], tolerances: Sequence[float], level: Level = "total") -> list[Table]:
    """Density of the update for each precision: by step, or at the last step by component, layer, expert or tensor.

    Each table by step is followed by one of the sparsity.
    """
    density, sparsity = _density_columns(tolerances), _sparsity_columns(tolerances)
    by, keys = ("step", ["step"]) if level == "total" else (f"{level}, step {found[-1].step}", [level, "numel"])
    if level == "expert":
        keys.insert(0, "layer")
    records = change_records(found if level == "total" else found[-1:], tolerances, level)
    tables = []
    for precision in found[-1].by_precision:
        where = f"by {by}, {precision_text(precision)}"
        rows = [record for record in records if record["precision"] == precision]
        if not rows:
            continue
        title = (
            f"density of the update {where}: % of elements whose bits differ, that moved by more than T, that flipped"
        )
        tables.append(Table(title, rows, density, (*keys, *density)))
        if level == "total":
            title = f"sparsity of the update {where}: % of elements whose bits are the same, that moved by at most T"
            tables.append(Table(title, rows, sparsity, (*keys, *sparsity)))
    return tables


def coverage_records(coverage: Coverage) -> list[Record]:
    """A record for each tau and step. Coverage is NaN if nothing is active at the final step."""
    return [
        {
            "step": step,
            "tau": tau,
            "active": coverage.active[i][j],
            "density": coverage.density(i)[j],
            "shared_with_final": coverage.shared[i][j],
            "coverage": coverage.coverage(i)[j],
        }
        for i, tau in enumerate(coverage.taus)
        for j, step in enumerate(coverage.steps)
    ]


def coverage_tables(coverage: Coverage) -> list[Table]:
    """Coverage, and density, by step with a column for each tau."""
    columns = {text: Column(f"tau {text}", "percent") for text in map(threshold_text, coverage.taus)}
    titles = {
        f"coverage: % of the elements active at step {coverage.steps[-1]} that are active at the step (|W_t - W_0| > "
        "tau)": coverage.coverage,
        f"density: % of all {coverage.numel:,} elements that are active at the step": coverage.density,
    }
    tables = []
    for title, of in titles.items():
        rows = zip(coverage.steps, *(of(i) for i in range(len(columns))), strict=True)
        tables.append(Table(title, [dict(zip(("step", *columns), row, strict=True)) for row in rows], columns))
    return tables


def rank_records(found: Mapping[int, Mapping[str, RankStats]]) -> list[Record]:
    """A record for each step and matrix."""
    return [
        {"step": step, "matrix": name, **_place(name), **asdict(s), "full_rank": s.full_rank}
        for step, stats in found.items()
        for name, s in stats.items()
    ]


def rank_table(found: Mapping[int, Mapping[str, RankStats]], tau: float) -> Table:
    """The matrices at the last of the steps."""
    step = max(found)
    above = Column(f"> {threshold_text(tau)}", "percent")
    title = (
        f"rank and size of the update by weight matrix, step {step}; {above.heading}, large: "
        "% of elements that moved by more than this, than mean + 2 standard deviations of the matrix"
    )
    records = rank_records({step: found[step]})
    return Table(title, records, {"share_above": above}, list(records[0])[1:])


def component_records(found: Mapping[int, Mapping[str, RankStats]]) -> list[Record]:
    """A record for each step and component, and one for all components: means over the matrices."""
    return [
        {
            "step": step,
            "component": label,
            "matrices": len(matrices),
            "rank_of_full": fmean(s.rank / s.full_rank for s in matrices),
            "effective_rank_of_full": fmean(s.effective_rank / s.full_rank for s in matrices),
            "stable_rank": fmean(s.stable_rank for s in matrices),
            "frobenius_norm": fmean(s.frobenius_norm for s in matrices),
        }
        for step, stats in found.items()
        for label, matrices in (
            *((PART_LABELS[part], of) for part, of in group_by_part(stats).items()),
            ("all", list(stats.values())),
        )
    ]


def concentration_records(found: Mapping[int, Mapping[str, RankStats]]) -> list[Record]:
    """A record for each step: how unevenly the update is spread over the matrices. NaN where a value is undefined."""
    return [
        {"step": step, "matrices": len(stats)} | measure_concentration([s.frobenius_norm for s in stats.values()])
        for step, stats in found.items()
    ]


def rank_summaries(found: Mapping[int, Mapping[str, RankStats]]) -> list[Table]:
    """The ranks by step and component, and the spread of the update over the matrices by step."""
    return [
        Table(
            "ranks of the update by step and component, means over the matrices; rank and effective rank: % of the "
            "full rank min(m, n)",
            component_records(found),
        ),
        Table(
            "concentration of the update: of the Frobenius norms of the matrices the Gini coefficient, the entropy "
            f"(1: all alike, 0: one has all) and the share of the {TOP_K} largest; matrices that changed",
            concentration_records(found),
        ),
    ]


def shape_records(shapes: Mapping[str, Sequence[int]]) -> list[Record]:
    """A record for each weight, in the order in which data flows through the model.

    `in_features` and `out_features` are those of a matrix that multiplies: GPT-2's Conv1D keeps [in, out], a Linear
    [out, in].
    """
    total = sum(map(math.prod, shapes.values()))
    records = []
    for name, shape in sorted(shapes.items(), key=lambda item: component_of(item[0]).order):
        component, numel = component_of(name), math.prod(shape)
        multiplies = len(shape) == 2 and component.part not in ("embeddings", "norms")
        sizes: Sequence[int | None] = (shape if component.conv1d else shape[::-1]) if multiplies else (None, None)
        share = numel / total if total else 0.0
        records.append({"weight": name, **_place(name), "shape": tuple(shape), "numel": numel, "share": share})
        records[-1] |= dict(zip(("in_features", "out_features"), sizes, strict=True))
    return records


def shape_tables(records: Sequence[Record]) -> list[Table]:
    """The weights by component, and each weight."""
    total = f"{sum(record['numel'] for record in records):,} elements in all; share: % of them"
    sums = [
        {"component": PART_LABELS[part], "weights": len(of)}
        | {key: sum(r[key] for r in of) for key in ("numel", "share")}
        for part, of in group_by_part({record["weight"]: record for record in records}).items()
    ]
    return [Table(f"weights by component, {total}", sums), Table(f"weights, {total}", records)]
