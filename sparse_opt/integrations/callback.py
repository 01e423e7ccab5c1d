"""`DeltaLogCallback`: write a delta log of a transformers Trainer's weights on a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from ..delta.files import list_steps
from ..delta.log import DeltaLog
from ..delta.schedule import Schedule
from ..errors import DeltaLogError
from ..masks.mask_set import MaskSet

Weights = nn.Module | Mapping[str, Tensor]


class DeltaLogCallback(TrainerCallback):
    """Writes a `DeltaLog` of a run of any transformers or TRL trainer, in one line:

        trainer.add_callback(DeltaLogCallback("delta_logs"))

    Step 0 is the model at the start of training. Steps are optimizer steps. Writing runs in the background and is
    finished at the end of training, where an error of a write is raised. A resumed run appends to the existing log. If
    the log already has a step, because the first run continued after the checkpoint, the resumed run must reproduce its
    bits. With several processes, process 0 writes the log, and its errors are raised in all of them. It must hold the
    whole model, or the model is sharded by FSDP2 and gathered there; other sharded models are refused.

    Args:
        directory: folder of the log; must not hold a log when a new run starts.
        steps: which steps are logged (`Schedule`); `last` is the last step of the run, also if it is stopped early.
        keyframe_every, mask: see `DeltaLog.create`.
        metadata: strings to store in the log, in addition to the model's name.
        trainer: a sparse trainer whose base weights are step 0, in resumed runs too; it passes itself if
            `SparseArguments` has a `delta_log_dir`.

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
        keyframe_every: int | None = None,
        mask: MaskSet | None = None,
        metadata: Mapping[str, str] | None = None,
        trainer: Any = None,
    ) -> None:
        self._directory = Path(directory)
        self._schedule = Schedule.parse(steps)
        self._options: dict[str, Any] = {"keyframe_every": keyframe_every, "mask": mask}
        self._metadata = dict(metadata or {})
        self._trainer = trainer
        self._running = False
        self._log: DeltaLog | None = None  # on process 0, while the run lasts
        self._logged: frozenset[int] = frozenset()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        self._running = True
        model = self._trained(model)
        with nullcontext() if self._trainer is None else self._trainer.base_weights():
            weights = _gathered(model)
            name = getattr(getattr(model, "config", None), "name_or_path", "")
            on_process_0(lambda: self._begin(weights, name, state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step = state.global_step
        if self._running and self._schedule.due(step, None if step < state.max_steps else step):
            self._write(step, model)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish pending writes: a run that resumes from the checkpoint does not log the steps before it again."""
        on_process_0(lambda: None if self._log is None else self._log.flush())

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """If another callback has stopped the run, log its last weights before the Trainer loads the best ones."""
        if self._running and self._schedule.last and control.should_training_stop:
            self._write(state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._running:
            on_process_0(self.close)
        self._running = False

    def close(self) -> None:
        """Finish pending writes and close the log, so that others can append to it."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _write(self, step: int, model: nn.Module) -> None:
        weights = _gathered(self._trained(model))
        on_process_0(lambda: self._append(step, weights))

    def _trained(self, model: Any) -> Any:
        """The model to log. With `model_init` the Trainer passes the one that it was built with to its callbacks."""
        return model if self._trainer is None else self._trainer.model

    # On process 0

    def _begin(self, weights: Weights, name: str, step: int) -> None:
        if step > 0 and self._directory.is_dir() and list_steps(self._directory)[0]:
            self._log = DeltaLog.open(self._directory)
            if self._trainer is not None:
                self._require_same(0, weights, "the weights that this run started from")
        else:
            if step > 0 and self._trainer is None:
                raise DeltaLogError(
                    f"{self._directory}: holds no delta log, but the run resumes after step {step}: "
                    "choose the folder of its log, or start a new run"
                )
            metadata = ({"model": name} if name else {}) | self._metadata
            self._log = DeltaLog.create(self._directory, weights, metadata=metadata, **self._options)
        self._logged = frozenset(self._log.steps)

    def _append(self, step: int, weights: Weights) -> None:
        log = self._log
        assert log is not None
        if step > log.last_step:
            log.append(step, weights)
        elif step in self._logged:
            self._require_same(step, weights, "the weights of the resumed run at that step")

    def _require_same(self, step: int, weights: Weights, what: str) -> None:
        log = self._log
        assert log is not None
        found = log.step_of(weights)
        if found is None or log.digest(found) != log.digest(step):
            raise DeltaLogError(
                f"{log.directory}: step {step} differs from {what}: choose another delta_log_dir; its log starts with "
                "W0, too"
            )


# `sparse_opt.distributed` is imported only in a process group: some builds of torch have no torch.distributed.


def _gathered(model: nn.Module) -> Weights:
    """The model, or if FSDP2 has sharded it the whole tensors on process 0; all processes must call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return model
    from ..distributed.rank_0 import full_state

    return full_state(model)


def on_process_0(function: Callable[[], object], error_type: type[Exception] = DeltaLogError) -> None:
    """Call `function` on process 0; all processes must call this. All raise its error, the others as `error_type`."""
    if not (dist.is_available() and dist.is_initialized()):
        function()
        return
    from ..distributed.rank_0 import on_rank_0

    on_rank_0(function, error_type)
