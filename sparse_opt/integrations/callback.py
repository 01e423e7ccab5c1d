"""What happens around a trainer's steps: old gradients dropped, weights logged on a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from transformers import TrainerCallback

from ..delta.files import list_steps
from ..delta.log import DeltaLog
from ..delta.schedule import Schedule
from ..errors import DeltaLogError
from ..masks.mask_set import MaskSet

if TYPE_CHECKING:
    pass


class DeltaLogCallback(TrainerCallback):
    """Keeps a `DeltaLog` of any transformers Trainer's or TRL trainer's run, in one line:

        trainer.add_callback(DeltaLogCallback("delta_logs"))

    Step 0 is the model as training begins. Steps are optimizer steps. Writing goes on behind the training; it ends, and
    a step that could not be written is raised, with the training. A resumed run appends to the log that is there; steps
    that the log has already, because the run had gone on after the checkpoint, must come out with the bits it says.
    Of several processes the first one logs, which has to have the whole model: sharded ones are refused.

    Args:
        directory: of the log; a new run wants one without a log.
        steps: which steps are logged (`Schedule`); `last` is the run's last one, wherever it is stopped.
        level, against, keyframe_every, mask, on_error: as `DeltaLog.create` takes them.
        metadata: strings to keep with the log, beside the model's name.

    Raises:
        ConfigError: `steps` is no schedule.
        DeltaLogError: a new run finds a log, or a resumed one none; a logged step comes out otherwise; the model cannot
            be logged; a step could not be written.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        steps: str = "every:1,last",
        *,
        level: str = "packed",
        against: Literal["previous", "base"] = "previous",
        keyframe_every: int | None = None,
        mask: MaskSet | None = None,
        metadata: Mapping[str, str] | None = None,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        self._directory = Path(directory)
        self._schedule = Schedule.parse(steps)
        self._options: dict[str, Any] = {
            "level": level,
            "against": against,
            "keyframe_every": keyframe_every,
            "mask": mask,
            "on_error": on_error,
        }
        self._metadata = dict(metadata or {})
        self._log: DeltaLog | None = None
        self._logged: frozenset[int] = frozenset()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        if not state.is_world_process_zero:
            return
        resumed = state.global_step > 0 and self._directory.is_dir() and bool(list_steps(self._directory)[0])
        with self._base_weights():
            if resumed:
                self._log = DeltaLog.open(self._directory, model, on_error=self._options["on_error"])
                self._check_base(model)
            else:
                self._require_base(state.global_step)
                name = getattr(getattr(model, "config", None), "name_or_path", "")
                metadata = ({"model": name} if name else {}) | self._metadata
                self._log = DeltaLog.create(self._directory, model, metadata=metadata, **self._options)
        self._logged = frozenset(self._log.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step, log = state.global_step, self._log
        if log is None or not self._schedule.due(step, None if step < state.max_steps else step):
            return
        if step > log.last_step:
            log.append(step, model)
        elif step in self._logged:
            self._require_same(step, model, "the weights that the resumed run has there")

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """A run that another callback has stopped: its last weights, before the best ones are loaded."""
        log = self._log
        if log is not None and self._schedule.last and control.should_training_stop:
            if state.global_step > log.last_step:
                log.append(state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is being written, and let go of the log, for others to append to."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _base_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that the run started from, where that can be had."""
        return nullcontext()

    def _require_base(self, step: int) -> None:
        if step > 0:
            raise DeltaLogError(
                f"{self._directory}: holds no delta log, and the run goes on after step {step}: "
                "name the folder of its log, or begin a new run"
            )

    def _check_base(self, model: nn.Module) -> None:
        """Raise unless the model, at its base weights, is what the log began with."""

    def _require_same(self, step: int, model: nn.Module, what: str) -> None:
        log = self._log
        assert log is not None
        found = log.step_of(model)
        if found is None or log.digest(found) != log.digest(step):
            raise DeltaLogError(
                f"{log.directory}: step {step} is not {what}: choose another delta_log_dir, which begins with W0 too"
            )
