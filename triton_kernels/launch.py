"""How the kernels are launched: sizes, compiler options, dtypes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Compact slots of one program of a gather, whose sums of squares are added in an order that depends on it: with 4 warps
# a thread has 8 of them, so that 8 independent gathers are in flight.
SLOTS = 1024


# Compact slots of one program of a step, and changes of one of `delta_apply_`.
STEP_SLOTS = 512


class Sizes(NamedTuple):
    """Launch sizes that depend on the GPU and change no bit of any result.

    The defaults need no more than 64 KiB of shared memory for a program, and were tuned on no GPU.
    """

    swap_slots: int = 512  # compact slots of a program of indexed_swap_ and indexed_replace_
    encode_elements: int = 4096  # dense elements of a program of delta_encode
    tile64_stages: int = 3  # steps of 64 tokens in shared memory, 16 KiB each: tiles of 64, 16-bit operands
    tile128_stages: int = 2  # steps of 64 tokens in shared memory, 32 KiB each: tiles of 128, 16-bit operands
    tile128_registers: int = 0  # most registers of a thread: tiles of 128, 16-bit operands; 0: the compiler's choice


# "Tuning tables" in the lab notebook. Three and two programs with these stages fit into the 227 KiB of shared memory of
# a multiprocessor of compute capability 9.0, and two programs of 8 warps have 128 registers for each thread.
SIZES_OF_SM_90 = Sizes(1024, 8192, 4, 3, 128)


@functools.cache
def sizes_of(device: torch.device) -> Sizes:
    """Return the launch sizes of the kernels on the device of a tensor."""
    if device.type == "cpu" or torch.version.hip is not None:
        return Sizes()
    return SIZES_OF_SM_90 if torch.cuda.get_device_capability(device) == (9, 0) else Sizes()


# An FMA rounds a product and a sum once; the reference rounds each of them.
SLOT_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
ELEMENT_OPTIONS = {"num_warps": 8}
# A program of delta_encode writes so many changes at a time.
CHANGES = 128
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
