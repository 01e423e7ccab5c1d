"""The norm of compact gradients, the coefficient that clips them, and a warning of clipping that does not reach them.

Nothing waits for the device.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import FrameType

import torch
from torch import Tensor

from .gradients.gradient_buffer import GradientBuffer


def global_norm(buffers: Sequence[GradientBuffer], received: Sequence[list[bool]]) -> Tensor:
    """Return the 2-norm over all buffers of the gradients in `received`: one fp32 element on the first one's device.

    Sums of squares are added in fp64, as `GradientBuffer.clip` does, so that both give the same bits.
    """
    home = buffers[0].device
    pairs = zip(buffers, received, strict=True)
    sums = [buffer.sums_of_squares(flags).sum(dtype=torch.float64).to(home) for buffer, flags in pairs]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return total.float().sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients of this norm to `max_norm`: at most 1, as in torch's clip_grad_norm_."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


# torch's and accelerate's function, and the method of transformers' Trainer that calls it.
_CLIPPING = frozenset({"clip_grad_norm_", "_clip_grad_norm"})


def warn_of_clipping_elsewhere(optimizer: str) -> None:
    """Warn if the code that calls `step` names a function that clips `param.grad`, where compact gradients are not.

    The call itself leaves no trace, so this looks for the name in the code of the functions on the stack. It misses a
    call in a function that has returned, and warns of one that an `if` has left out.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not _CLIPPING.isdisjoint(frame.f_code.co_names):
            warnings.warn(
                f"{frame.f_code.co_qualname}, which calls {optimizer}.step(), calls clip_grad_norm_, too; that of "
                "torch or accelerate reads param.grad, which is None with compact gradients, so it returns 0 and clips "
                f"nothing: pass max_grad_norm= to {optimizer}, call its own clip_grad_norm_(), or use "
                "sparse_opt.integrations.sparse_trainer",
                stacklevel=5,  # the caller of `step`, which torch wraps twice
            )
            return
        frame = frame.f_back
