"""Generated weights before and after a step, and bounds on the size of their patch: its entropy, and Rice codes."""

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
# Words processed at once, which limits the memory of the int64 counts below.
CHUNK = 2**26
_SAMPLE = 2**20  # words that a learning rate is searched on
_EXPONENTS, _MANTISSA_BITS = 256, 7
_DIFFERENCES = 2**17  # of two ordered 16-bit words, from -(2^16 - 1) to 2^16 - 1


@dataclass(frozen=True)
class Step:
    """bfloat16 weights before and after one step.

    mask: the elements that a sparse step could change. lr: the learning rate of the step.
    """

    name: str
    old: list[Tensor]
    new: list[Tensor]
    lr: float
    mask: MaskSet | None = None

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.old)

    @property
    def changed(self) -> int:
        return n_different(self.old, self.new)


class Kind(NamedTuple):
    """share: share of the positions, or of those in the mask, that the step changes. density: density of the mask."""

    name: str
    share: float
    density: float | None = None


# Two steps typical of reinforcement learning; many steps in one; supervised fine-tuning; a sparse run.
KINDS = (
    Kind("1.2%", 0.012),
    Kind("2.6%", 0.026),
    Kind("10%", 0.1),
    Kind("dense", 0.6),
    Kind("mask", 0.1, 0.025),
)


def make_step(kind: Kind, shapes: Mapping[str, Sequence[int]], device: torch.device, seed: int = 0) -> Step:
    """One step of a kind on random weights.

    fp32 master weights are normal(0, 0.02); a step adds its learning rate times a normal random number, the size of
    Adam's normalised update; both states are rounded to bf16. The learning rate is chosen to change the share of the
    kind.
    """
    lr = find_lr(kind.share)
    generator = torch.Generator(device).manual_seed(seed)
    mask = None if kind.density is None else MaskSet.random(shapes, density=kind.density, seed=seed)
    old, new = [], []
    for name, shape in shapes.items():
        before, after = _step(math.prod(shape), lr, generator)
        if mask is not None:
            at = mask[name].to(device)
            moved = after[at.long()]
            after = before.clone()
            after[at.long()] = moved
        old.append(before.view(*shape))
        new.append(after.view(*shape))
    return Step(kind.name, old, new, lr, mask)


def find_lr(share: float) -> float:
    """The learning rate at which a step of `make_step` changes this share of the bf16 weights, by bisection."""
    if not 0.0 < share < 0.9:
        raise ValueError(f"share is {share}, expected more than 0 and less than 0.9")
    generator = torch.Generator().manual_seed(0)
    master, normal = (torch.randn(_SAMPLE, generator=generator) for _ in range(2))
    master *= WEIGHT_STD
    old = master.bfloat16()
    low, high = 1e-12, 1.0
    for _ in range(25):  # to a millionth of the rate
        middle = math.sqrt(low * high)
        new = torch.add(master, normal, alpha=middle).bfloat16()
        low, high = (middle, high) if n_different([old], [new]) < share * _SAMPLE else (low, middle)
    return math.sqrt(low * high)


def n_different(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    """The number of elements whose bits differ."""
    return sum(int((as_bits(x) != as_bits(y)).count_nonzero()) for x, y in zip(a, b, strict=True))


def _step(numel: int, lr: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """bfloat16 [numel] before and after; of large tensors in chunks, as the fp32 weights are not kept."""
    old, new = (torch.empty(numel, dtype=torch.bfloat16, device=generator.device) for _ in range(2))
    for begin in range(0, numel, CHUNK):
        part = slice(begin, min(begin + CHUNK, numel))
        size = part.stop - part.start
        master = torch.randn(size, device=generator.device, generator=generator).mul_(WEIGHT_STD)
        old[part] = master
        new[part] = master.add_(torch.randn(size, device=generator.device, generator=generator), alpha=lr)
    return old, new


class Sizes(NamedTuple):
    """Sizes in bytes of codes of a step, computed from the step itself.

    entropy: of (changed, difference) given the exponent of the old word, with the frequencies of these words.
    rice: Golomb-Rice codes of each class of old exponents, each with its best parameter for that class: one for the
    gaps between the changed positions of the class (the unchanged ones, where those are fewer), one for the magnitudes
    less 1; and one bit for the sign. Without any header. https://doi.org/10.1109/TCOM.1971.1090789
    """

    entropy: float
    rice: float


def code_sizes(old: Sequence[Tensor], new: Sequence[Tensor]) -> Sizes:
    """The sizes of these codes for bfloat16 tensors, computed in chunks of at most `CHUNK` words on their device."""
    device = old[0].device
    given = torch.zeros(_EXPONENTS, dtype=torch.int64, device=device)
    kept = torch.zeros_like(given)
    joint = torch.zeros(_EXPONENTS * _DIFFERENCES, dtype=torch.int64, device=device)
    gap_bits = torch.zeros(_EXPONENTS, 32, dtype=torch.int64)
    for a, b in zip(old, new, strict=True):
        for x, y in zip(as_bits(a).split(CHUNK), as_bits(b).split(CHUNK), strict=True):
            x, y = x.to(torch.int32) & 0xFFFF, y.to(torch.int32) & 0xFFFF
            moved = x != y
            exponent = x >> _MANTISSA_BITS & 0xFF
            here = torch.bincount(exponent, minlength=_EXPONENTS)
            given += here
            kept += torch.bincount(exponent[~moved], minlength=_EXPONENTS)
            classes, difference = exponent[moved], (_ordered(y) - _ordered(x))[moved]
            joint += torch.bincount(classes * _DIFFERENCES + difference + _DIFFERENCES // 2, minlength=len(joint))
            for c in here.nonzero().view(-1).tolist():
                gap_bits[c] += _rice_bits(_gaps(moved[exponent == c]))
    bits = _total_log(given) - _total_log(kept) - _total_log(joint)
    rice = int(gap_bits.min(1).values.sum())
    for counts in joint.view(_EXPONENTS, _DIFFERENCES):
        if bool(counts.any()):
            rice += _magnitude_bits(counts)
    return Sizes(bits / 8, rice / 8)


def _ordered(words: Tensor) -> Tensor:
    """bfloat16 words as integers with the same order as the numbers."""
    return torch.where(words >= 0x8000, 0xFFFF - words, words | 0x8000)


def _total_log(counts: Tensor) -> float:
    counts = counts[counts > 0].double()
    return float((counts * counts.log2()).sum())


def _gaps(moved: Tensor) -> Tensor:
    """Numbers of unmarked elements before each marked one; of the complement if that has fewer marked elements."""
    at = (moved if 2 * int(moved.count_nonzero()) <= len(moved) else ~moved).nonzero().view(-1)
    return torch.diff(at, prepend=at.new_full((1,), -1)) - 1


def _rice_bits(values: Tensor) -> Tensor:
    """[32] int64 on the CPU: bits of a Rice code with each parameter k, a unary quotient, a stop bit and k bits."""
    return torch.stack([(values >> k).sum() + len(values) * (k + 1) for k in range(32)]).cpu()


def _magnitude_bits(counts: Tensor) -> int:
    """Bits of the magnitudes of one class's differences, given the counts [131072] of each difference."""
    values = (torch.arange(_DIFFERENCES, device=counts.device) - _DIFFERENCES // 2).abs() - 1
    signs = n = int(counts.sum())
    sizes = [int(((values >> k) * counts).sum()) + n * (k + 1) for k in range(16)]
    return signs + min(sizes)
