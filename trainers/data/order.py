"""The seeded order in which examples are visited, and their division into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from sparse_opt.errors import DataError

ItemT = TypeVar("ItemT")
_POOL = 50  # parts whose examples are sorted together, as many as transformers sorts


class ShuffledOrder:
    """An endless, seeded order of `n` examples: one permutation after another, each epoch with its own.

    A position's example depends on the seed and the position alone, so a run can start anywhere in it.
    """

    def __init__(self, n: int, seed: int):
        self.n = n
        self.seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def take(self, start: int, count: int) -> list[int]:
        """Indices of the examples at positions start .. start + count - 1."""
        return [self._at(position) for position in range(start, start + count)]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self.n)
        if epoch != self._epoch:
            self._permutation = self._permuted(epoch)
            self._epoch = epoch
        return self._permutation[offset]

    def _permuted(self, epoch: int) -> list[int]:
        return permutation(self.n, self.seed, epoch)


class GroupedOrder(ShuffledOrder):
    """A `ShuffledOrder` in which consecutive parts of `size` examples have similar lengths.

    Each epoch's permutation is divided into pools of 50 parts; the examples of a pool are sorted by length, and its
    parts are put into a random order, so that lengths do not follow the course of training.
    """

    def __init__(self, lengths: Sequence[int], seed: int, size: int):
        super().__init__(len(lengths), seed)
        self.lengths = lengths
        self.size = size

    def _permuted(self, epoch: int) -> list[int]:
        order: list[int] = []
        for pool in chunks(super()._permuted(epoch), _POOL * self.size):
            parts = chunks(sorted(pool, key=lambda index: -self.lengths[index]), self.size)
            # The last part may be smaller, and stays the last, so that the others begin at multiples of `size`.
            last = len(parts) - 1 if len(parts[-1]) < self.size else len(parts)
            places = [*permutation(last, self.seed, epoch), *range(last, len(parts))]
            order += [index for place in places for index in parts[place]]
        return order


def held_out(examples: Sequence[ItemT], share: float, seed: int, name: str) -> tuple[list[ItemT], list[ItemT]]:
    """Split examples into those to train on and a share drawn with `seed`, both in their order.

    Raises:
        DataError: one of the two would be empty; names the dataset, `name`.
    """
    count = round(share * len(examples))
    if not 0 < count < len(examples):
        raise DataError(f"dataset {name}: {share:g} of {len(examples)} examples are {count}, expected 1 to all but 1")
    drawn = set(permutation(len(examples), seed, -1)[:count])
    rest = [example for i, example in enumerate(examples) if i not in drawn]
    return rest, [examples[i] for i in sorted(drawn)]


def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(n) that depends on `seed` and `epoch` alone."""
    # An odd multiplier separates (seed, epoch) pairs: neighbouring seeds share no permutations.
    generator = torch.Generator(device="cpu").manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
    return torch.randperm(n, generator=generator, device="cpu").tolist()


def chunks(items: Sequence[ItemT], size: int) -> list[Sequence[ItemT]]:
    """Consecutive parts of `size` items; the last may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]
