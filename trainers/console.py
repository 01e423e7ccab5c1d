"""The command line of the loops, and the metrics and times of their steps: rows of a file, and lines of progress."""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.files import check_new_folder, writing
from sparse_opt.progress import TimeLeft


def run_module(config_class: type, work: Callable[[Any], object], argv: Sequence[str] | None, name: str) -> int:
    """Call `work` with the dataclass of the options in `argv`, by default the process's: main of the module `name`.

    Returns:
        0; 1 if `work` failed, or 2 if the call was wrong, after the error in one line on stderr.
    """
    from transformers import HfArgumentParser
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    parser = HfArgumentParser(
        config_class,
        prog=f"python -m sparse_opt.trainers.{name}",
        description=config_class.__doc__,
        epilog=f"The comments of {config_class.__name__} in {inspect.getsourcefile(config_class)} explain each option.",
        allow_abbrev=False,
    )
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        config, unknown = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
        if unknown:
            parser.error(f"unknown arguments: {' '.join(unknown)}")
        work(config)
    except SparseOptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


class Metrics:
    """Writes a row for each step to `metrics.jsonl` in a new folder, and prints a line every few seconds.

    Raises:
        ConfigError: the folder is not empty, or cannot be created.
    """

    def __init__(self, folder: Path, n_steps: int):
        check_new_folder(folder, "output_dir")
        self._n_steps = n_steps
        self._path = folder / "metrics.jsonl"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._clock = TimeLeft(every=2.0)

    def write(self, step: int, values: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Write the row of a step, from 1 on.

        Args:
            values: numbers, or tensors of one element; reading them waits for the device.
            seconds: time of each section of the step.

        Raises:
            SparseOptError: a value is not finite, or the row cannot be written.
        """
        row = {name: float(value) for name, value in values.items()}
        wrong = [name for name, value in row.items() if not math.isfinite(value)]
        if wrong:
            raise SparseOptError(f"step {step}: {wrong[0]} is {row[wrong[0]]}: lower the learning rate, or use fp32")
        times = {f"{name}_s": value for name, value in seconds.items()}
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **row, **times}) + "\n")
        if left := self._clock.after(step, self._n_steps, always=step in (1, self._n_steps)):
            shown = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
            print(f"step {step}/{self._n_steps}: {shown}; {left}", flush=True)


class StepTimer:
    """Times the named sections of a step; a section entered more than once adds up.

    On CUDA a section's time is GPU time between two events on the current stream, for which `read` waits, so that
    timing changes nothing it measures. On a CPU it is wall time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to section `name`."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        yield
        end.record(stream)
        self._events.append((name, start, end))

    def read(self) -> dict[str, float]:
        """Seconds per section since the last read. On CUDA, it waits for the end of the sections."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds
