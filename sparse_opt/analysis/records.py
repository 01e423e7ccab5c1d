"""The results of the analyses as records, which become tables of text, CSV files and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Literal

from ..masks.parameters import PART_LABELS, component_of, group_by_part
from .concentration import TOP_K, measure_concentration
from .coverage import Coverage
from .ranks import RankStats
from .shapes import WeightShape
from .sparsity import ChangeCounts, StepChanges, changes_by_component, changes_by_layer, sum_changes
from .states import threshold_text
from .tables import COLUMNS, Column, Record, Table


def _place(name: str) -> Record:
    component = component_of(name)
    return {"layer": component.layer, "component": PART_LABELS[component.part]}


def change_tables(found: Sequence[StepChanges], tolerances: Sequence[float]) -> list[Table]:
    """Density and sparsity of the update by step: two tables for each precision."""
    density, sparsity = _density_columns(tolerances), _sparsity_columns(tolerances)
    tables = []
    for precision in found[0].by_precision:
        where = _precision_text(precision)
        records = [
            {"step": step.step, **_shares(sum_changes(step.by_precision[precision].values()), tolerances)}
            for step in found
        ]
        tables += [
            Table(
                f"density of the update, {where}: % of elements whose bits differ, that moved by more than T, and "
                "whose sign flipped",
                records,
                density,
                ("step", *density),
            ),
            Table(
                f"sparsity of the update, {where}: % of elements whose bits are the same, and that moved by at most T",
                records,
                sparsity,
                ("step", *sparsity),
            ),
        ]
    return tables


def change_profile(
    step: StepChanges, tolerances: Sequence[float], by: Literal["component", "layer", "tensor"]
) -> list[Table]:
    """Density of the update at one step by component, layer or tensor: one table for each precision."""
    columns = _density_columns(tolerances)
    return [
        Table(
            f"density of the update by {by}, step {step.step}, {_precision_text(precision)}: % of elements that "
            "changed",
            [
                {by: label, "numel": counts.numel, **_shares(counts, tolerances)}
                for label, counts in _change_groups(tensors)[by].items()
            ],
            columns,
            (by, "numel", *columns),
        )
        for precision, tensors in step.by_precision.items()
    ]


def change_records(found: Sequence[StepChanges], tolerances: Sequence[float]) -> Table:
    """Every count of every tensor, for a CSV file."""
    records = [
        {"step": step.step, "precision": precision, "tensor": name, **_place(name), "numel": counts.numel}
        | _shares(counts, tolerances)
        for step in found
        for precision, tensors in step.by_precision.items()
        for name, counts in tensors.items()
    ]
    return Table("density and sparsity of the update by step and tensor", records)


def changes_json(step: StepChanges) -> Record:
    """One step: for each precision the total, and by component, layer and tensor."""
    return {"step": step.step} | {
        precision: _counts_json(sum_changes(tensors.values()))
        | {
            f"{by}s": {label: _counts_json(counts) for label, counts in group.items()}
            for by, group in _change_groups(tensors).items()
        }
        for precision, tensors in step.by_precision.items()
    }


def _change_groups(tensors: Mapping[str, ChangeCounts]) -> dict[str, Mapping[str, ChangeCounts]]:
    return {"component": changes_by_component(tensors), "layer": changes_by_layer(tensors), "tensor": tensors}


def _counts_json(counts: ChangeCounts) -> Record:
    """`density` and `sparsity` are in the order of the tolerances."""
    return {
        "numel": counts.numel,
        "density_bits": counts.share,
        "sparsity_bits": 1 - counts.share,
        "density": list(counts.shares_above),
        "sparsity": [1 - share for share in counts.shares_above],
        "sign_flips": counts.share_flipped,
    }


def _shares(counts: ChangeCounts, tolerances: Sequence[float]) -> Record:
    densities = (counts.share, *counts.shares_above, counts.share_flipped)
    sparsities = (1 - share for share in densities[:-1])
    return dict(zip(_density_columns(tolerances), densities, strict=True)) | dict(
        zip(_sparsity_columns(tolerances), sparsities, strict=True)
    )


def _density_columns(tolerances: Sequence[float]) -> dict[str, Column]:
    above = {f"density_above_{text}": Column(f"> {text}", "percent") for text in map(threshold_text, tolerances)}
    return {"density_bits": COLUMNS["density_bits"], **above, "sign_flips": COLUMNS["sign_flips"]}


def _sparsity_columns(tolerances: Sequence[float]) -> dict[str, Column]:
    at = {f"sparsity_at_{text}": Column(f"<= {text}", "percent") for text in map(threshold_text, tolerances)}
    return {"sparsity_bits": COLUMNS["sparsity_bits"], **at}


def _precision_text(name: str) -> str:
    return "in the stored dtype" if name == "stored" else "rounded to bf16"


def coverage_tables(coverage: Coverage) -> list[Table]:
    """Coverage, and density, by step with a column for each tau."""
    columns = {text: Column(f"tau {text}", "percent") for text in map(threshold_text, coverage.taus)}

    def table(title: str, of: Callable[[int], Sequence[float]]) -> Table:
        rows = zip(coverage.steps, *(of(i) for i in range(len(columns))), strict=True)
        return Table(title, [dict(zip(("step", *columns), row, strict=True)) for row in rows], columns)

    return [
        table(
            f"coverage: % of the elements active at step {coverage.steps[-1]} that are active at the step "
            "(|W_t - W_0| > tau)",
            coverage.coverage,
        ),
        table(f"density: % of all {coverage.numel:,} elements that are active at the step", coverage.density),
    ]


def coverage_records(coverage: Coverage) -> Table:
    """A record for each tau and step, for a CSV file."""
    records = [
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
    return Table("coverage and density by step and tau", records)


def coverage_json(coverage: Coverage) -> Record:
    """The records by tau. Coverage is null if nothing is active at the final step."""
    by_tau: list[Record] = []
    for record in coverage_records(coverage).records:
        if record["step"] == coverage.steps[0]:
            by_tau.append({"tau": record["tau"], "steps": []})
        share = record["coverage"]
        by_tau[-1]["steps"].append(
            {key: value for key, value in record.items() if key != "tau"}
            | {"coverage": None if math.isnan(share) else share}
        )
    return {"final_step": coverage.steps[-1], "numel": coverage.numel, "taus": by_tau}


def rank_table(stats: Mapping[str, RankStats], tau: float) -> Table:
    """A record for each matrix."""
    records = [
        {
            "matrix": name,
            **_place(name),
            "shape": s.shape,
            "rank": s.rank,
            "full_rank": s.full_rank,
            "effective_rank": s.effective_rank,
            "stable_rank": s.stable_rank,
            "frobenius_norm": s.frobenius_norm,
            "spectral_norm": s.spectral_norm,
            "share_above_tau": s.share_above,
            "share_large": s.share_large,
        }
        for name, s in stats.items()
    ]
    methods = ", ".join(sorted({s.method for s in stats.values()}))
    above = f"> {threshold_text(tau)}"
    title = (
        f"rank and size of the update by weight matrix (singular values: {methods}; [low, high] where their error "
        f"shows); {above}, large: % of elements that moved by more than this, than mean + 2 standard "
        "deviations of the matrix"
    )
    return Table(title, records, {"share_above_tau": Column(above, "percent")})


def rank_summary(stats: Mapping[str, RankStats]) -> Table:
    """A record for each component, and one for all: means over the matrices."""
    groups = {PART_LABELS[part]: group for part, group in group_by_part(stats).items()}
    records = [
        {
            "component": label,
            "matrices": len(group),
            "rank_of_full": fmean(s.rank.value / s.full_rank for s in group),
            "effective_rank_of_full": fmean(s.effective_rank.value / s.full_rank for s in group),
            "mean_stable_rank": fmean(s.stable_rank.value for s in group),
            "frobenius_norm": fmean(s.frobenius_norm for s in group),
        }
        for label, group in {**groups, "all": list(stats.values())}.items()
    ]
    title = "means over the matrices of a component; rank and effective rank: % of the full rank min(m, n)"
    return Table(title, records)


def rank_steps_table(found: Mapping[int, Mapping[str, RankStats]]) -> Table:
    """A record for each step and component: means over the matrices."""
    records = [
        {"step": step, **record}
        for step, stats in found.items()
        for record in rank_summary(stats).records
        if record["component"] != "all"
    ]
    title = "ranks of the update by step and component, means over the matrices; rank, effective rank: % of full rank"
    return Table(title, records)


def rank_step_records(found: Mapping[int, Mapping[str, RankStats]], tau: float) -> Table:
    """A record for each step and matrix, for a CSV file."""
    records = [{"step": step, **record} for step, stats in found.items() for record in rank_table(stats, tau).records]
    return Table("rank and size of the update by step and weight matrix", records)


def concentration_table(found: Mapping[int, Mapping[str, RankStats]]) -> Table:
    """A record for each step: how unevenly the update is spread over the matrices."""
    records = [
        {
            "step": step,
            "matrices": len(stats),
            **asdict(measure_concentration([s.frobenius_norm for s in stats.values()])),
        }
        for step, stats in found.items()
    ]
    columns = {
        "gini": Column("Gini", "number"),
        "entropy": Column("entropy", "number"),
        "top_share": Column(f"top {TOP_K}", "percent"),
        "n_changed": Column("changed", "count"),
    }
    title = (
        "concentration of the update: of the Frobenius norms of the matrices the Gini coefficient, the entropy (1: all "
        f"alike, 0: one has all) and the share of the {TOP_K} largest; matrices that changed"
    )
    return Table(title, records, columns)


def concentration_json(found: Mapping[int, Mapping[str, RankStats]]) -> list[Record]:
    """The records of `concentration_table`; null where a value is undefined."""
    return [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in record.items()}
        for record in concentration_table(found).records
    ]


def ranks_json(stats: Mapping[str, RankStats]) -> Record:
    """Return name -> statistics of each matrix, ranks with their intervals."""
    return {name: asdict(of) for name, of in stats.items()}


def shape_table(shapes: Sequence[WeightShape]) -> Table:
    """A record for each weight."""
    total = sum(shape.numel for shape in shapes)
    records = [
        {
            "weight": s.name,
            **_place(s.name),
            "shape": s.shape,
            "numel": s.numel,
            "share": s.numel / total if total else 0.0,
            "in_out": "" if s.features is None else "{} -> {}".format(*s.features),
        }
        for s in shapes
    ]
    return Table(f"weights, {total:,} elements in all; share: % of them", records)


def shape_sums(shapes: Sequence[WeightShape]) -> Table:
    """A record for each component."""
    total = sum(shape.numel for shape in shapes)
    groups = group_by_part({shape.name: shape.numel for shape in shapes})
    records = [
        {"component": PART_LABELS[part], "weights": len(n), "numel": sum(n), "share": sum(n) / total if total else 0.0}
        for part, n in groups.items()
    ]
    return Table(f"weights by component, {total:,} elements in all; share: % of them", records)


def shapes_json(shapes: Sequence[WeightShape]) -> list[Record]:
    """Name, place and shape of each weight; layer and features are null where it has none."""
    return [
        {"weight": s.name, **_place(s.name), "shape": s.shape, "numel": s.numel, "in_out_features": s.features}
        for s in shapes
    ]
