"""`UpdateStatisticsCallback`: ranks, norms and shares of the update of any transformers Trainer, during training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ...analysis.changes import count_changes, sum_changes
from ...analysis.ranks import TAU, get_layer_rank_stats, is_weight_matrix
from ...errors import ConfigError, DataError
from ...optim.sparse_optimizer import SparseOptimizer
from .row_file import RowFile

FILE = "update_statistics.jsonl"
# Statistics of a row that are also logged, as `update_...`.
_LOGGED = ("share_changed", "frobenius_norm", "effective_rank_share", "share_above_tau", "share_large")

# The published densities count what moved by more than 1e-5 (https://arxiv.org/abs/2505.11711); 1e-6 is finer.
_TOLERANCES = (1e-6, 1e-5)


class UpdateStatisticsCallback(TrainerCallback):
    """Compares the model with its initial weights every `every` steps and after the last:

        trainer.add_callback(UpdateStatisticsCallback(20))

    It copies the trained weights to the CPU.
    `measure` documents the rows of `update_statistics.jsonl` in the output folder. Callbacks that are called later find
    five of the statistics in their logs, as `update_share_changed` and so on. A resumed run compares with the weights
    that it started from, if the trainer is sparse, and else with those of its checkpoint.

    Args:
        every: number of optimizer steps between two rows.
        tau: of `share_above_tau`, in the units of the weights.

    Raises:
        ConfigError: the model is sharded, or has adapters of PEFT.
        DataError: no weight matrix of the model is trained.
    """

    def __init__(self, every: int, *, tau: float = TAU) -> None:
        self._every, self._tau = every, tau
        self._is_main = False  # whether this process measures
        self._start: dict[str, Tensor] = {}
        self._logs: dict[str, float] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if any(isinstance(param, DTensor) for param in model.parameters()):
            raise ConfigError("statistics_steps measures whole weights, and the model is sharded: leave the option out")
        if hasattr(model, "peft_config"):
            raise ConfigError("statistics_steps measures the model's own weights, and adapters of PEFT are trained")
        self._is_main = state.is_world_process_zero
        if not self._is_main:
            return
        RowFile(Path(args.output_dir, FILE)).cut(state.global_step)
        self._begin(model)
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        if isinstance(inner, SparseOptimizer) and inner.keep_base_weights and state.global_step > 0:
            with inner.base_weights():
                self._copy(model, self._start)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step = state.global_step
        if not self._is_main or (step % self._every and step < state.max_steps):
            return
        row = self.measure(model)
        RowFile(Path(args.output_dir, FILE)).write({"step": step, **row})
        self._logs = {f"update_{name}": row[name] for name in _LOGGED}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        (logs if logs is not None else {}).update(self._logs)
        self._logs = {}

    def _begin(self, model: Any) -> None:
        """Copy the trained weights, and find the matrices among them."""
        parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        self._copy(model, [name for name, p in parameters.items() if p.requires_grad])
        self.n_weights = sum(p.numel() for p in parameters.values())
        self.matrices = {name for name, weight in self._start.items() if is_weight_matrix(name, weight.dim())}
        if not self.matrices:
            raise DataError("no weight matrix of the model is trained")

    def _copy(self, model: Any, names: Iterable[str]) -> None:
        """Copy these weights to the CPU, also if they are there already; later ones are compared with the copies."""
        parameters = dict(model.named_parameters())
        self._start = {name: parameters[name].detach().to("cpu", copy=True) for name in list(names)}

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, Any]:
        """The statistics of the model, or of a copy of it, as one row of JSON.

        Shares are of all `n_weights` floating-point weights of the model, frozen ones included:

        | key | |
        |---|---|
        | share_changed | share of weights whose bits differ from the start's |
        | share_changed_bf16 | the same with both rounded to bf16 first; None if the weights are 16-bit |
        | share_above_1e-6, share_above_1e-5 | share of weights that moved by more than this |
        | frobenius_norm | of the whole update |
        | effective_rank_share | mean over the trained matrices of effective rank / min(m, n) |
        | share_above_tau | share of the trained matrices' weights that moved by more than tau |
        | share_large | share that moved by more than mean + 2 standard deviations of their matrix's changes |
        | matrices | of each trained matrix: shape, ranks, frobenius_norm, share_changed, share_above_tau, share_large |

        Raises:
            DataError: a weight is NaN or infinite; names the matrix.
        """
        stored, rounded, squares = [], [], 0.0
        matrices: dict[str, dict[str, Any]] = {}
        parameters = dict(model.named_parameters())
        for name, before in self._start.items():
            after = parameters[name].detach()
            device = after.device
            counts = count_changes(before, after, _TOLERANCES, device=device)
            stored.append(counts)
            if after.element_size() > 2:
                rounded.append(count_changes(before.bfloat16(), after.bfloat16(), (), device=device))
            wide = torch.promote_types(after.dtype, torch.float32)
            squares += float((after.to(wide) - before.to(device, wide)).double().square().sum())
            if name in self.matrices:
                ranks = get_layer_rank_stats({name: after}, {name: before}, self._tau)
                for label, stats in ranks.items():
                    matrices[label] = {
                        "shape": list(stats.shape),
                        "rank": stats.rank,
                        "effective_rank": stats.effective_rank,
                        "stable_rank": stats.stable_rank,
                        "frobenius_norm": stats.frobenius_norm,
                        "share_changed": counts.share,
                        "share_above_tau": stats.share_above,
                        "share_large": stats.share_large,
                    }
        total = sum_changes(stored)
        shares = [matrix["effective_rank"] / min(matrix["shape"]) for matrix in matrices.values()]
        return {
            "n_weights": self.n_weights,
            "share_changed": total.changed / self.n_weights,
            "share_changed_bf16": sum_changes(rounded).changed / self.n_weights if rounded else None,
            **{
                f"share_above_{tolerance:.0e}".replace("e-0", "e-"): above / self.n_weights
                for tolerance, above in zip(_TOLERANCES, total.above, strict=True)
            },
            "frobenius_norm": math.sqrt(squares),
            "effective_rank_share": sum(shares) / len(shares),
            "share_above_tau": _mean_share(matrices, "share_above_tau"),
            "share_large": _mean_share(matrices, "share_large"),
            "matrices": matrices,
        }


def _mean_share(matrices: Mapping[str, dict[str, Any]], key: str) -> float:
    """The share of all weights of some matrices, from those of each."""
    sizes = [math.prod(matrix["shape"]) for matrix in matrices.values()]
    return sum(size * matrix[key] for size, matrix in zip(sizes, matrices.values(), strict=True)) / sum(sizes)
