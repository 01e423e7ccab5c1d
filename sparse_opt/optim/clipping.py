"""The global norm of compact gradients and the coefficient that clips them, computed without a synchronization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .gradients.gradient_buffer import GradientBuffer


def global_norm(buffers: Sequence[GradientBuffer], received: Sequence[list[bool]]) -> Tensor:
    """Return the 2-norm over all buffers of the gradients in `received`: one fp32 element on the first one's device.

    Gathering and tile products have computed the sums of squares; this adds them up in fp64, as `GradientBuffer.clip`
    does, so that the result does not depend on which of the two is called.
    """
    home = buffers[0].device
    pairs = zip(buffers, received, strict=True)
    sums = [buffer.sums_of_squares(flags).sum(dtype=torch.float64).to(home) for buffer, flags in pairs]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return total.float().sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients of this norm to `max_norm`: at most 1, as in torch's clip_grad_norm_."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
