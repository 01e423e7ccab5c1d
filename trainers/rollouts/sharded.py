"""Engines on a policy that is sharded over the ranks (`--parallel fsdp`); all ranks call `generate` together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..policy.sharding import gathered
from .engine import Completions, Engine, Sampling
from .generate import GenerateEngine


class GatheredEngine:
    """An engine that has all weights on every rank while it samples.

    Ranks may sample different numbers of completions, also none. The policy must fit on each GPU, without gradients and
    activations.
    """

    def __init__(self, engine: Engine, model: Any):
        self.eos_ids = engine.eos_ids
        self._engine, self._model = engine, model

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """See `Engine.generate`."""
        with gathered(self._model):
            return self._engine.generate(prompts, n, sampling)

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()


class LayerwiseEngine:
    """transformers' `generate` with the weights of one layer at a time, which are gathered for every token.

    All ranks make as many forward passes as the longest completion of any rank needs. One without prompts samples a
    completion that is dropped.
    """

    def __init__(self, engine: GenerateEngine):
        self.eos_ids = engine.eos_ids
        self._engine = engine

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """See `Engine.generate`."""
        completions = self._engine.generate(prompts or [[self._engine.pad_id]], n, sampling)
        return completions if prompts else Completions([])

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()
