"""Statistics of the update, written and reported during training: the options `statistics_*` of every loop."""

from __future__ import annotations

from typing import Any

from sparse_opt.analysis.update_statistics import Masters, UpdateStatistics

from ...options import TrainingOptions
from ..outputs import RowFile

FILE = "update_statistics.jsonl"
_OF_MATRIX = ("rank", "effective_rank", "stable_rank", "frobenius_norm", "share_above_tau", "share_large")


class UpdateLog:
    """Compares the model with its initial weights every `statistics_steps` steps and after the last.

    Args:
        config: the run's options.
        model: the model before the first step; None on the ranks that measure nothing.

    Attributes:
        file: where the rows go, set before the first step.
    """

    def __init__(self, config: TrainingOptions, model: Any):
        self.file: RowFile | None = None
        self._config = config
        self._statistics = None
        if model is not None:
            self._statistics = UpdateStatistics(
                model, include=config.statistics_include, method=config.statistics_method, tau=config.statistics_tau
            )

    def is_due(self, step: int) -> bool:
        """Whether the update is measured at this step."""
        every = self._config.statistics_steps
        return every is not None and (step == self._config.n_steps or step % every == 0)

    def measure(self, step: int, model: Any, masters: Masters) -> tuple[dict[str, float], dict[str, float]]:
        """Write a row of `file`; return statistics for the row of metrics, and, by matrix, for the trackers."""
        if self._statistics is None or self.file is None:
            return {}, {}
        row = self._statistics.measure(model, masters)
        self.file.write({"step": step, **row})
        metrics = {
            "update_share": row["share_changed"],
            "update_frobenius_norm": row["frobenius_norm"],
            "update_effective_rank_share": row["effective_rank_share"],
            "update_share_above_tau": row["share_above_tau"],
            "update_share_large": row["share_large"],
        }
        of_matrices = {
            f"update_{key}/{name}": matrix[key] for name, matrix in row["matrices"].items() for key in _OF_MATRIX
        }
        return metrics, of_matrices
