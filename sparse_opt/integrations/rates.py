"""A learning rate to start with under a mask, and a warning of one with which a mask hardly learns.

The best rates of the kept studies (docs/study.md) are 3 to 10 times the dense one at a density of 10 %, 10 to 48 times
at 2.5 %, and 32 to 95 times at 1 %: about density^-0.8. `rate_factor` is the lower end of these, a start for tuning.
"""

from __future__ import annotations

import warnings
from typing import Any

from ..masks.mask_set import MaskSet

EXPONENT = -0.75


def rate_factor(density: float) -> float:
    """density^-0.75: the factor of the dense learning rate to start with under a mask (10 %: 5.6, 1 %: 32)."""
    return float(density**EXPONENT)


def dense_rate(args: Any) -> float:
    """The default learning rate of a class of training arguments, which is one for training all weights."""
    return float(args.__dataclass_fields__["learning_rate"].default)


def warn_of_rate(args: Any, mask: MaskSet) -> None:
    """Warn if the rate is the dense default or below."""
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
