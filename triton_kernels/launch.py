"""How the kernels are launched: sizes, compiler options, dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Compact slots of one program. With 4 warps a thread has 8 of them, so that 8 independent gathers are in flight; or 4,
# with which AdamW and delta_apply_ are up to 8 % faster on an H200, and never slower by 1 %; the other steps use 4 too.
SLOTS, FEW_SLOTS = 1024, 512
# Dense elements of a program of delta_encode: with 8 warps a thread has 32, four 16-byte loads of 2-byte elements; and
# the changes that a program writes at a time, with 2 warps. On an H200, 2^30 bf16: 1.03 ms to mark, and 0.20 and 0.81
# to write where 1 and 10 % changed; with half the elements 1.03, and 0.27 and 0.85.
ELEMENTS, CHANGES = 8192, 128

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
