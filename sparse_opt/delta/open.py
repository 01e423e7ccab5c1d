"""Opens a log of states of either file format."""

from __future__ import annotations

from pathlib import Path

from ..errors import DeltaLogError
from .log import DeltaLog
from .pt import PtDeltaLog, is_pt_delta_log


def open_log(path: str | Path) -> DeltaLog | PtDeltaLog:
    """Open a directory's log for reading: `step_*.safetensors`, or `base_state.pt` and `deltas_step_*.pt`.

    Raises:
        DeltaLogError: there is no log in the directory, or one of each kind.
    """
    directory = Path(path)
    if not is_pt_delta_log(directory):
        return DeltaLog.open(directory)
    if any(directory.glob("step_*.safetensors")):
        raise DeltaLogError(f"{directory}: holds a delta log and a log of .pt files, expected one of them")
    return PtDeltaLog(directory)
