"""Converts the results of the analyses to tables, CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..masks.parameters import PART_LABELS, component_of
from .coverage import Coverage
from .figures import write_text
from .ranks import Figure, RankStats
from .shapes import WeightShape
from .sparsity import ChangeCounts, StepChanges, changes_by_component, changes_by_layer, sum_changes
from .states import threshold_text


def change_tables(found: Sequence[StepChanges], tolerances: Sequence[float]) -> list[Table]:
    """Density by step, and the sparsity that goes with it; one pair for each precision."""
    tables = []
    for precision in found[0].by_precision:
        where = _precision(precision)
        totals = {step.step: sum_changes(step.by_precision[precision].values()) for step in found}
        step = Column("step", "step")
        tables.append(
            Table(
                f"density of the update, {where}: % of elements whose bits differ, that moved by more than T, and "
                "whose sign flipped",
                (step, *_density_columns(tolerances)),
                tuple((number, *_densities(counts)) for number, counts in totals.items()),
            )
        )
        tables.append(
            Table(
                f"sparsity of the update, {where}: % of elements whose bits are the same, and that moved by at most T",
                (step, *_sparsity_columns(tolerances)),
                tuple((number, *_sparsities(counts)) for number, counts in totals.items()),
            )
        )
    return tables


def change_profile(
    step: StepChanges, tolerances: Sequence[float], by: Literal["component", "layer", "tensor"]
) -> list[Table]:
    """Density at one step by component, layer or tensor; one table for each precision."""
    tables = []
    for precision, counts in step.by_precision.items():
        groups: Mapping[str, ChangeCounts] = counts
        if by != "tensor":
            groups = changes_by_component(counts) if by == "component" else changes_by_layer(counts)
        tables.append(
            Table(
                f"density of the update by {by}, step {step.step}, {_precision(precision)}: % of elements that changed",
                (Column(by, by), Column("elements", "numel", "count"), *_density_columns(tolerances)),
                tuple((label, group.numel, *_densities(group)) for label, group in groups.items()),
            )
        )
    return tables


def change_records(found: Sequence[StepChanges], tolerances: Sequence[float]) -> Table:
    """Every count of every tensor, for a CSV file."""
    columns = (
        *(Column(key, key) for key in ("step", "precision", "tensor", "layer", "component")),
        Column("numel", "numel", "count"),
        *_density_columns(tolerances),
        *_sparsity_columns(tolerances),
    )
    rows = [
        (step.step, precision, *_place(name), counts.numel, *_densities(counts), *_sparsities(counts))
        for step in found
        for precision, tensors in step.by_precision.items()
        for name, counts in tensors.items()
    ]
    return Table("density and sparsity of the update by step and tensor", columns, tuple(rows))


def coverage_tables(coverage: Coverage) -> list[Table]:
    """Coverage, and density, by step with a column for each tau."""
    final = coverage.steps[-1]
    taus = range(len(coverage.taus))
    texts = [threshold_text(tau) for tau in coverage.taus]
    step = Column("step", "step")
    columns = (step, *(Column(f"tau {text}", f"coverage_{text}", "percent") for text in texts))
    return [
        Table(
            f"coverage: % of the elements active at step {final} that are active at the step (|W_t - W_0| > tau)",
            columns,
            tuple((n, *(coverage.coverage(i)[j] for i in taus)) for j, n in enumerate(coverage.steps)),
        ),
        Table(
            f"density: % of all {coverage.numel:,} elements that are active at the step",
            columns,
            tuple((n, *(coverage.density(i)[j] for i in taus)) for j, n in enumerate(coverage.steps)),
        ),
    ]


def coverage_records(coverage: Coverage) -> Table:
    """A row for each step and tau, for a CSV file."""
    columns = (
        Column("step", "step"),
        Column("tau", "tau"),
        Column("active", "active", "count"),
        Column("density", "density", "percent"),
        Column("shared", "shared_with_final", "count"),
        Column("coverage", "coverage", "percent"),
    )
    rows = [
        (step, tau, coverage.active[i][j], coverage.density(i)[j], coverage.shared[i][j], coverage.coverage(i)[j])
        for i, tau in enumerate(coverage.taus)
        for j, step in enumerate(coverage.steps)
    ]
    return Table("coverage and density by step and tau", columns, tuple(rows))


def rank_table(stats: Mapping[str, RankStats], tau: float) -> Table:
    """A row for each matrix."""
    columns = (
        Column("matrix", "matrix"),
        Column("layer", "layer"),
        Column("component", "component"),
        Column("shape", "shape"),
        Column("rank", "rank", "interval"),
        Column("of", "full_rank", "count"),
        Column("effective rank", "effective_rank", "interval"),
        Column("stable rank", "stable_rank", "interval"),
        Column("Frobenius norm", "frobenius_norm", "number"),
        Column("spectral norm", "spectral_norm", "interval"),
        Column(f"> {threshold_text(tau)}", "share_above_tau", "percent"),
        Column("large", "share_large", "percent"),
    )
    rows = [
        (
            *_place(name),
            "x".join(map(str, s.shape)),
            s.rank,
            s.full_rank,
            s.effective_rank,
            s.stable_rank,
            s.frobenius_norm,
            s.spectral_norm,
            s.share_above,
            s.share_large,
        )
        for name, s in stats.items()
    ]
    methods = ", ".join(sorted({s.method for s in stats.values()}))
    title = (
        f"rank and size of the update by weight matrix (singular values: {methods}; [low, high] where their error "
        f"shows); > {threshold_text(tau)}, large: % of elements that moved by more than this, than mean + 2 standard "
        "deviations of the matrix"
    )
    return Table(title, columns, tuple(rows))


def rank_summary(stats: Mapping[str, RankStats]) -> Table:
    """A row for each component, and one for all: means over the matrices."""
    parts = {name: component_of(name).part for name in stats}
    groups = {label: [s for name, s in stats.items() if parts[name] == part] for part, label in PART_LABELS.items()}
    groups["all"] = list(stats.values())
    columns = (
        Column("component", "component"),
        Column("matrices", "matrices", "count"),
        Column("rank", "rank_of_full", "percent"),
        Column("effective rank", "effective_rank_of_full", "percent"),
        Column("stable rank", "stable_rank", "number"),
        Column("Frobenius norm", "frobenius_norm", "number"),
    )

    def mean(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    rows = [
        (
            label,
            len(group),
            mean(s.rank.value / s.full_rank for s in group),
            mean(s.effective_rank.value / s.full_rank for s in group),
            mean(s.stable_rank.value for s in group),
            mean(s.frobenius_norm for s in group),
        )
        for label, group in groups.items()
        if group
    ]
    title = "means over the matrices of a component; rank and effective rank: % of the full rank min(m, n)"
    return Table(title, columns, tuple(rows))


def shape_table(shapes: Sequence[WeightShape]) -> Table:
    """A row for each weight."""
    columns = (
        Column("weight", "weight"),
        Column("layer", "layer"),
        Column("component", "component"),
        Column("shape", "shape"),
        Column("elements", "numel", "count"),
        Column("share", "share", "percent"),
        Column("in -> out", "in_out"),
    )
    total = sum(shape.numel for shape in shapes)
    rows = [
        (
            *_place(s.name),
            "x".join(map(str, s.shape)),
            s.numel,
            s.numel / total if total else 0.0,
            "" if s.features is None else "{} -> {}".format(*s.features),
        )
        for s in shapes
    ]
    return Table(f"weights, {total:,} elements in all; share: % of them", columns, tuple(rows))


def shape_sums(shapes: Sequence[WeightShape]) -> Table:
    """A row for each component."""
    total = sum(shape.numel for shape in shapes)
    sums: dict[str, list[int]] = {label: [] for label in PART_LABELS.values()}
    for shape in shapes:
        sums[PART_LABELS[component_of(shape.name).part]].append(shape.numel)
    columns = (
        Column("component", "component"),
        Column("weights", "weights", "count"),
        Column("elements", "numel", "count"),
        Column("share", "share", "percent"),
    )
    rows = [(label, len(n), sum(n), sum(n) / total if total else 0.0) for label, n in sums.items() if n]
    return Table(f"weights by component, {total:,} elements in all; share: % of them", columns, tuple(rows))


def _precision(name: str) -> str:
    return "in the stored dtype" if name == "stored" else "rounded to bf16"


def _place(name: str) -> tuple[str, str, str]:
    component = component_of(name)
    return name, "" if component.layer is None else str(component.layer), PART_LABELS[component.part]


def _density_columns(tolerances: Iterable[float]) -> tuple[Column, ...]:
    return (
        Column("bits", "density_bits", "percent"),
        *(Column(f"> {threshold_text(t)}", f"density_above_{threshold_text(t)}", "percent") for t in tolerances),
        Column("flips", "sign_flips", "percent"),
    )


def _densities(counts: ChangeCounts) -> tuple[float, ...]:
    return counts.share, *counts.shares_above, counts.share_flipped


def _sparsity_columns(tolerances: Iterable[float]) -> tuple[Column, ...]:
    return (
        Column("bits", "sparsity_bits", "percent"),
        *(Column(f"<= {threshold_text(t)}", f"sparsity_at_{threshold_text(t)}", "percent") for t in tolerances),
    )


def _sparsities(counts: ChangeCounts) -> tuple[float, ...]:
    return tuple(1 - share for share in (counts.share, *counts.shares_above))


def counts_json(counts: ChangeCounts) -> dict[str, Any]:
    """`density` and `sparsity` in the order of the tolerances."""
    return {
        "numel": counts.numel,
        "density_bits": counts.share,
        "sparsity_bits": 1 - counts.share,
        "density": list(counts.shares_above),
        "sparsity": [1 - share for share in counts.shares_above],
        "sign_flips": counts.share_flipped,
    }


def changes_json(step: StepChanges) -> dict[str, Any]:
    """One step: for each precision the total, and by component, layer and tensor."""
    return {"step": step.step} | {
        precision: counts_json(sum_changes(counts.values()))
        | {
            group: {label: counts_json(c) for label, c in members.items()}
            for group, members in (
                ("components", changes_by_component(counts)),
                ("layers", changes_by_layer(counts)),
                ("tensors", counts),
            )
        }
        for precision, counts in step.by_precision.items()
    }


def coverage_json(coverage: Coverage) -> dict[str, Any]:
    """Coverage is null where nothing is active at the final step."""
    return {
        "final_step": coverage.steps[-1],
        "numel": coverage.numel,
        "taus": [
            {
                "tau": tau,
                "steps": [
                    {
                        "step": step,
                        "active": coverage.active[i][j],
                        "density": coverage.density(i)[j],
                        "shared_with_final": coverage.shared[i][j],
                        "coverage": coverage.coverage(i)[j] if coverage.active[i][-1] else None,
                    }
                    for j, step in enumerate(coverage.steps)
                ],
            }
            for i, tau in enumerate(coverage.taus)
        ],
    }


def shapes_json(weights: Sequence[WeightShape]) -> list[dict[str, Any]]:
    """Name, place and shape of each weight; layer and features are null where it has none."""
    places = [(weight, component_of(weight.name)) for weight in weights]
    return [
        {
            "weight": weight.name,
            "layer": place.layer,
            "component": PART_LABELS[place.part],
            "shape": list(weight.shape),
            "numel": weight.numel,
            "in_out_features": None if weight.features is None else list(weight.features),
        }
        for weight, place in places
    ]


def ranks_json(stats: Mapping[str, RankStats]) -> dict[str, Any]:
    """Return name -> statistics of each matrix, ranks with their intervals."""
    return {name: asdict(of) for name, of in stats.items()}


Kind = Literal["text", "count", "percent", "number", "interval"]


@dataclass(frozen=True)
class Column:
    """A column's heading, its name in CSV files, and how a value reads: shares are percent, where text is meant."""

    heading: str
    key: str
    kind: Kind = "text"


