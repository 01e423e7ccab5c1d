"""Tensors of any bits, and tensors that differ from them in some."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def name_of(dtype: torch.dtype) -> str:
    """For test ids."""
    return str(dtype).removeprefix("torch.")


def bits(tensor: Tensor) -> Tensor:
    """Its words as integers, on the CPU: NaNs and zeros compare by their bits."""
    return tensor.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def any_words(source: np.random.Generator, numel: int, dtype: torch.dtype) -> Tensor:
    """[numel], any bits: NaN payloads, both zeros, infinities and denormals are among them; bools are 0 or 1."""
    if dtype == torch.bool:
        return torch.from_numpy(source.integers(0, 2, numel).astype(bool))
    return torch.frombuffer(bytearray(source.bytes(numel * dtype.itemsize)) or bytearray(8), dtype=dtype)[
        :numel
    ].clone()


def changed_words(source: np.random.Generator, old: Tensor, density: float, step: int | None) -> Tensor:
    """A copy with about `density` of the words changed: by up to `step` each way, or to any bits where it is None."""
    new = old.clone()
    words = bits(new).numpy()
    (where,) = (source.random(len(words)) < density).nonzero()
    if old.dtype == torch.bool:
        words[where] ^= 1
    elif step is None:
        words[where] = source.integers(0, 256, (len(where), old.element_size()), dtype=np.uint8).view(words.dtype)[:, 0]
    else:
        by = source.integers(1, step + 1, len(where)) * source.choice([-1, 1], len(where))
        words[where] += by.astype(_SIGNED[old.element_size()]).view(words.dtype)
    return new


def trained_words(source: np.random.Generator, numel: int, scale: float) -> tuple[Tensor, Tensor]:
    """bfloat16 [numel] before and after a step of about `scale` in fp32 master weights of deviation 0.02."""
    master = source.standard_normal(numel, dtype=np.float32) * np.float32(0.02)
    moved = master + source.standard_normal(numel, dtype=np.float32) * np.float32(scale)
    return torch.from_numpy(master).bfloat16(), torch.from_numpy(moved).bfloat16()
