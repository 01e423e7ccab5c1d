"""`TrainingRun`, the part that all loops share: setup, batches, logging, evaluation, saving and resuming.

A loop uses it as follows:

    with TrainingRun(config, "dpo", "preference") as run:
        reference = run.reference()
        for step in run.steps(evaluate):
            examples = run.examples_of(step)
            for rows, is_last in run.training_passes(len(examples)):
                ...  # run.collate(examples[rows]), forward
                run.backward(loss, is_last)
            run.update()
            run.log(step, n_tokens, loss=loss)
        return run.finish()

The only state carried between steps is the weights, the optimizer, the schedule and the objects passed to `keep`: the
batch and the random numbers of a step depend on the seed and the step number alone. On a CPU, a run resumed from a
checkpoint is therefore bit-identical to an uninterrupted one.

With several processes (`ranks`) each one has the whole data and all weights, and takes its share of the rows of a
step. Losses are divided by counts over all ranks, and metrics passed to `log` are those of all ranks; rank 0 writes.
"""

from __future__ import annotations

import json
import logging
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_opt import backends
from sparse_opt.delta.schedule import Schedule
from sparse_opt.errors import ConfigError, SparseOptError

from ..data.encoding import TokenBatch, TokenSequence, collate, require_known_tokens
from ..data.loaders import DataKind, LoadData, data_loader
from ..data.order import ShuffledOrder
from ..options import TrainingOptions, model_slug
from ..policy.models import compile_layers, load_policy, load_tokenizer, resolve_device
from ..policy.optimizers import adapt, make_optimizer, make_scheduler
from ..policy.reference import Reference, make_reference
from ..policy.sharding import shard
from ..policy.whole_model import Outline
from ..ranks import Ranks
from .averaging import GradientAveraging
from .checkpoints import Checkpoints, Stateful
from .delta_log import LoggedState, RunDeltaLog
from .lock import RunLock, require_unlocked
from .outputs import (
    ADAPTER_FOLDER,
    CHECKPOINT_FOLDER,
    EVALUATIONS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    RowFile,
    begin_outputs,
    check_new_folder,
    discard_outputs,
    save_checkpoint,
    write_text,
)
from .progress import Progress
from .resume import check_resumable, is_begun, require_metrics
from .timing import StepTimer
from .trackers import Tracker, make_trackers, require_trackers
from .whole_state import WholeState

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
        self.ranks = Ranks.of(config.parallel)
        if self.ranks.size > (rows := config.batch_size * config.gradient_accumulation_steps):
            raise ConfigError(
                f"batch_size x gradient_accumulation_steps is {rows}: the {self.ranks.size} processes share these "
                "examples, expected at least one for each"
            )
        self.output_dir = output_folder(config, algorithm)
        self._delta_log_dir = delta_log_folder(config, algorithm)
        self._lock = RunLock(self.output_dir)
        self._checkpoints = Checkpoints(self.output_dir, config.save_total_limit)
        self._resuming, self._steps_found, self._first_step = self.ranks.on_main(self._check_folders)
        require_trackers(config)
        torch.manual_seed(config.seed)
        self.device = resolve_device(config.device)
        # Raises if a backend cannot run, before any file is written. The delta log always takes the default backend.
        backends.functions(self.device, None if config.backend == "auto" else config.backend)
        if self._delta_log_dir is not None:
            backends.functions(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tokenizer = load_tokenizer(config)
        self.pad_id: int = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        self._load_data(data_loader(data, config) if isinstance(data, str) else data)
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
        self._averaging = GradientAveraging(self.ranks, self.model, self.optimizer)
        self._scheduler = make_scheduler(config, self.optimizer)
        self._order = ShuffledOrder(len(self.data), config.seed)
        self._timer = StepTimer(self.device)
        self._kept: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self._scheduler}
        self._trackers: list[Tracker] = []
        self._metrics = RowFile(self.output_dir / METRICS_FILE)
        self._row_files: list[RowFile] = []
        self._delta_log: RunDeltaLog | None = None  # on rank 0
        self._delta_log_steps = Schedule.parse(config.delta_log_steps)

    def _check_folders(self) -> tuple[bool, list[int], int]:
        """Whether the run is resumed, the steps that have a checkpoint, and the first step to make.

        Raises:
            ConfigError, DataError: the run cannot be started or resumed in its folders.
        """
        config = self.config
        require_unlocked(self.output_dir)
        resuming = config.resume and is_begun(self.output_dir)
        if resuming:
            check_resumable(self.output_dir, config)
        elif config.resume_step:
            raise ConfigError(f"option 'resume_step' is {config.resume_step}: there is no run in {self.output_dir}")
        else:
            check_new_folder(self.output_dir, "output_dir")
            if self._delta_log_dir is not None:
                check_new_folder(self._delta_log_dir, "delta_log_dir")
        last = self._checkpoints.choose(config.resume_step) if resuming else 0
        require_metrics(self.output_dir, last)
        return resuming, self._checkpoints.steps(), last + 1

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
        dropped = self.data_report.n_examples < self.data_report.n_rows
        logger.log(logging.WARNING if dropped else logging.INFO, "%s: %s", config.dataset, self.data_report)

    def __enter__(self) -> TrainingRun:
        self.ranks.barrier()  # a rank that fails before this leaves the folders as they were
        with ExitStack() as stack:
            self.ranks.on_main(partial(self._begin, stack, self._logged_state()))
            self._metrics, self._evaluations, self._samples = map(
                self.row_file, (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE)
            )
            self._exit = stack.pop_all()
        return self

    def _logged_state(self) -> LoggedState:
        """The state to log, on rank 0; without a delta log an empty one. All ranks must call it."""
        return {} if self._delta_log_dir is None else self._whole.logged()

    def _begin(self, stack: ExitStack, logged: LoggedState) -> None:
        # Lock both folders before anything is written to either.
        stack.enter_context(self._lock)
        self._require_unchanged()
        if self._delta_log_dir is not None:
            log = RunDeltaLog(self._delta_log_dir, self.config, resuming=self._resuming)
            self._delta_log = stack.enter_context(log)
        if not self._resuming:
            stack.push(self._discard_unstarted)
        stack.callback(self._close)
        if not self._resuming:
            begin_outputs(self.output_dir, self.config)
        if self._delta_log is not None:
            self._delta_log.begin(logged, self.optimizer, self.algorithm)

    def _require_unchanged(self) -> None:
        """Raise ConfigError if another run has written to the folder since it was checked."""
        if not self._resuming:
            check_new_folder(self.output_dir, "output_dir")
            return
        check_resumable(self.output_dir, self.config)
        if self._checkpoints.steps() != self._steps_found:
            raise ConfigError(f"option 'resume': another run has written to {self.output_dir} meanwhile; resume again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, traceback)

    def _discard_unstarted(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the files of a run that failed before its first logged step, because they would block the next run."""
        # Once the lock is lost, the files may be another run's.
        if kind is None or self._metrics.rows or self._lock.loss() is not None:
            return
        discard_outputs(self.output_dir)
        if self._delta_log is not None:
            self._delta_log.discard()

    def _close(self) -> None:
        for file in self._row_files:
            file.close()
        for tracker in self._trackers:
            tracker.close()

    # Before the first step

    def reference(self, *, offload: bool = False) -> Reference:
        """The reference policy. Call this before `steps`, which loads a checkpoint's weights into the model.

        With `offload`, a second model, if the mode needs one, is kept on the CPU while it is not in use.
        """
        return make_reference(
            self.config, self.model, self.optimizer, self.device, offload=offload, sharded=self.ranks.sharded
        )

    def row_file(self, name: str) -> RowFile:
        """A file of JSON rows with a `step` each, in the output folder, which rank 0 writes. Call this before `steps`.

        Rows can be written from `steps` on, which drops those of repeated steps from the file of a resumed run.
        """
        path, last = self.output_dir / name, self._first_step - 1
        # Without a checkpoint, the evaluation before the first step (step 0) is repeated as well.
        if self._resuming and self.ranks.is_main:
            file = RowFile.resumed(path, last or -1, self._lock)
        else:
            file = RowFile(path, self._lock, discards=not self.ranks.is_main)
        self._row_files.append(file)
        return file

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
        self._go_on()
        if self.eval_data is None:
            evaluate = None
        if evaluate is not None and self._first_step == 1:
            self._evaluate(0, evaluate)
        title, hidden = f"{self.algorithm} {config.mode}", not self.ranks.is_main
        with Progress(title, config.n_steps, self._first_step - 1, hidden=hidden) as self._progress:
            for step in range(self._first_step, config.n_steps + 1):
                seed_everything(config.seed, step, self.ranks.rank)
                self._step_started = time.perf_counter()
                yield step
                last = step == config.n_steps
                if evaluate is not None and (last or step % config.eval_steps == 0):
                    self._evaluate(step, evaluate)
                if config.save_steps is not None and step % config.save_steps == 0 and not last:
                    model, states = self._whole.model(), self._whole.states(self._kept)
                    self.ranks.on_main(partial(self._save, step, model, states))
                    del model, states

    def _save(self, step: int, model: Any, states: Mapping[str, dict[str, Any]]) -> None:
        for file in self._row_files:
            file.sync()
        require_held = partial(self._lock.require_held, self._checkpoints.path(step), step)
        self._checkpoints.save(step, model, self.tokenizer, states, require_held)

    def _go_on(self) -> None:
        """Restore the checkpoint, and only then remove what earlier processes wrote after its step.

        Whatever fails or is killed before that removal leaves all later checkpoints usable.
        """
        last = self._first_step - 1
        if last:
            self._checkpoints.restore(last, self.model, self._kept)
        self.ranks.on_main(partial(self._go_on_writing, last, self._logged_state()))

    def _go_on_writing(self, last: int, logged: LoggedState) -> None:
        if self._delta_log is not None:
            self._delta_log.require_step(last, logged)
        self._lock.require_held(self.output_dir, last)
        # TensorBoard hides the events of repeated steps from here on.
        self._trackers = make_trackers(self.config, self.algorithm, self.output_dir, self._first_step)
        # Checkpoints come first: as long as one is there, its rows and its logged steps must be there too.
        self._checkpoints.set_aside_after(last)
        for file in self._row_files:
            file.cut()
        if self._delta_log is not None:
            self._delta_log.truncate(last)
        self._checkpoints.remove_leftovers()

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
        self._averaging.backward(loss, is_last)

    def collate(self, examples: Sequence[Sequence[TokenSequence]]) -> TokenBatch:
        """One batch of examples on the device: the first sequence of each (the chosen one), then the second of each."""
        sequences = [sequence for column in zip(*examples, strict=True) for sequence in column]
        return collate(sequences, self.pad_id).to(self.device)

    def time(self, section: str) -> AbstractContextManager[None]:
        """`with run.time("optimizer"):` adds the block's time to the step's `optimizer_time_s`."""
        return self._timer.section(section)

    def update(self) -> None:
        """Make an optimizer step with the current gradients, then free them; timed as `optimizer`."""
        with self.time("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def samples_due(self, step: int) -> bool:
        """Whether `log_samples` writes at this step."""
        every = self.config.sample_steps
        return every is not None and (step == 1 or step % every == 0 or step == self.config.n_steps)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the first few of these completions (text, reward, ...) to samples.jsonl if `samples_due(step)`."""
        if self.samples_due(step):
            for sample in samples[:_SAMPLES]:
                self._samples.write({"step": step, **sample})

    def log(self, step: int, n_tokens: int, **metrics: Tensor | float | None) -> None:
        """End the step: advance the learning rate, write and show the metrics, and log the weights if they are due.

        Args:
            n_tokens: tokens in the step's batches, without padding.
            metrics: scalars, including `loss`; None for a metric that the step does not have. Tensors are copied to the
                CPU together, in the only synchronisation of the step.

        Raises:
            SparseOptError: a metric is not finite.
        """
        if self.optimizer.grad_norm is not None:
            metrics["grad_norm"] = self.optimizer.grad_norm
        values = _read(metrics)
        step_time = time.perf_counter() - self._step_started
        of_ranks = self.ranks.gather(memory_statistics(self.device))
        for name, value in values.items():
            if value is not None and not math.isfinite(value):
                raise SparseOptError(f"step {step}: {name} is {value}; lower --learning_rate, or train in fp32")
        row: dict[str, Any] = {"step": step, **values}
        row["learning_rate"] = self._scheduler.get_last_lr()[0]
        row["epoch"] = step * self.config.examples_per_step / len(self.data)
        row["n_tokens"] = n_tokens
        row["tokens_per_s"] = n_tokens / step_time
        row["step_time_s"] = step_time
        row.update({f"{section}_time_s": seconds for section, seconds in self._timer.read().items()})
        if self.device.type == "cuda":
            row["peak_memory_bytes"] = max(found["peak_memory_bytes"] for found in of_ranks)
        if self.ranks.size > 1:
            row.update({f"rank{r}/{name}": n for r, found in enumerate(of_ranks) for name, n in found.items()})
        self._scheduler.step()
        self._metrics.write(row)
        for tracker in self._trackers:
            tracker.log(step, {name: value for name, value in row.items() if name != "step"})
        if self._delta_log_dir is not None and self._delta_log_steps.due(step, self.config.n_steps):
            logged = self._logged_state()
            if self._delta_log is not None:
                self._delta_log.log(step, logged)
        names = ("loss", "reward", "accuracy", "tokens_per_s")
        self._progress.advance(step, {name: f"{row[name]:.4g}" for name in names if row.get(name) is not None})

    def _evaluate(self, step: int, evaluate: Evaluate) -> None:
        seed_everything(self.config.seed, 0, self.ranks.rank)  # every evaluation samples with the same random numbers
        began = time.perf_counter()
        with torch.no_grad():
            values = {f"eval_{name}": value for name, value in _read(evaluate()).items()}
        for name, value in values.items():
            if value is not None and not math.isfinite(value):
                raise SparseOptError(f"step {step}: {name} is {value}")
        self._timer.read()  # discard the timings of the evaluation
        self._evaluations.write({"step": step, **values, "eval_time_s": time.perf_counter() - began})
        for tracker in self._trackers:
            tracker.log(step, values)

    # At the end

    def finish(self, write_extra: Callable[[Path], object] | None = None) -> dict[str, Any]:
        """Save the final model in Hugging Face format and return the run's summary.

        In mode lora the adapters are saved as well, and then merged into the weights.

        Args:
            write_extra: writes further files of the final model into the folder passed to it, before that folder gets
                its final name.
        """
        return self.ranks.on_main(partial(self._finish, self._whole.model(), write_extra))

    def _finish(self, model: Any, write_extra: Callable[[Path], object] | None) -> dict[str, Any]:
        checkpoint = self.output_dir / CHECKPOINT_FOLDER
        require_held, last = self._lock.require_held, self.config.n_steps
        if self.config.mode == "lora":
            adapter = self.output_dir / ADAPTER_FOLDER
            save_checkpoint(model, self.tokenizer, adapter, before_publishing=partial(require_held, adapter, last))
            model = model.merge_and_unload()
        save_checkpoint(
            model, self.tokenizer, checkpoint, write_extra, before_publishing=partial(require_held, checkpoint, last)
        )
        rows = self._metrics.rows
        times = [name for name in rows[0] if name.endswith("_time_s")]
        evaluations = self._evaluations.rows
        summary = {
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
            "metrics_file": str(self._metrics.path),
            "checkpoint": str(checkpoint),
            "delta_log_dir": None if self._delta_log is None else str(self._delta_log.directory),
        }
        # This file marks the run as finished.
        file = self.output_dir / SUMMARY_FILE
        write_text(file, json.dumps(summary, indent=2) + "\n", partial(require_held, file, last))
        return summary


def memory_statistics(device: torch.device) -> dict[str, int]:
    """The process's peak memory: on a GPU, allocated and reserved by torch; and of the host (resident)."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    host = {"peak_host_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type != "cuda":
        return host
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_memory_bytes": torch.cuda.memory_reserved(device),
        **host,
    }


def output_folder(config: TrainingOptions, algorithm: str) -> Path:
    """`output_dir`, or checkpoints_{model}_{algorithm}; under `mount_dir` unless it is absolute."""
    return config.mounted(config.output_dir or Path(f"checkpoints_{model_slug(config.policy_name)}_{algorithm}"))


def delta_log_folder(config: TrainingOptions, algorithm: str) -> Path | None:
    """`delta_log_dir`, where `auto` is delta_logs_{model}, with _{algorithm} except for dpo; under `mount_dir`."""
    if config.delta_log_dir is None:
        return None
    suffix = "" if algorithm == "dpo" else f"_{algorithm}"
    default = Path(f"delta_logs_{model_slug(config.policy_name)}{suffix}")
    return config.mounted(default if config.delta_log_dir == Path("auto") else config.delta_log_dir)


def seed_everything(seed: int, step: int, rank: int = 0) -> None:
    """Seed Python, numpy and torch from the run's seed, the step and the rank alone."""
    # Odd multipliers separate (seed, step, rank) triples; they differ from those of the example order.
    value = (seed * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB + rank * 0xD6E8FEB86659FD93) % 2**63
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def _read(metrics: Mapping[str, Tensor | float | None]) -> dict[str, float | None]:
    """All metrics as numbers; the tensors of a device are read in one copy."""
    tensors: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            tensors.setdefault(value.device, {})[name] = value.detach().float().reshape(())
    read: dict[str, float] = {}
    for of_device in tensors.values():
        read.update(zip(of_device, torch.stack(list(of_device.values())).tolist(), strict=True))
    return {name: read[name] if isinstance(value, Tensor) else value for name, value in metrics.items()}
