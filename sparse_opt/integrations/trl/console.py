"""What a run prints while it trains: progress, where the output is not a terminal, and warnings of logged metrics."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from transformers import TrainerCallback

from ...progress import TimeLeft

_SHOWN = ("loss", "reward", "rewards/margins")


class ProgressLines(TrainerCallback):
    """Prints a line on stderr at most every 30 s: step, the last logged loss and reward, and the time left."""

    def __init__(self) -> None:
        self._clock = TimeLeft()
        self._logs: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock = TimeLeft(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._logs |= {name: value for name, value in (logs or {}).items() if name in _SHOWN}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if state.is_world_process_zero and (left := self._clock.after(step, state.max_steps)):
            shown = "".join(f", {name} {float(value):.4g}" for name, value in self._logs.items())
            print(f"step {step} of {state.max_steps}{shown}, {left}", file=sys.stderr, flush=True)


class LogWarnings(TrainerCallback):
    """Warns once of each kind of logged metrics that look like training and are none."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        found = {
            "the rewards of each prompt are all equal, so GRPO has no gradient: check rewards and completions": (
                logs.get("frac_reward_zero_std") == 1
            ),
            "all completions are empty: check the chat template and the EOS token": (
                logs.get("completions/max_length", 2) <= 1 < args.max_completion_length
            ),
            "rewards/accuracies is 0 because all margins are 0, as in the first step: TRL counts ties as wrong": (
                logs.get("rewards/accuracies") == 0 == logs.get("rewards/margins")
            ),
        }
        for text in [text for text, holds in found.items() if holds and text not in self._warned]:
            self._warned.add(text)
            if state.is_world_process_zero:
                warnings.warn(f"step {state.global_step}: {text}", stacklevel=2)
