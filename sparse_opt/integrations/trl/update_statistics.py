"""`UpdateStatisticsCallback`: ranks, norms and shares of the update of any transformers Trainer, during training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ...analysis.ranks import TAU
from ...analysis.spectrum import Method
from ...analysis.update_statistics import Masters, UpdateStatistics
from ...errors import ConfigError
from ...optim.sparse_optimizer import SparseOptimizer
from .row_file import RowFile

FILE = "update_statistics.jsonl"
# Statistics of a row that are also logged, as `update_...`.
_LOGGED = ("share_changed", "frobenius_norm", "effective_rank_share", "share_above_tau", "share_large")


class UpdateStatisticsCallback(TrainerCallback):
    """Compares the model with its initial weights every `every` steps and after the last:

        trainer.add_callback(UpdateStatisticsCallback(20))

    `UpdateStatistics.measure` documents the rows of `update_statistics.jsonl` in the output folder. Callbacks that are
    called later find five of the statistics in their logs, as `update_share_changed` and so on. A resumed run compares
    with the weights that it started from, if the trainer is sparse, and else with those of its checkpoint.

    Args:
        every: number of optimizer steps between two rows.
        include, method, tau: see `UpdateStatistics`.

    Raises:
        ConfigError: the model is sharded.
        DataError: no weight matrix of the model is trained and chosen.
    """

    def __init__(
        self, every: int, *, include: Sequence[str] | None = None, method: Method = "gram", tau: float = TAU
    ) -> None:
        self._every = every
        self._options: dict[str, Any] = {"include": include, "method": method, "tau": tau}
        self._statistics: UpdateStatistics | None = None
        self._logs: dict[str, float] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if any(isinstance(param, DTensor) for param in model.parameters()):
            raise ConfigError("statistics_steps measures whole weights, and the model is sharded: leave the option out")
        if not state.is_world_process_zero:
            return
        RowFile(Path(args.output_dir, FILE)).cut(state.global_step)
        self._statistics = UpdateStatistics(model, **self._options)
        sparse = _sparse(optimizer)
        if sparse is not None and sparse.keep_base_weights and state.global_step > 0:
            with sparse.base_weights():
                self._statistics.restart(model)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        step = state.global_step
        if self._statistics is None or (step % self._every and step < state.max_steps):
            return
        row = self._statistics.measure(model, _masters(optimizer))
        RowFile(Path(args.output_dir, FILE)).write({"step": step, **row})
        self._logs = {f"update_{name}": row[name] for name in _LOGGED}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        (logs if logs is not None else {}).update(self._logs)
        self._logs = {}


def _sparse(optimizer: Any) -> SparseOptimizer | None:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    return inner if isinstance(inner, SparseOptimizer) else None


def _masters(optimizer: Any) -> Masters:
    """The optimizer's fp32 copies of 16-bit weights."""
    sparse = _sparse(optimizer)
    if sparse is None or not sparse.master_weights:
        return {}
    state = sparse.state_dict()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    copies = {names[i]: entry for i, entry in state["state"].items()}
    return {name: (entry["indices"], entry["master"]) for name, entry in copies.items() if "master" in entry}
