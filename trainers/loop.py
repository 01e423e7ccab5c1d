"""What every training loop does around its loss: set up, draw batches, log a step, save the end.

A loop reads

    with TrainingRun(config, "dpo", "preference") as run:
        for step in run.steps():
            for batch in run.batches(step):
                ...  # forward, loss, backward
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(step, loss=loss)
        return run.finish()
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal

import torch

from sparse_opt import backends
from sparse_opt.delta_log import DeltaLog, claim
from sparse_opt.delta_schedule import Schedule
from sparse_opt.errors import SparseOptError
from sparse_opt.optim import SparseAdamW

from .encoding import TokenBatch, collate, load_examples
from .models import load_policy, load_tokenizer, resolve_device
from .optimizers import make_optimizer, make_scheduler
from .options import TrainingOptions, model_slug
from .order import ShuffledOrder
from .outputs import CHECKPOINT_FOLDER, MetricsWriter, check_new_folder, save_checkpoint
from .progress import Progress
from .timing import StepTimer

logger = logging.getLogger(__name__)


class TrainingRun:
    """One run: its model, optimizer, data and outputs. Nothing is written before all of it could be loaded."""

    def __init__(self, config: TrainingOptions, algorithm: str, data_kind: Literal["preference", "demonstration"]):
        self.config = config
        self.algorithm = algorithm
        self.output_dir = config.output_dir or Path(f"checkpoints_{model_slug(config.policy_name)}_{algorithm}")
        check_new_folder(self.output_dir, "output_dir")
        if config.delta_log_dir is not None:
            check_new_folder(config.delta_log_dir, "delta_log_dir")
        torch.manual_seed(config.seed)
        self.device = resolve_device(config.device)
        # A backend that cannot run is found here, not when the run has begun to write. The delta log has no argument.
        backends.functions(self.device, None if config.backend == "auto" else config.backend)
        if config.delta_log_dir is not None:
            backends.functions(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tokenizer = load_tokenizer(config)
        self.examples, self.data_report = load_examples(
            data_kind,
            config.dataset,
            config.dataset_split,
            self.tokenizer,
            max_length=config.max_length,
            truncation_mode=config.truncation_mode,
            subset_size=config.subset_size,
            seed=config.seed,
        )
        dropped = self.data_report.n_examples < self.data_report.n_rows
        logger.log(logging.WARNING if dropped else logging.INFO, "%s: %s", config.dataset, self.data_report)
        self.model = load_policy(config, self.device)
        self.optimizer = make_optimizer(config, self.model)
        self._scheduler = make_scheduler(config, self.optimizer)
        self._order = ShuffledOrder(len(self.examples), config.seed)
        self._timer = StepTimer(self.device)
        self._rows: list[dict[str, Any]] = []
        self._delta_steps = Schedule.parse(config.delta_log_steps)
        self._delta_log: DeltaLog | None = None
        with ExitStack() as undo:
            # Both folders are this run's before anything is written to either.
            lock = None if config.delta_log_dir is None else undo.enter_context(claim(config.delta_log_dir))
            self._metrics = MetricsWriter(self.output_dir, config)
            if config.delta_log_dir is not None:
                self._delta_log = DeltaLog.create(
                    config.delta_log_dir,
                    self.model,
                    level=config.delta_log_level,
                    mask=self.optimizer.mask if isinstance(self.optimizer, SparseAdamW) else None,
                    metadata={"model": config.policy_name, "method": algorithm},
                    lock=lock,
                )

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._metrics.close()
        if self._delta_log is not None:
            self._delta_log.__exit__(kind, error, traceback)

    def steps(self) -> Iterator[int]:
        """The steps 1..n_steps, with a progress bar on a terminal and a line now and then elsewhere."""
        with Progress(f"{self.algorithm} {self.config.mode}", self.config.n_steps) as self._progress:
            for step in range(1, self.config.n_steps + 1):
                self._step_started = time.perf_counter()
                yield step

    def batches(self, step: int) -> list[TokenBatch]:
        """A step's micro-batches on the device. In a batch of pairs all chosen completions come before the rejected."""
        size, count = self.config.batch_size, self.config.gradient_accumulation_steps
        pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        batches = []
        for start in range((step - 1) * size * count, step * size * count, size):
            examples = [self.examples[index] for index in self._order.take(start, size)]
            sequences = [sequence for column in zip(*examples, strict=True) for sequence in column]
            batches.append(collate(sequences, pad_id).to(self.device))
        return batches

    def time(self, section: str) -> Any:
        """`with run.time("optimizer"):` counts the block's time as the step's `optimizer_time_s`."""
        return self._timer.section(section)

    def log(self, step: int, n_tokens: int, **metrics: torch.Tensor) -> None:
        """End the step: advance the learning rate, write and show the metrics, log the weights if it is their turn.

        Args:
            n_tokens: tokens in the step's batches, without padding.
            metrics: device scalars; `loss` is one of them. They are read together, the step's only synchronisation.

        Raises:
            SparseOptError: the loss or the gradient norm is not finite.
        """
        if self.optimizer.grad_norm is not None:
            metrics["grad_norm"] = self.optimizer.grad_norm
        values = torch.stack([value.detach().float().reshape(()) for value in metrics.values()]).tolist()
        step_time = time.perf_counter() - self._step_started
        row: dict[str, Any] = {"step": step, **dict(zip(metrics, values, strict=True))}
        for name, value in row.items():
            if not math.isfinite(value):
                raise SparseOptError(f"step {step}: {name} is {value}; lower --learning_rate, or train in fp32")
        row["learning_rate"] = self._scheduler.get_last_lr()[0]
        row["n_tokens"] = n_tokens
        row["tokens_per_s"] = n_tokens / step_time
        row["step_time_s"] = step_time
        row.update({f"{section}_time_s": seconds for section, seconds in self._timer.read().items()})
        if self.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        self._scheduler.step()
        self._rows.append(row)
        self._metrics.write(row)
        if self._delta_log is not None and self._delta_steps.due(step, self.config.n_steps):
            self._delta_log.append(step)
        shown: dict[str, str] = {
            name: f"{row[name]:.4g}" for name in ("loss", "accuracy", "tokens_per_s") if name in row
        }
        self._progress.advance(step, shown)

    def finish(self) -> dict[str, Any]:
        """Save the final checkpoint and return the run's summary."""
        checkpoint = self.output_dir / CHECKPOINT_FOLDER
        save_checkpoint(self.model, self.tokenizer, checkpoint)
        times = [name for name in self._rows[0] if name.endswith("_time_s")]
        summary = {
            "algorithm": self.algorithm,
            "mode": self.config.mode,
            "n_steps": self.config.n_steps,
            "data": asdict(self.data_report),
            "first": self._rows[0],
            "last": self._rows[-1],
            # The first step pays for allocation and compilation; the median does not see it.
            "median": {name: median(row[name] for row in self._rows) for name in times},
            "optimizer_bytes": self.optimizer.nbytes(),
            "peak_memory_bytes": self._rows[-1].get("peak_memory_bytes"),
            "metrics_file": str(self._metrics.path),
            "checkpoint": str(checkpoint),
            "delta_log_dir": None if self._delta_log is None else str(self.config.delta_log_dir),
        }
        return summary
