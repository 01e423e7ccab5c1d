"""`RunDeltaLog`: the delta log of a run, created with the initial weights, written on a schedule, and resumed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from sparse_opt.delta.files import MASK_NAME, list_steps
from sparse_opt.delta.lock import WriterLock
from sparse_opt.delta.log import DeltaLog, claim
from sparse_opt.delta.schedule import Schedule
from sparse_opt.errors import DeltaLogError, SparseOptError
from sparse_opt.masks import MaskSet
from sparse_opt.optim import SparseOptimizer
from sparse_opt.tables import format_bytes

from ..options import TrainingOptions

LoggedState = nn.Module | Mapping[str, Tensor]


class RunDeltaLog:
    """Locks the folder when it is constructed, and logs after `begin`. States are those of `WholeState.logged`.

    Raises:
        DeltaLogError: the folder holds a log and the run is not resumed, it cannot be written, or another writer holds
            it.
    """

    def __init__(self, directory: Path, config: TrainingOptions, *, resuming: bool):
        self.directory = directory
        self._config = config
        self._log: DeltaLog | None = DeltaLog.open(directory) if resuming and _holds_log(directory) else None
        self._made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        self._undo = ExitStack()
        self._lock = None if self._log is not None else self._undo.enter_context(claim(directory))

    def __enter__(self) -> RunDeltaLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.__exit__(kind, error, traceback)
        self._undo.close()

    def discard(self) -> None:
        """Remove a log created by this run that holds only the initial weights."""
        if self._log is None or self._lock is None:
            return  # `claim` removes what is not a log
        self._log.close()
        lock = WriterLock.acquire(self.directory)
        try:
            steps, _ = list_steps(self.directory)
            for file in steps.values():
                file.path.unlink()
            (self.directory / MASK_NAME).unlink(missing_ok=True)
            lock.path.unlink()
            for folder in self._made:
                with suppress(OSError):  # the folder holds other files
                    folder.rmdir()
        finally:
            lock.release()

    def begin(self, state: LoggedState, optimizer: Any, algorithm: str) -> None:
        """Log the initial weights as step 0; step 0 of a resumed log must equal them."""
        if self._log is None:
            mask = optimizer.mask if isinstance(optimizer, SparseOptimizer) else None
            self._require_space(state, mask)
            self._log = DeltaLog.create(
                self.directory,
                state,
                level=self._config.delta_log_level,
                mask=mask,
                metadata={"model": self._config.policy_name, "method": algorithm},
                lock=self._lock,
            )
            return
        found = self._log.step_of(state)
        if found is None or self._log.digest(found) != self._log.digest(self._log.steps[0]):
            raise DeltaLogError(f"{self.directory}: does not begin with the weights that this run starts from")

    def _require_space(self, state: LoggedState, mask: MaskSet | None) -> None:
        """Print how large the log can become on stderr; refuse it if the initial weights alone do not fit the disk."""
        weights = {id(w): w for w in (state.parameters() if isinstance(state, nn.Module) else state.values())}.values()
        whole = sum(weight.nbytes for weight in weights)
        share = 1.0 if mask is None else mask.nnz / max(1, sum(weight.numel() for weight in weights))
        n = Schedule.parse(self._config.delta_log_steps).at_most(self._config.n_steps)
        free = shutil.disk_usage(self.directory).free
        if free < whole:
            raise SparseOptError(
                f"{self.directory}: the delta log's initial weights take {format_bytes(whole)}, found "
                f"{format_bytes(free)} free: name another delta_log_dir, or none"
            )
        steps = f"{n} step{'s' * (n != 1)}"
        print(
            f"delta log {self.directory}: {format_bytes(whole)} of initial weights, and the changes at up to {steps}, "
            f"at most about {format_bytes(int(whole * share))} each; {format_bytes(free)} are free. Without a log: "
            "delta_log_dir none",
            file=sys.stderr,
        )

    def require_step(self, step: int, state: LoggedState) -> None:
        """Raise DeltaLogError if the log has other weights for this step."""
        log = self._log
        assert log is not None
        if step in log.steps:
            found = log.step_of(state)
            if found is None or log.digest(found) != log.digest(step):
                raise DeltaLogError(f"{self.directory}: step {step} is not what the checkpoint of that step holds")

    def truncate(self, step: int) -> None:
        """Remove the steps logged after this step, because they are repeated."""
        assert self._log is not None
        if self._log.last_step > step:
            self._log.truncate(step)

    def log(self, step: int, state: LoggedState) -> None:
        """Log the weights of a step."""
        assert self._log is not None
        self._log.append(step, state)


def _holds_log(directory: Path) -> bool:
    return directory.is_dir() and bool(list_steps(directory)[0])
