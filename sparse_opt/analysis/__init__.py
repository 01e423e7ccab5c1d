"""Analysis of the changes by training, from a delta log or two checkpoints: sparsity, coverage, ranks, and plots."""

from __future__ import annotations

from .checkpoints import Checkpoint, CheckpointPair, CheckpointSeries
from .concentration import Concentration, measure_concentration
from .coverage import Coverage, measure_coverage
from .ranks import (
    RankStats,
    get_effective_rank,
    get_layer_rank_stats,
    get_rank,
    get_stable_rank,
    measure_ranks,
    measure_ranks_by_step,
    rank_stats,
)
from .sparsity import ChangeCounts, StepChanges, count_changes, measure_sparsity, sum_changes

__all__ = [
    "ChangeCounts",
    "Checkpoint",
    "CheckpointPair",
    "CheckpointSeries",
    "Concentration",
    "Coverage",
    "RankStats",
    "StepChanges",
    "count_changes",
    "get_effective_rank",
    "get_layer_rank_stats",
    "get_rank",
    "get_stable_rank",
    "measure_concentration",
    "measure_coverage",
    "measure_ranks",
    "measure_ranks_by_step",
    "measure_sparsity",
    "rank_stats",
    "sum_changes",
]
