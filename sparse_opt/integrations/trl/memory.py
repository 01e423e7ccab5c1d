"""`MemoryCallback`: the memory of each process of a run, in `memory.jsonl` of the output folder."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .row_file import RowFile

FILE = "memory.jsonl"


class MemoryCallback(TrainerCallback):
    """Writes a row for each logged step: `{"step": 10, "ranks": [{"peak_memory_bytes": ...}, ...]}`.

    The statistics are those of `process_statistics`, one dictionary for each process, in order of rank.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            RowFile(Path(args.output_dir, FILE)).cut(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from accelerate.utils import gather_object  # not needed for `process_statistics`

        ranks = gather_object([process_statistics(args.device)])
        if state.is_world_process_zero:
            RowFile(Path(args.output_dir, FILE)).write({"step": state.global_step, "ranks": ranks})


def process_statistics(device: torch.device) -> dict[str, int]:
    """The process's peak memory of the host (resident), and of its GPU what torch allocates, now and at its peak, and
    reserves.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    host = {"peak_host_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type != "cuda":
        return host
    return {
        "memory_bytes": torch.cuda.memory_allocated(device),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_memory_bytes": torch.cuda.memory_reserved(device),
        **host,
    }