@dataclass(frozen=True)
class Table:
    """Raw values under columns; `title` describes the values and their unit."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[_text(v, c.kind) for v, c in zip(row, self.columns, strict=True)] for row in self.rows]

    @property
    def words(self) -> int:
        """How many columns, from the left, are text."""
        return next((i for i, column in enumerate(self.columns) if column.kind != "text"), len(self.columns))


def write_csv(table: Table, path: Path) -> None:
    """The raw values, shares as fractions of 1, intervals as three columns. Raises DataError as `write_text`."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([key for column in table.columns for key in _keys(column)])
    for row in table.rows:
        writer.writerow([v for value, c in zip(row, table.columns, strict=True) for v in _values(value, c)])
    write_text(path, buffer.getvalue(), "table")


def _keys(column: Column) -> list[str]:
    ends = ("", "_low", "_high") if column.kind == "interval" else ("",)
    return [column.key + end for end in ends]


def _values(value: Any, column: Column) -> list[Any]:
    if column.kind == "interval":
        return [value.value, value.low, value.high]
    return [value]


def _text(value: Any, kind: Kind) -> str:
    if kind == "count":
        return f"{value:,}"
    if kind == "percent":
        return f"{100 * value:.3f} %" if math.isfinite(value) else "-"
    if kind == "number":
        return f"{value:.4g}"
    if kind == "interval":
        return _interval(value)
    return str(value)


def _interval(figure: Figure) -> str:
    value, low, high = (_short(x) for x in (figure.value, figure.low, figure.high))
    return value if low == high == value else f"{value} [{low}, {high}]"


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
