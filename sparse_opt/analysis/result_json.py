"""The results of the analyses as data that JSON can hold; shares are fractions of 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..components import PART_LABELS, component_of
from .coverage import Coverage
from .ranks import RankStats
from .shapes import WeightShape
from .sparsity import ChangeCounts, StepChanges, changes_by_component, changes_by_layer, sum_changes


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
    """Name -> figures of each matrix, those of a rank with their intervals."""
    return {name: asdict(of) for name, of in stats.items()}
