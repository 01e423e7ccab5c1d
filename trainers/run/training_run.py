"""`TrainingRun`, the part that all loops share: setup, batches, optimizer steps, metrics and evaluation.

A loop uses it as follows:

    with TrainingRun(config, "dpo", "preference") as run:
        reference = run.reference()
        for step in run.steps(evaluate):
            examples = run.examples_of(step)
            passes = zip(run.training_passes(len(examples)), run.batches(step, collate), strict=True)
            for (_, is_last), batch in passes:
                ...  # forward
                run.backward(loss, is_last)
            run.update()
            run.log(step, n_tokens, loss=loss)
        return run.finish()

The only state carried between steps is the weights, the optimizer, the schedule and the objects passed to `keep`: the
batch and the random numbers of a step depend on the seed and the step number alone. On a CPU, a run resumed from a
checkpoint is therefore bit-identical to an uninterrupted one.

With several processes (`ranks`) each one has the whole data, and all weights or a part of each, and takes its share of
the rows of a step. Losses are divided by counts over all ranks, and metrics passed to `log` are those of all ranks;
rank 0 writes.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_opt import backends
from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.integrations.trl.memory import process_statistics
from sparse_opt.optim import SparseOptimizer

from ..data.encoding import TokenBatch, require_known_tokens
from ..data.loaders import DataKind, LoadData, data_loader
from ..data.order import GroupedOrder, ShuffledOrder, held_out
from ..data.prefetch import StepBatches
from ..options import GraphOptions, TrainingOptions
from ..policy.models import compile_layers, load_policy, load_tokenizer, resolve_device
from ..policy.optimizers import adapt, learning_rate, make_optimizer, make_scheduler
from ..policy.reference import Reference, make_reference
from ..policy.sharding import shard
from ..policy.whole_model import Outline
from ..ranks import Ranks
from .averaging import GradientAveraging
from .graphs import GraphedSteps, WholeStep, require_graphs
from .loss_scaling import LossScaling
from .outputs import RowFile
from .reporting.process_statistics import read_scalars, statistics_columns
from .reporting.progress import Progress
from .reporting.timing import StepTimer
from .reporting.trackers import require_trackers
from .reporting.update_log import FILE as UPDATES_FILE
from .reporting.update_log import UpdateLog
from .resuming.checkpoints import Stateful
from .resuming.whole_state import WholeState
from .run_files import RunFiles

logger = logging.getLogger(__name__)

Evaluate = Callable[[], Mapping[str, float | Tensor]]
# Number of completions written at each of the `sample_steps`.
_SAMPLES = 4


class TrainingRun:
    """One run: its model, optimizer, data and outputs. Everything is loaded before `with` writes the first file.

    Args:
        config: options; those of `TrainingOptions` are used here.
        algorithm: the algorithm's name in folders and summaries.
        data: the kind of examples in the dataset, or a function that loads it; see `data.loaders`.

    Attributes:
        model: the module to call and train; the PEFT wrapper in mode lora.
        optimizer: the optimizer of the trained weights.
        ranks: the processes of the run, and this one's rank.
        data, eval_data: examples; eval_data is None without an eval_dataset.
        pad_id: token id of the padding; 0 if the tokenizer has none.
    """

    def __init__(self, config: TrainingOptions, algorithm: str, data: DataKind | LoadData):
        self.config = config
        self.algorithm = algorithm
        self.ranks = Ranks.of(config.parallel, config.ddp_timeout)
        if self.ranks.size > (rows := config.batch_size * config.gradient_accumulation_steps):
            raise ConfigError(
                f"batch_size x gradient_accumulation_steps is {rows}: the {self.ranks.size} processes share these "
                "examples, expected at least one for each"
            )
        if config.dtype == "fp16" and self.ranks.sharded and config.mode != "sparse":
            raise ConfigError(
                f"option 'dtype' is fp16 with parallel fsdp and mode {config.mode}: a rank sees the overflows of its "
                "own part alone, so some would skip a step that others make; expected mode sparse, bf16 or fp32"
            )
        self._files = RunFiles(config, algorithm, self.ranks)
        self.output_dir = self._files.output_dir
        require_trackers(config)
        torch.manual_seed(config.seed)
        self.device = resolve_device(config.device)
        # Raises if a backend cannot run, before any file is written. The delta log always takes the default backend.
        backends.functions(self.device, None if config.backend == "auto" else config.backend)
        if self._files.delta_log_dir is not None:
            backends.functions(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tokenizer = load_tokenizer(config)
        self.pad_id: int = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        self._load_data(data_loader(data, config) if isinstance(data, str) else data)
        config.set_length(len(self.data))
        policy = load_policy(config, None if self.ranks.sharded else self.device)
        examples = [*self.data, *(self.eval_data or [])]
        sequences = (part for example in examples for part in (example if isinstance(example, list) else [example]))
        require_known_tokens(policy, self.tokenizer, ([*part.ids, self.pad_id] for part in sequences))
        self.model: Any = adapt(config, policy)
        outline = Outline(self.model) if self.ranks.sharded else None
        if config.compile:
            compile_layers(self.model)
        if self.ranks.sharded:
            shard(self.model, self.device)
        self._whole = WholeState(self.ranks, self.model, outline)
        self.optimizer = make_optimizer(config, self.model, self.ranks.group)
        self._graphs = isinstance(config, GraphOptions) and config.cuda_graphs
        if self._graphs:
            require_graphs(self.model, self.optimizer, self.device, self.ranks.size)
        self._averaging = GradientAveraging(self.ranks, self.model, self.optimizer)
        self._scaling = LossScaling(self.device, enabled=config.dtype == "fp16")
        self._scheduler = make_scheduler(config, self.optimizer)
        self._order = self._data_order()
        self._step_batches: StepBatches | None = None
        self._ahead: Iterator[tuple[int, list[TokenBatch]]] | None = None  # (step, its batches) of the next steps
        self._timer = StepTimer(self.device)
        self._kept: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self._scheduler}
        if self._scaling.enabled:
            self._kept["loss_scale"] = self._scaling
        self._updates = None if config.statistics_steps is None else UpdateLog(config, self.whole_model())

    def _load_data(self, load: LoadData) -> None:
        config, tokenizer = self.config, self.tokenizer
        self.data, self.data_report = load(
            config.dataset, config.dataset_split, tokenizer, config.subset_size, config.seed
        )
        self.eval_data: list[Any] | None = None
        if config.eval_dataset is not None:
            self.eval_data, _ = load(
                config.eval_dataset, config.eval_dataset_split, tokenizer, config.eval_subset_size, config.seed
            )
        elif config.eval_ratio is not None:
            self.data, self.eval_data = held_out(self.data, config.eval_ratio, config.seed, config.dataset)
        dropped = self.data_report.n_examples < self.data_report.n_rows
        logger.log(logging.WARNING if dropped else logging.INFO, "%s: %s", config.dataset, self.data_report)

    def _data_order(self) -> ShuffledOrder:
        config = self.config
        if not config.group_by_length:
            return ShuffledOrder(len(self.data), config.seed)
        parts = (example if isinstance(example, list) else [example] for example in self.data)
        lengths = [max(len(part.ids) for part in example) for example in parts]
        return GroupedOrder(lengths, config.seed, config.examples_per_step)

    def __enter__(self) -> TrainingRun:
        self._files.begin(self._whole, self.optimizer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ahead = None  # ends the workers
        self._files.__exit__(kind, error, traceback)

    # Before the first step

    def reference(self, *, offload: bool = False) -> Reference:
        """The reference policy. Call this before `steps`, which loads a checkpoint's weights into the model.

        With `offload`, a second model, if the mode needs one, is kept on the CPU while it is not in use.
        """
        reference = make_reference(
            self.config, self.model, self.optimizer, self.device, offload=offload, sharded=self.ranks.sharded
        )
        if self._graphs:
            require_graphs(reference.model, self.optimizer, self.device, self.ranks.size)
        return reference

    def whole_model(self) -> Any:
        """The model, or if it is sharded an ordinary copy of it, on the CPU of rank 0, and None on the other ranks.

        All ranks must call it.
        """
        return self._whole.model()

    def row_file(self, name: str) -> RowFile:
        """A file of JSON rows with a `step` each, in the output folder, which rank 0 writes. Call this before `steps`.

        Rows can be written from `steps` on, which drops those of repeated steps from the file of a resumed run.
        """
        return self._files.row_file(name)

    def keep(self, name: str, thing: Stateful) -> None:
        """Save the state of another object in checkpoints. Call this before `steps`, which restores it."""
        if name in self._kept:
            raise ValueError(f"'{name}' is kept already")
        self._kept[name] = thing

    def steps(self, evaluate: Evaluate | None = None) -> Iterator[int]:
        """Yield the remaining steps up to n_steps, with a progress bar on a terminal and occasional lines elsewhere.

        Args:
            evaluate: returns scalars; called without gradient every `eval_steps` steps if there is an eval_dataset.
        """
        config = self.config
        if self._updates is not None:
            self._updates.file = self.row_file(UPDATES_FILE)
        self._files.resume(self._whole, self._kept)
        first_step = self._files.first_step
        if self.eval_data is None:
            evaluate = None
        if evaluate is not None and first_step == 1:
            self._evaluate(0, evaluate)
        if first_step == 1 and config.save_steps is not None and config.save_total_limit is None:
            self._files.save(0, self.tokenizer, self._whole, self._kept)
        title, hidden = f"{self.algorithm} {config.mode}", not self.ranks.is_main
        with Progress(title, config.n_steps, first_step - 1, hidden=hidden) as self._progress:
            for step in range(first_step, config.n_steps + 1):
                seed_everything(config.seed, step, self.ranks.rank)
                self._step_started = time.perf_counter()
                yield step
                last = step == config.n_steps
                if evaluate is not None and (last or step % config.eval_steps == 0):
                    self._evaluate(step, evaluate)
                if config.save_steps is not None and step % config.save_steps == 0 and not last:
                    self._files.save(step, self.tokenizer, self._whole, self._kept)

    # Within a step

    def examples_of(self, step: int) -> list[Any]:
        """The `examples_per_step` examples of the step."""
        count = self.config.examples_per_step
        return [self.data[index] for index in self._order.take((step - 1) * count, count)]

    def epoch_of(self, step: int) -> int:
        """The number of complete passes over the data before the step."""
        return (step - 1) * self.config.examples_per_step // len(self.data)

    def passes(self, stop: int, start: int = 0) -> list[slice]:
        """The rows of each forward pass that this rank makes over the rows start .. stop - 1."""
        return self.ranks.passes(start, stop, self.config.batch_size)

    def training_passes(self, stop: int, start: int = 0) -> Iterator[tuple[slice, bool]]:
        """`passes` of an optimizer step: the rows of each, and whether it is the last."""
        passes = self.passes(stop, start)
        if stop - start < self.ranks.size:
            raise ConfigError(
                f"a step has {stop - start} rows for {self.ranks.size} processes: expected one for each at least"
            )
        return zip(passes, [*[False] * (len(passes) - 1), True], strict=True)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Backpropagate this rank's part of a loss that is a sum over the ranks.

        The backward pass of the last forward pass of an optimizer step averages the gradients over the ranks.
        """
        self._averaging.backward(self._scaling.scaled(loss), is_last)

    def batches(self, step: int, collate: Callable[[Sequence[Any]], TokenBatch]) -> Iterator[TokenBatch]:
        """The batches of this rank's forward passes in the step, on the device, in the order of `passes`.

        With `dataloader_num_workers` they are made while earlier steps run; it is then called once for each step.

        Args:
            collate: makes a batch on the CPU from examples; the same for all steps, and a function that can be pickled.
        """
        config = self.config
        if self._step_batches is None:
            passes = self.passes(config.examples_per_step)
            self._step_batches = StepBatches(self.data, self._order, config.examples_per_step, passes, collate)
            if config.dataloader_num_workers:
                steps = range(step, config.n_steps + 1)
                pin_memory = self.device.type == "cuda"
                workers = self._step_batches.ahead(steps, config.dataloader_num_workers, pin_memory=pin_memory)
                self._ahead = zip(steps, workers, strict=True)
        found: Iterable[TokenBatch] = self._step_batches.batches(step)
        if self._ahead is not None:
            made_for, found = next(self._ahead)
            if made_for != step:
                raise ValueError(f"batches of step {step} after those of step {made_for - 1}: expected {made_for}")
        for batch in found:
            yield batch.to(self.device)

    def time(self, section: str) -> AbstractContextManager[None]:
        """`with run.time("optimizer"):` adds the block's time to the step's `optimizer_time_s`."""
        return self._timer.section(section)

    def update(self, *others: torch.optim.Optimizer) -> None:
        """Make a step of the optimizer with the current gradients, then free them; timed as `optimizer`.

        Args:
            others: optimizers of other weights that the same loss trains, which make a step too.
        """
        with self.time("optimizer"):
            self._scaling.step(self.optimizer, *others)

    def whole_step(self, function: WholeStep) -> WholeStep:
        """The function of all work of an optimizer step, `update` included, or with `cuda_graphs` one that replays it.

        A replay repeats what the function does on the GPU: numbers that change from step to step must be tensors. The
        sections of a replayed step are not timed; the step is timed as `whole_step`.
        """
        if not self._graphs:
            return function
        assert isinstance(self.optimizer, SparseOptimizer)
        graphed = GraphedSteps(function, self.optimizer)

        def replay(batches: Iterable[TokenBatch], tensors: Sequence[Tensor]) -> Tensor:
            with self._timer.only("whole_step"):
                return graphed(list(batches), tensors)

        return replay

    def samples_due(self, step: int) -> bool:
        """Whether `log_samples` writes at this step."""
        every = self.config.sample_steps
        return every is not None and (step == 1 or step % every == 0 or step == self.config.n_steps)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the first few of these completions (text, reward, ...) to samples.jsonl if `samples_due(step)`."""
        if self.samples_due(step):
            for sample in samples[:_SAMPLES]:
                self._files.samples.write({"step": step, **sample})

    def track(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report metrics to the trackers alone."""
        self._files.track(step, metrics)

    def log(self, step: int, n_tokens: int, **metrics: Tensor | float | None) -> None:
        """End the step: advance the learning rate, write and show the metrics, and log the weights if they are due.

        Args:
            n_tokens: tokens in the step's batches, without padding.
            metrics: scalars, including `loss`; None for a metric that the step does not have. Tensors are copied to the
                CPU together, in the only synchronisation of the step.

        Raises:
            SparseOptError: a metric is not finite.
        """
        if self._updates is not None and self._updates.is_due(step):
            with self.time("statistics"):
                masters = self._whole.masters(self.optimizer)
                of_update, of_matrices = self._updates.measure(step, self.whole_model(), masters)
            metrics |= of_update
            self.track(step, of_matrices)
        if self.config.max_grad_norm is not None:
            metrics["grad_norm"] = None if self._scaling.skipped else self.optimizer.grad_norm
        if self._scaling.enabled:
            metrics |= {"loss_scale": self._scaling.scale, "step_skipped": float(self._scaling.skipped)}
        values = read_scalars(metrics)
        step_time = time.perf_counter() - self._step_started
        of_ranks = self.ranks.gather(process_statistics(self.device))
        for name, value in values.items():
            if value is not None and not math.isfinite(value):
                raise SparseOptError(f"step {step}: {name} is {value}; lower --learning_rate, or train in fp32")
        row: dict[str, Any] = {"step": step, **values}
        row["learning_rate"] = learning_rate(self._scheduler)
        row["epoch"] = step * self.config.examples_per_step / len(self.data)
        row["n_tokens"] = n_tokens
        row["tokens_per_s"] = n_tokens / step_time
        row["step_time_s"] = step_time
        row.update({f"{section}_time_s": seconds for section, seconds in self._timer.read().items()})
        row |= statistics_columns(of_ranks)
        self._scheduler.step()
        self._files.write_metrics(row, self._whole)
        names = ("loss", "reward", "accuracy", "tokens_per_s")
        self._progress.advance(step, {name: f"{row[name]:.4g}" for name in names if row.get(name) is not None})

    def _evaluate(self, step: int, evaluate: Evaluate) -> None:
        seed_everything(self.config.seed, 0, self.ranks.rank)  # every evaluation samples with the same random numbers
        began = time.perf_counter()
        with torch.no_grad():
            values = {f"eval_{name}": value for name, value in read_scalars(evaluate()).items()}
        for name, value in values.items():
            if value is not None and not math.isfinite(value):
                raise SparseOptError(f"step {step}: {name} is {value}")
        self._timer.read()  # discard the timings of the evaluation
        self._files.evaluations.write({"step": step, **values, "eval_time_s": time.perf_counter() - began})
        self.track(step, values)

    # At the end

    def finish(self, write_extra: Callable[[Path], object] | None = None) -> dict[str, Any]:
        """Save the final model in Hugging Face format and return the run's summary.

        In mode lora the adapters are saved as well, and then merged into the weights.

        Args:
            write_extra: writes further files of the final model into the folder passed to it, before that folder gets
                its final name.
        """
        return self._files.finish(self.tokenizer, self._whole, self._summary, write_extra)

    def _summary(self, final: Path) -> dict[str, Any]:
        rows, evaluations = self._files.metrics.rows, self._files.evaluations.rows
        times = [name for name in rows[0] if name.endswith("_time_s")]
        return {
            "algorithm": self.algorithm,
            "mode": self.config.mode,
            "n_steps": self.config.n_steps,
            "data": asdict(self.data_report),
            "first": rows[0],
            "last": rows[-1],
            "first_evaluation": evaluations[0] if evaluations else None,
            "last_evaluation": evaluations[-1] if evaluations else None,
            # The median excludes the first step, which includes allocation and compilation.
            "median": {name: median(row.get(name, 0.0) for row in rows) for name in times},
            "optimizer_bytes": self.optimizer.nbytes(),
            "peak_memory_bytes": rows[-1].get("peak_memory_bytes"),
            "metrics_file": str(self._files.metrics.path),
            "checkpoint": str(final),
            "delta_log_dir": None if self._files.delta_log_dir is None else str(self._files.delta_log_dir),
        }


def seed_everything(seed: int, step: int, rank: int = 0) -> None:
    """Seed Python, numpy and torch from the run's seed, the step and the rank alone."""
    # Odd multipliers separate (seed, step, rank) triples; they differ from those of the example order.
    value = (seed * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB + rank * 0xD6E8FEB86659FD93) % 2**63
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
