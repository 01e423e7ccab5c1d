"""ScalerProxy: makes compact gradients visible to `torch.amp.GradScaler`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter


class ScalerProxy:
    """Makes compact gradients, which are not in any `.grad`, visible to `torch.amp.GradScaler`.

    The scaler multiplies each `.grad` in the parameter groups by 1/scale and checks it for inf and NaN. While there are
    unused gradients, the first group has this parameter of one element at its end. Its `.grad` starts at 1, the gather
    sets it to inf if a gradient is not finite, and after the scaler has run it is the factor by which the compact
    gradients still have to be multiplied.
    """

    def __init__(self, device: torch.device) -> None:
        self.param = Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self.factor = torch.ones(1, dtype=torch.float32, device=device)

    @property
    def shown(self) -> bool:
        return self.param.grad is not None

    def show(self, group: dict[str, Any]) -> None:
        if not self.shown:
            self.factor.fill_(1.0)
            self.param.grad = self.factor
            group["params"].append(self.param)

    def hide(self, group: dict[str, Any]) -> None:
        if self.shown:
            self.param.grad = None
            group["params"][:] = [p for p in group["params"] if p is not self.param]
