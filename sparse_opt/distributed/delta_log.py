"""DistributedDeltaLog: a delta log of a model that several ranks train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..delta.log import DeltaLog
from ..delta.state import FullState, require_trained
from ..errors import DeltaLogError

T = TypeVar("T")


class DistributedDeltaLog:
    """A `DeltaLog` that all ranks of the default process group write together.

    Rank 0 writes; the files are those of a `DeltaLog` on one device. The model is the same on every rank, or sharded by
    `fully_shard`: then its tensors are gathered on rank 0, one at a time. All ranks must call each method alike, with
    the options and errors of `DeltaLog`. An error of rank 0 is raised on every rank.

    Attributes:
        log: the `DeltaLog` on rank 0, None on the other ranks.
    """

    def __init__(self, model: nn.Module, log: DeltaLog | None) -> None:
        self.log = log
        self._model = model

    @classmethod
    def create(cls, directory: str | Path, model: nn.Module, **options: Any) -> DistributedDeltaLog:
        """Start a log with the current weights as step 0."""
        state = full_state(model)
        return cls(model, on_rank_0(lambda: DeltaLog.create(directory, state, **options)))

    @classmethod
    def open(cls, directory: str | Path, model: nn.Module, **options: Any) -> DistributedDeltaLog:
        """Open a log to append to it."""
        return cls(model, on_rank_0(lambda: DeltaLog.open(directory, **options)))

    def append(self, step: int) -> None:
        """Log the current weights as `step`; rank 0 writes them in the background."""
        state = full_state(self._model)

        def append(log: DeltaLog) -> None:
            require_trained(self._model.parameters(), f"{log.directory}: step {step}")  # `state` may be a copy
            log.append(step, state)

        self._on_log(append)

    def flush(self) -> None:
        """Wait until all appended steps are on disk."""
        self._on_log(DeltaLog.flush)

    def close(self) -> None:
        """Wait for the appended steps and release the lock of the directory."""
        self._on_log(DeltaLog.close)

    def __enter__(self) -> DistributedDeltaLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self.log is not None:  # the other ranks may be elsewhere
            self.log.__exit__(kind, error, traceback)

    def _on_log(self, function: Callable[[DeltaLog], object]) -> None:
        log = self.log
        on_rank_0(lambda: None if log is None else function(log))


def full_state(model: nn.Module) -> nn.Module | Mapping[str, Tensor]:
    """Gather the state of a model under `fully_shard` on rank 0, for a `DeltaLog`. All ranks must call it.

    Returns:
        On rank 0 the full tensors on the CPU, as in `model.state_dict()`; tied tensors are one tensor. On the other
        ranks
        an empty state. The model itself if it is not sharded.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return model
    state = model.state_dict()
    first_names: dict[nn.Parameter, str] = {}
    firsts = {name: first_names.setdefault(parameter, name) for name, parameter in parameters.items()}
    gathered = FullState(state.keys() - parameters.keys())
    for name, tensor in state.items():
        first = firsts.get(name, name)
        if first == name:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = full.cpu() if first == name else gathered[first]
    return gathered


def on_rank_0(function: Callable[[], T], error_type: type[Exception] = DeltaLogError) -> T | None:
    """Call `function` on rank 0 and return its result there, None on the other ranks. All ranks must call this.

    Raises:
        error_type: on the other ranks, if `function` raised an error, which rank 0 raises itself.
    """
    result, failed = None, ["it was interrupted"]
    try:
        if dist.get_rank() == 0:
            result = function()
        failed = [""]
    except Exception as error:  # of any type: the other ranks must not wait for this one, which raises it
        failed = [str(error)]
        raise
    finally:
        dist.broadcast_object_list(failed, src=0)
        if dist.get_rank() != 0 and failed[0]:
            raise error_type(f"rank 0: {failed[0]}")
    return result
