"""From a mask and parameter groups to buckets. Checks and builds; changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from ..masks import MaskSet, require_own_memory
from ..ops.checks import FLOAT_DTYPES
from .buckets import Bucket, bucket_keys, build_bucket


def active_parameters(
    named: dict[str, Parameter], mask: MaskSet, frozen: Collection[Parameter], model: nn.Module | None
) -> tuple[MaskSet, dict[Parameter, Tensor]]:
    """The mask under the parameters' names, and the indices of each parameter with active elements.

    Args:
        frozen: parameters that need no gradient only because the optimizer has frozen them.
        model: the module they are of, if it is known; it may have other parameters.

    Raises:
        MaskError: the mask belongs to another model, or a parameter with active elements shares memory with another.
        ValueError: it has no active element, or one in a parameter that can't be trained.
    """
    mask = mask.resolve(named)
    active = {named[name]: mask[name] for name in mask.names if mask[name].numel()}
    if not active:
        raise ValueError(f"the mask has no active element in any of the {len(named)} parameters given")
    if model is not None:
        of_model = dict(model.named_parameters())
        ids = {id(p) for p in active}
        require_own_memory(of_model, [name for name, p in of_model.items() if id(p) in ids])
    ours = {id(p) for p in frozen}
    for name, param in named.items():
        if param not in active:
            continue
        if not param.requires_grad and id(param) not in ours:
            raise ValueError(
                f"the mask has {active[param].numel()} active elements in {name!r}, which does not require grad"
            )
        if not param.is_contiguous():
            raise ValueError(f"{name!r} has strides {param.stride()}, wanted a contiguous parameter")
        if param.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name!r} is {param.dtype}, wanted bfloat16, float16 or float32")
    return mask, active


def build_buckets(
    groups: list[dict[str, Any]], active: dict[Parameter, Tensor], pattern: str, op: str, backend: str | None
) -> list[Bucket]:
    """The buckets of all groups, in the groups' order, without state and gradients. `pattern` is the mask's."""
    return [
        build_bucket(
            group, names, params, active, run_length=run_length, narrow=narrow, ordinal=ordinal, op=op, backend=backend
        )
        for ordinal, (group, names, params, run_length, narrow) in enumerate(bucket_keys(groups, active, pattern))
    ]
