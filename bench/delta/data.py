"""Generated weights before and after a step, and a bound on the size of their patch: its entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.tensors import as_bits

WEIGHT_STD = 0.02
# Words counted at once, which limits the memory of the int64 counts below.
CHUNK = 2**26
_EXPONENTS, _MANTISSA_BITS = 256, 7
_DIFFERENCES = 2**17  # of two ordered 16-bit words, from -(2^16 - 1) to 2^16 - 1


@dataclass(frozen=True)
class Step:
    """bfloat16 weights before and after one step.

    mask: the elements that a sparse step could change.
    """

    name: str
    old: list[Tensor]
    new: list[Tensor]
    mask: MaskSet | None = None

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.old)

    @property
    def changed(self) -> int:
        return n_different(self.old, self.new)


class Kind(NamedTuple):
    """share: share of the positions, or of those in the mask, that a step at `lr` changes. density: of the mask."""

    name: str
    share: float
    lr: float
    density: float | None = None


# Two steps typical of reinforcement learning; many steps in one; supervised fine-tuning; a sparse run.
KINDS = (
    Kind("1.2%", 0.012, 2.99e-7),
    Kind("2.6%", 0.026, 7.465e-7),
    Kind("10%", 0.1, 3.959e-6),
    Kind("dense", 0.6, 6.715e-5),
    Kind("mask", 0.1, 3.959e-6, 0.025),
)


def make_step(kind: Kind, shapes: Mapping[str, Sequence[int]], device: torch.device, seed: int = 0) -> Step:
    """One step of a kind on random weights.

    fp32 master weights are normal(0, 0.02); a step adds its learning rate times a normal random number, the size of
    Adam's normalised update; both states are rounded to bf16.
    """
    generator = torch.Generator(device).manual_seed(seed)
    mask = None if kind.density is None else MaskSet.random(shapes, density=kind.density, seed=seed)
    old, new = [], []
    for name, shape in shapes.items():
        numel = math.prod(shape)
        master = torch.randn(numel, device=device, generator=generator).mul_(WEIGHT_STD)
        before = master.bfloat16()
        after = master.add_(torch.randn(numel, device=device, generator=generator), alpha=kind.lr).bfloat16()
        if mask is not None:
            at = mask[name].to(device).long()
            after = before.index_copy(0, at, after[at])
        old.append(before.view(*shape))
        new.append(after.view(*shape))
    return Step(kind.name, old, new, mask)


def n_different(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    """The number of elements whose bits differ."""
    return sum(int((as_bits(x) != as_bits(y)).count_nonzero()) for x, y in zip(a, b, strict=True))


def entropy_bytes(old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """The entropy in bytes of (changed, difference) of each bf16 word given the exponent of the old word.

    The frequencies are those of these words.
    """
    device = old[0].device
    given = torch.zeros(_EXPONENTS, dtype=torch.int64, device=device)
    kept = torch.zeros_like(given)
    joint = torch.zeros(_EXPONENTS * _DIFFERENCES, dtype=torch.int64, device=device)
    for a, b in zip(old, new, strict=True):
        for x, y in zip(as_bits(a).view(-1).split(CHUNK), as_bits(b).view(-1).split(CHUNK), strict=True):
            x, y = x.to(torch.int32) & 0xFFFF, y.to(torch.int32) & 0xFFFF
            moved = x != y
            exponent = x >> _MANTISSA_BITS & 0xFF
            given += torch.bincount(exponent, minlength=_EXPONENTS)
            kept += torch.bincount(exponent[~moved], minlength=_EXPONENTS)
            classes, difference = exponent[moved], (_ordered(y) - _ordered(x))[moved]
            joint += torch.bincount(classes * _DIFFERENCES + difference + _DIFFERENCES // 2, minlength=len(joint))
    return (_total_log(given) - _total_log(kept) - _total_log(joint)) / 8


def _ordered(words: Tensor) -> Tensor:
    """bfloat16 words as integers with the same order as the numbers."""
    return torch.where(words >= 0x8000, 0xFFFF - words, words | 0x8000)


def _total_log(counts: Tensor) -> float:
    counts = counts[counts > 0].double()
    return float((counts * counts.log2()).sum())
