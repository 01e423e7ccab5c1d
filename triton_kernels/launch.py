"""How the kernels are launched: sizes, compiler options, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Compact slots of one program of a gather, whose sums of squares are added in an order that depends on it: with 4 warps
# a thread has 8 of them, so that 8 independent gathers are in flight.
SLOTS = 1024


class Tuning(NamedTuple):
    """Launch sizes that depend on the GPU and change no bit of any result.

    `sparse_opt.tuning` has the same entries, which it describes, and tables of GPUs. These values are used where none
    was set.
    """

    step_slots: int = 512
    swap_slots: int = 512
    apply_slots: int = 512
    encode_elements: int = 4096
    encode_changes: int = 128
    tile64_stages: int = 3
    tile128_stages: int = 2
    tile128_registers: int = 0


_DEFAULT = Tuning()
_tunings: dict[torch.device, Tuning] = {}


def set_tuning(device: torch.device, **entries: int) -> None:
    """Set all launch sizes of the kernels on `device`, which has an index unless it is the CPU."""
    _tunings[device] = Tuning(**entries)


def tuning_of(device: torch.device) -> Tuning:
    """The launch sizes of the kernels on the device of a tensor."""
    return _tunings.get(device, _DEFAULT)


# An FMA rounds a product and a sum once; the reference rounds each of them.
SLOT_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
ELEMENT_OPTIONS = {"num_warps": 8}
CHANGE_OPTIONS = {"num_warps": 2}

TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# By element size: kernels that move or compare bits use integers.
BITS_DTYPE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TRITON_BITS_DTYPE = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

# triton.jit reads the variable when it decorates a kernel, that is, when this package is imported.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 at import)."""
    return _INTERPRETED


def element_dtype(tensors: Sequence[Tensor]) -> tl.dtype:
    """The Triton dtype of a list of float tensors that is not empty."""
    return TRITON_DTYPE[tensors[0].dtype]
