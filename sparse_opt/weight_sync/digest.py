"""The digest of active weights: a sum modulo 2**64 over (element number, bits of the value), in plain torch.

Each pair is mixed by the finalizer of splitmix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2660193.2660195):

    x = e * 0x9E3779B97F4A7C15 + bits * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)

A sum does not depend on the order of its terms, so GPUs compute it deterministically, parts add up, and a change of few
values updates it. For one element, different bits always have different digests. Several wrong values cancel out with a
probability of about 2**-64 if they are accidental. The digest is not cryptographic: it does not detect forgery.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensors import BITS_DTYPE, HostCopy

_CHUNK = 2**22  # elements; bounds the scratch memory to some 100 MB


def mix(numbers: Tensor, bits: Tensor) -> Tensor:
    """Return the mixed 64 bits of each pair as int64: [n] of numbers [n] int64 and zero-extended bits [n] int64."""
    x = numbers * signed(0x9E3779B97F4A7C15) + bits * signed(0xD1342543DE82EF95) + signed(0x2545F4914F6CDD1D)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift right without copies of the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def signed(value: int) -> int:
    """Return the int64 with the same low 64 bits as an integer of any size."""
    return (value + 2**63) % 2**64 - 2**63


def zero_extended(values: Tensor) -> Tensor:
    """Return the bit patterns of a tensor's elements as non-negative int64, for elements of at most 4 bytes."""
    bits = values.view(BITS_DTYPE[values.element_size()]).to(torch.int64)
    return bits if values.element_size() == 8 else bits & ((1 << 8 * values.element_size()) - 1)


def digest_sum(values: Tensor, first: int) -> Tensor:
    """Return the digest of consecutive elements as an int64 tensor without dimensions, on their device.

    Args:
        values: [n], of at most 4 bytes per element, or int64 integers.
        first: element number of values[0].
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, values.numel(), _CHUNK):
        part = values[begin : begin + _CHUNK]
        numbers = torch.arange(first + begin, first + begin + part.numel(), device=values.device)
        total += mix(numbers, zero_extended(part)).sum()
    return total


def from_hex(digest: str) -> int | None:
    """Return the sum of `to_hex` as an int64; None for other text."""
    if len(digest) != 16 or not set(digest) <= set("0123456789abcdef"):
        return None
    return signed(int(digest, 16))


def to_hex(total: int) -> str:
    """Return 16 hex digits of a sum modulo 2**64."""
    return f"{total % 2**64:016x}"


def numbers_of(copy: HostCopy) -> list[int]:
    """Return the elements of int64 tensors, one tensor after the other; waits for their copy only."""
    return [number for tensor in copy.result() for number in tensor.view(-1).tolist()]
