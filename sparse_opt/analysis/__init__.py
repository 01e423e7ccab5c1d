"""Analysis of the changes by training, from a delta log or checkpoints: sparsity, coverage, ranks, overlap of masks.

The functions of the plots and of the report, which need matplotlib, are in `analysis.plots` and `analysis.report`.
"""

from __future__ import annotations

from .changes import (
    ChangeCounts,
    Coverage,
    StepChanges,
    chosen_names,
    count_changes,
    measure_coverage,
    measure_sparsity,
    sum_changes,
)
from .checkpoints import Checkpoint, CheckpointSeries
from .mask_overlap import Comparison, Overlap, compare_masks
from .ranks import (
    RankStats,
    get_layer_rank_stats,
    measure_concentration,
    measure_ranks,
    rank_stats,
    singular_values,
)

__all__ = [
    "ChangeCounts",
    "Checkpoint",
    "CheckpointSeries",
    "Comparison",
    "Coverage",
    "Overlap",
    "RankStats",
    "StepChanges",
    "chosen_names",
    "compare_masks",
    "count_changes",
    "get_layer_rank_stats",
    "measure_concentration",
    "measure_coverage",
    "measure_ranks",
    "measure_sparsity",
    "rank_stats",
    "singular_values",
    "sum_changes",
]
