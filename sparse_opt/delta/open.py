"""Opens a log of states of either file format, and iterates over its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from ..errors import DeltaLogError
from .log import DeltaLog
from .pt_log import PtDeltaLog, is_pt_delta_log
from .state import StateLog


def open_log(path: str | Path) -> DeltaLog | PtDeltaLog:
    """Open a directory's log for reading: `step_*.safetensors`, or `base_state.pt` and `deltas_step_*.pt`.

    Raises:
        DeltaLogError: there is no log in the directory, or one of each kind.
    """
    directory = Path(path)
    if not is_pt_delta_log(directory):
        return DeltaLog.open(directory)
    if any(directory.glob("step_*.safetensors")):
        raise DeltaLogError(f"{directory}: holds a delta log and a log of .pt files, wanted one of them")
    return PtDeltaLog(directory)


def step_states(log: StateLog, steps: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (step, the state's tensors by their first names), on the CPU, for ascending logged steps.

    Reads the log once, all tensors in parallel, and holds one state; a yielded state is valid until the next one is
    requested.

    Raises:
        DeltaLogError: as `StateLog.tensor_states`.
    """
    readers = {name: log.tensor_states(name, steps) for name in log.layout.names}
    for step in steps:
        yield step, {name: next(reader)[1] for name, reader in readers.items()}
