"""`ProgressLines`: progress and time left in lines, for a run whose output is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import TrainerCallback

from ...progress import SECONDS_BETWEEN_LINES, duration

_SHOWN = ("loss", "reward", "rewards/margins")


class ProgressLines(TrainerCallback):
    """Prints a line on stderr at most every 30 s: step, the last logged loss and reward, and the time left."""

    def __init__(self) -> None:
        self._started = self._said = 0.0
        self._first = 0
        self._logs: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = self._said = time.monotonic()
        self._first = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._logs |= {name: value for name, value in (logs or {}).items() if name in _SHOWN}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, step = time.monotonic(), state.global_step
        if not state.is_world_process_zero or now - self._said < SECONDS_BETWEEN_LINES:
            return
        self._said = now
        left = (now - self._started) / (step - self._first) * (state.max_steps - step)
        shown = "".join(f", {name} {float(value):.4g}" for name, value in self._logs.items())
        print(f"step {step} of {state.max_steps}{shown}, {duration(left)} left", file=sys.stderr, flush=True)
