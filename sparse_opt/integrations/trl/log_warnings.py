"""`LogWarnings`: warns of logged metrics that look like training and are none."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import TrainerCallback


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
