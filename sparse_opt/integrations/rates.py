"""A learning rate to start with under a mask, and warnings about settings with which a mask hardly learns.

The best rates of the kept studies (docs/study.md) are 3 to 10 times the dense one at a density of 10 %, 10 to 48 times
at 2.5 %, and 32 to 95 times at 1 %: about density^-0.8. `rate_factor` is the lower end of these, a start for tuning.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..masks.mask_set import MaskSet
from .arguments import SparseArguments

EXPONENT = -0.75


def rate_factor(density: float) -> float:
    """density^-0.75: the factor of the dense learning rate to start with under a mask (10 %: 5.6, 1 %: 32)."""
    return float(density**EXPONENT)


def dense_rate(args: Any) -> float:
    """The default learning rate of a class of training arguments, which is one for training all weights."""
    return float(args.__dataclass_fields__["learning_rate"].default)


def warn_of_settings(args: Any, options: SparseArguments, mask: MaskSet, model: nn.Module) -> None:
    """Warn if the rate is the dense default or below, or if small updates of 16-bit weights are rounded away."""
    if args.process_index != 0:
        return
    dense, density = dense_rate(args), mask.density
    if density < 1.0 and args.learning_rate <= dense:
        warnings.warn(
            f"learning_rate is {args.learning_rate:g}, and the dense default {dense:g}: under a mask of density "
            f"{density:.3g} a start for tuning is {rate_factor(density):.3g} times the dense rate (density^-0.75), "
            f"{dense * rate_factor(density):.3g}",
            stacklevel=3,
        )
    if options.master_weights or options.stochastic_rounding:
        return
    for name, param in model.named_parameters():
        if name in mask and param.dtype in (torch.bfloat16, torch.float16):
            warnings.warn(
                f"{name} is {param.dtype}, and master_weights and stochastic_rounding are False: updates below half a "
                "unit in the last place are lost; set one of the two to True",
                stacklevel=3,
            )
            return
