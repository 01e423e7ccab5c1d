"""Loss scaling of runs with dtype fp16, by `torch.amp.GradScaler`.

Gradients of fp16 activations below 6e-8 would be 0, so the loss is multiplied by a scale before the backward pass and
the gradients of the fp32 weights are divided by it afterwards. A step whose gradients overflow is skipped and the scale
halved; after 2000 steps without an overflow the scale is doubled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossScaling:
    """Scales losses and makes optimizer steps; without `enabled` both are ordinary.

    The state, for checkpoints, is that of the GradScaler.

    Attributes:
        scale: the scale of the last optimizer step.
        skipped: whether the last optimizer step was skipped by any optimizer.
    """

    def __init__(self, device: torch.device, *, enabled: bool):
        self.enabled = enabled
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self.scale = self._scaler.get_scale()
        self.skipped = False

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to backpropagate."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make a step with each optimizer, unless its gradients are not finite, and free the gradients."""
        if not self.enabled:
            for optimizer in optimizers:
                optimizer.step()
        else:
            # Unscaled first, because the optimizers clip within their steps.
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)
            for optimizer in optimizers:
                self._scaler.step(optimizer)
            self.scale = self._scaler.get_scale()
            self._scaler.update()
            self.skipped = self._scaler.get_scale() < self.scale
        for optimizer in optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state saved in a checkpoint."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict()`."""
        self._scaler.load_state_dict(state_dict)
