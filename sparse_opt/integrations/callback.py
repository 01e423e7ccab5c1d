"""`DeltaLogCallback`: write a delta log of a transformers Trainer's weights on a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback

from ..delta.files import list_steps
from ..delta.log import DeltaLog
from ..delta.schedule import Schedule
from ..errors import DeltaLogError
from ..masks.mask_set import MaskSet


class DeltaLogCallback(TrainerCallback):
    """Writes a `DeltaLog` of a run of any transformers or TRL trainer, in one line:

        trainer.add_callback(DeltaLogCallback("delta_logs"))

    Step 0 is the model at the start of training. Steps are optimizer steps. Writing runs in the background and is
    finished at the end of training, where an error of a write is raised. A resumed run appends to the existing log. If
    the log already has a step, because the first run continued after the checkpoint, the resumed run must reproduce its
    bits. With several processes, process 0 writes the log and must hold the whole model; sharded models are refused.

    Args:
        directory: folder of the log; must not hold a log when a new run starts.
        steps: which steps are logged (`Schedule`); `last` is the last step of the run, also if it is stopped early.
        level, against, keyframe_every, mask, on_error: see `DeltaLog.create`.
        metadata: strings to store in the log, in addition to the model's name.

    Raises:
        ConfigError: `steps` is not a valid schedule.
        DeltaLogError: the folder of a new run holds a log, or that of a resumed run does not; a repeated step differs
            from the log; the model cannot be logged; a step could not be written.
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
            self._require_same(step, model, "the weights of the resumed run at that step")

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """If another callback has stopped the run, log its last weights before the Trainer loads the best ones."""
        log = self._log
        if log is not None and self._schedule.last and control.should_training_stop:
            if state.global_step > log.last_step:
                log.append(state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending writes and close the log, so that others can append to it."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _base_weights(self) -> AbstractContextManager[None]:
        """A context in which the model holds the weights at the start of the run, if they are available."""
        return nullcontext()

    def _require_base(self, step: int) -> None:
        if step > 0:
            raise DeltaLogError(
                f"{self._directory}: holds no delta log, but the run resumes after step {step}: "
                "choose the folder of its log, or start a new run"
            )

    def _check_base(self, model: nn.Module) -> None:
        """Raise unless the model, at its base weights, equals step 0 of the log."""

    def _require_same(self, step: int, model: nn.Module, what: str) -> None:
        log = self._log
        assert log is not None
        found = log.step_of(model)
        if found is None or log.digest(found) != log.digest(step):
            raise DeltaLogError(
                f"{log.directory}: step {step} differs from {what}: choose another delta_log_dir; its log starts with "
                "W0, too"
            )
