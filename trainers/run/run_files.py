"""`RunFiles`: what a run writes to its folders, from the first check to the final model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from sparse_opt.delta.schedule import Schedule
from sparse_opt.errors import ConfigError

from ..options import TrainingOptions, model_slug
from ..ranks import Ranks, sigterm_deferred
from .delta_log import RunDeltaLog
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
from .reporting.trackers import Tracker, make_trackers
from .resuming.checkpoints import Checkpoints, Stateful
from .resuming.resume import check_resumable, is_begun, require_metrics
from .resuming.whole_state import WholeState


class RunFiles:
    """The lock, rows, checkpoints, delta log, trackers and final model of a run, all written by rank 0.

    Every rank constructs it and calls its methods, which raise the errors of rank 0 on all ranks. Constructing it
    checks the folders and changes nothing; files are written inside the context, between `begin` and its exit.

    Attributes:
        output_dir, final_dir, delta_log_dir: folders of the run, of its final model, and of its delta log or None.
        first_step: the first step to make: 1, or the one after the checkpoint from which the run is resumed.
        metrics, evaluations, samples: files of rows, from `begin` on.

    Raises:
        ConfigError, DataError: the run cannot be started or resumed in its folders.
    """

    def __init__(self, config: TrainingOptions, algorithm: str, ranks: Ranks):
        self._config, self._algorithm, self._ranks = config, algorithm, ranks
        self.output_dir = output_folder(config, algorithm)
        self._further = config.further_folders()
        self.final_dir = self._further.get("save_dir", self.output_dir / CHECKPOINT_FOLDER)
        self.delta_log_dir = delta_log_folder(config, algorithm)
        self._lock = RunLock(self.output_dir)
        self._checkpoints = Checkpoints(self.output_dir, config.save_total_limit)
        self._resuming, self._steps_found, self.first_step = ranks.on_main(self._check_folders)
        self._trackers: list[Tracker] = []
        self.metrics = RowFile(self.output_dir / METRICS_FILE)
        self._row_files: list[RowFile] = []
        self._delta_log: RunDeltaLog | None = None  # on rank 0
        self._delta_log_steps = Schedule.parse(config.delta_log_steps)

    def _check_folders(self) -> tuple[bool, list[int], int]:
        """Whether the run is resumed, the steps that have a checkpoint, and the first step to make."""
        config = self._config
        require_unlocked(self.output_dir)
        resuming = config.resume and is_begun(self.output_dir)
        if resuming:
            check_resumable(self.output_dir, config)
        elif config.resume_step:
            raise ConfigError(f"option 'resume_step' is {config.resume_step}: there is no run in {self.output_dir}")
        else:
            self._check_new_folders()
            if self.delta_log_dir is not None:
                check_new_folder(self.delta_log_dir, "delta_log_dir")
        last = self._checkpoints.choose(config.resume_step) if resuming else 0
        require_metrics(self.output_dir, last)
        return resuming, self._checkpoints.steps(), last + 1

    def _check_new_folders(self) -> None:
        for option, folder in {"output_dir": self.output_dir, **self._further}.items():
            check_new_folder(folder, option)

    # Begin and end

    def begin(self, state: WholeState, optimizer: Any) -> None:
        """Lock the folders and write the first files. `__exit__` closes them.

        If the run fails before its first logged step, its files are removed.
        """
        logged = {} if self.delta_log_dir is None else state.logged()
        self._ranks.barrier()  # a rank that fails before this leaves the folders as they were
        with ExitStack() as stack:
            self._ranks.on_main(partial(self._begin, stack, logged, optimizer))
            self.metrics, self.evaluations, self.samples = map(
                self.row_file, (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE)
            )
            self._exit = stack.pop_all()

    def _begin(self, stack: ExitStack, logged: Any, optimizer: Any) -> None:
        # Lock both folders before anything is written to either.
        stack.enter_context(self._lock)
        self._require_unchanged()
        if self.delta_log_dir is not None:
            log = RunDeltaLog(self.delta_log_dir, self._config, resuming=self._resuming)
            self._delta_log = stack.enter_context(log)
        if not self._resuming:
            stack.push(self._discard_unstarted)
        stack.callback(self._close)
        if not self._resuming:
            begin_outputs(self.output_dir, self._config)
        if self._delta_log is not None:
            self._delta_log.begin(logged, optimizer, self._algorithm)

    def _require_unchanged(self) -> None:
        """Raise ConfigError if another run has written to the folder since it was checked."""
        if not self._resuming:
            self._check_new_folders()
            return
        check_resumable(self.output_dir, self._config)
        if self._checkpoints.steps() != self._steps_found:
            raise ConfigError(f"option 'resume': another run has written to {self.output_dir} meanwhile; resume again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, traceback)

    def _discard_unstarted(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the files of a run that failed before its first logged step, because they would block the next run."""
        # Once the lock is lost, the files may be another run's.
        if kind is None or self.metrics.rows or self._lock.loss() is not None:
            return
        with sigterm_deferred():  # torchrun sends it to a rank that is here because another one failed
            discard_outputs(self.output_dir)
            for folder in self._further.values():
                shutil.rmtree(folder, ignore_errors=True)
            if self._delta_log is not None:
                self._delta_log.discard()

    def _close(self) -> None:
        for file in self._row_files:
            file.close()
        for tracker in self._trackers:
            tracker.close()

    def row_file(self, name: str) -> RowFile:
        """A file of JSON rows with a `step` each, in the output folder. Call this before `resume`.

        Rows can be written from `resume` on, which drops those of repeated steps from the file of a resumed run.
        """
        path, last = self.output_dir / name, self.first_step - 1
        # Without a checkpoint, the evaluation before the first step (step 0) is repeated as well.
        if self._resuming and self._ranks.is_main:
            file = RowFile.resumed(path, last or -1, self._lock)
        else:
            file = RowFile(path, self._lock, discards=not self._ranks.is_main)
        self._row_files.append(file)
        return file

    def resume(self, state: WholeState, kept: Mapping[str, Stateful]) -> None:
        """Restore the checkpoint, and only then remove what earlier processes wrote after its step.

        Whatever fails or is killed before that removal leaves all later checkpoints usable.
        """
        last = self.first_step - 1
        if last:
            self._checkpoints.restore(last, state.live_model, kept)
        logged = {} if self.delta_log_dir is None else state.logged()
        self._ranks.on_main(partial(self._go_on_writing, last, logged))

    def _go_on_writing(self, last: int, logged: Any) -> None:
        if self._delta_log is not None:
            self._delta_log.require_step(last, logged)
        self._lock.require_held(self.output_dir, last)
        # TensorBoard hides the events of repeated steps from here on.
        self._trackers = make_trackers(self._config, self._algorithm, self.output_dir, self.first_step)
        if self._resuming:  # the process was killed after it saved the final model and before the summary
            for folder in (self.final_dir, self.output_dir / ADAPTER_FOLDER):
                shutil.rmtree(folder, ignore_errors=True)
        # Checkpoints come first: as long as one is there, its rows and its logged steps must be there too.
        self._checkpoints.set_aside_after(last)
        for file in self._row_files:
            file.cut()
        if self._delta_log is not None:
            self._delta_log.truncate(last)
        self._checkpoints.remove_leftovers()

    # Within a step

    def write_metrics(self, row: Mapping[str, Any], state: WholeState) -> None:
        """Write the row of a step, report it to the trackers, and log the weights if they are due."""
        self.metrics.write(dict(row))
        step, every = int(row["step"]), self._config.logging_steps
        if self._trackers and (step % every == 0 or step == self._config.n_steps):
            self.track(step, averages(self.metrics.rows[-((step - 1) % every + 1) :]))
        if self.delta_log_dir is not None and self._delta_log_steps.due(row["step"], self._config.n_steps):
            logged = state.logged()
            if self._delta_log is not None:
                self._delta_log.log(row["step"], logged)

    def track(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report metrics to the trackers."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def save(self, step: int, tokenizer: Any, state: WholeState, kept: Mapping[str, Stateful]) -> None:
        """Write a checkpoint. One of step 0 is there already if the run was resumed at its beginning."""
        if step == 0 and 0 in self._steps_found:
            return
        self._ranks.on_main(partial(self._save, step, tokenizer, state.model(), state.states(kept)))

    def _save(self, step: int, tokenizer: Any, model: nn.Module, states: Mapping[str, dict[str, Any]]) -> None:
        for file in self._row_files:
            file.sync()
        require_held = partial(self._lock.require_held, self._checkpoints.path(step), step)
        self._checkpoints.save(step, model, tokenizer, states, require_held)

    # At the end

    def finish(
        self,
        tokenizer: Any,
        state: WholeState,
        summarize: Callable[[Path], dict[str, Any]],
        write_extra: Callable[[Path], object] | None,
    ) -> dict[str, Any]:
        """Save the final model and the summary, which marks the run as finished, and return the summary.

        In mode lora the adapters are saved as well, and then merged into the weights.

        Args:
            summarize: returns the summary, of the folder of the final model.
            write_extra: see `TrainingRun.finish`.
        """
        return self._ranks.on_main(partial(self._finish, tokenizer, state.model(), summarize, write_extra))

    def _finish(
        self,
        tokenizer: Any,
        model: Any,
        summarize: Callable[[Path], dict[str, Any]],
        write_extra: Callable[[Path], object] | None,
    ) -> dict[str, Any]:
        folder = self.final_dir
        require_held, last = self._lock.require_held, self._config.n_steps
        if self._config.mode == "lora":
            adapter = self.output_dir / ADAPTER_FOLDER
            save_checkpoint(model, tokenizer, adapter, before_publishing=partial(require_held, adapter, last))
            model = model.merge_and_unload()
        save_checkpoint(model, tokenizer, folder, write_extra, before_publishing=partial(require_held, folder, last))
        summary = summarize(folder)
        file = self.output_dir / SUMMARY_FILE
        write_text(file, json.dumps(summary, indent=2) + "\n", partial(require_held, file, last))
        return summary


def averages(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean of each metric over rows of consecutive steps; of peak memory the largest; None if no row has it."""
    columns: dict[str, list[float]] = {name: [] for row in rows for name in row if name != "step"}
    for row in rows:
        for name, found in columns.items():
            if (value := row.get(name)) is not None:
                found.append(value)
    return {
        name: None if not found else max(found) if "peak_" in name else sum(found) / len(found)
        for name, found in columns.items()
    }


def output_folder(config: TrainingOptions, algorithm: str) -> Path:
    """`output_dir`, or checkpoints_{model}_{algorithm}; under `mount_dir` unless it is absolute."""
    return config.mounted(config.output_dir or Path(f"checkpoints_{model_slug(config.policy_name)}_{algorithm}"))


def delta_log_folder(config: TrainingOptions, algorithm: str) -> Path | None:
    """`delta_log_dir`, or for `auto` the folder that its help text gives; under `mount_dir` unless it is absolute."""
    if config.delta_log_dir is None:
        return None
    if config.delta_log_dir != Path("auto"):
        return config.mounted(config.delta_log_dir)
    if config.output_dir is not None:
        return config.mounted(config.output_dir) / "delta_log"
    suffix = "" if algorithm == "dpo" else f"_{algorithm}"
    return config.mounted(Path(f"delta_logs_{model_slug(config.policy_name)}{suffix}"))
