"""Minimal training loops to read and to measure, one file per algorithm: `sft`, `dpo` and `grpo`, on one device.

Each file reads from top to bottom: options, loss, step, and the run. People train with `sparse-opt train`, which is TRL
under a mask; `recipes` has the original research code's other algorithms, each a module of its own.

Names are imported when they are first used: a loop imports transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import TokenBatch, TokenSequence
    from .dpo import dpo_loss, reference_logprobs
    from .grpo import group_advantages, grpo_loss
    from .logprobs import completion_logprobs
    from .modes import Section, Trained, untimed
    from .sft import sft_loss

__all__ = [
    "Section",
    "TokenBatch",
    "TokenSequence",
    "Trained",
    "completion_logprobs",
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "reference_logprobs",
    "sft_loss",
    "untimed",
]

_HOMES = {
    "Section": "modes",
    "TokenBatch": "batches",
    "TokenSequence": "batches",
    "Trained": "modes",
    "completion_logprobs": "logprobs",
    "dpo_loss": "dpo",
    "group_advantages": "grpo",
    "grpo_loss": "grpo",
    "reference_logprobs": "dpo",
    "sft_loss": "sft",
    "untimed": "modes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
