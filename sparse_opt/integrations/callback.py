"""What happens around a trainer's steps: old gradients dropped, weights logged on a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..delta_files import list_steps
from ..delta_log import DeltaLog
from ..errors import DeltaLogError

if TYPE_CHECKING:
    from .trainer import SparseTrainer


class SparseCallback(TrainerCallback):
    """Drops the gradients of a training loop that was left early, and keeps the delta log of `SparseArguments`.

    The log's step 0 is W0, whether the run begins or is resumed. A resumed run appends to the log that is there. Steps
    that the log has already, because the run had gone on after the checkpoint, must come out with the bits it says.

    Raises:
        DeltaLogError: a new run finds a log; the log began at other weights; a logged step comes out otherwise.
    """

    def __init__(self, trainer: SparseTrainer) -> None:
        self._trainer = trainer
        self._log: DeltaLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, options = self._trainer, self._trainer.sparse_arguments
        assert trainer.sparse_optimizer is not None
        trainer.sparse_optimizer.zero_grad()  # the Trainer clears the model's `.grad`, where compact ones are not
        self.close()
        if state.global_step > 0:
            trainer._resume(state, kwargs["train_dataloader"])
        if options.delta_log_dir is None or not state.is_world_process_zero:
            return
        directory = Path(options.delta_log_dir)
        resumed = state.global_step > 0 and directory.is_dir() and bool(list_steps(directory)[0])
        with trainer.base_weights():
            if resumed:
                self._log = DeltaLog.open(directory, trainer.model)
                self._require_same(0, "the weights that this run started from")
            else:
                self._log = DeltaLog.create(
                    directory,
                    trainer.model,
                    keyframe_every=options.delta_log_keyframe_every,
                    metadata=_metadata(trainer),
                )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, log = state.global_step, self._log
        due = step % self._trainer.sparse_arguments.delta_log_every == 0 or step >= state.max_steps
        if log is None or not due:
            return
        if step > log.steps[-1]:
            log.append(step)
        elif step in log.steps:
            self._require_same(step, "the weights that the resumed run has there")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run that another callback has stopped: its last weights, before the best ones are loaded."""
        if self._log is not None and control.should_training_stop and state.global_step > self._log.steps[-1]:
            self._log.append(state.global_step)

    def _require_same(self, step: int, what: str) -> None:
        log = self._log
        assert log is not None
        found = log.step_of(self._trainer.model)
        if found is None or log.digest(found) != log.digest(step):
            raise DeltaLogError(
                f"{log.directory}: step {step} is not {what}: choose another delta_log_dir, which begins with W0 too"
            )

    def close(self) -> None:
        """Let go of the delta log, for others to append to."""
        if self._log is not None:
            self._log.close()
            self._log = None


def _metadata(trainer: SparseTrainer) -> dict[str, str]:
    name = getattr(getattr(trainer.model, "config", None), "name_or_path", "")
    return {"method": type(trainer).__name__} | ({"model": name} if name else {})
