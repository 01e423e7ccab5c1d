"""The batches of a run's steps, made ahead of time by the workers of torch's DataLoader while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .encoding import TokenBatch
from .order import ShuffledOrder

# Steps per worker whose batches wait to be used.
_STEPS_AHEAD = 2


class StepBatches(Dataset[list[TokenBatch]]):
    """A step's number -> the batches of its forward passes, on the CPU. It is pickled for worker processes.

    Args:
        data: all examples.
        order: the order in which they are visited.
        n_examples: examples of a step.
        passes: the examples of each forward pass of a step, as slices of them.
        collate: makes the batch of a pass from its examples; a function that can be pickled.
    """

    def __init__(
        self,
        data: Sequence[Any],
        order: ShuffledOrder,
        n_examples: int,
        passes: Sequence[slice],
        collate: Callable[[Sequence[Any]], TokenBatch],
    ):
        self._data, self._order, self._n_examples = data, order, n_examples
        self._passes, self._collate = passes, collate

    def examples(self, step: int) -> list[Any]:
        """The examples of a step."""
        order = self._order.take((step - 1) * self._n_examples, self._n_examples)
        return [self._data[index] for index in order]

    def __getitem__(self, step: int) -> list[TokenBatch]:
        return list(self.batches(step))

    def batches(self, step: int) -> Iterator[TokenBatch]:
        """The batches of a step, each made when it is asked for."""
        examples = self.examples(step)
        for rows in self._passes:
            yield self._collate(examples[rows])

    def ahead(self, steps: range, n_workers: int, *, pin_memory: bool) -> Iterator[list[TokenBatch]]:
        """Yield the batches of these steps in order, made by worker processes two steps ahead each.

        Args:
            pin_memory: put them into page-locked memory, from which a GPU copies them while it computes.
        """
        loader: DataLoader[list[TokenBatch]] = DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=n_workers,
            prefetch_factor=_STEPS_AHEAD,
            pin_memory=pin_memory,
            collate_fn=_unchanged,
            # The seeds of the workers, which draw nothing, would otherwise take a number from the run's generator.
            generator=torch.Generator(device="cpu"),
        )
        return iter(loader)


def _unchanged(batches: list[TokenBatch]) -> list[TokenBatch]:
    return batches
