"""Binds a mask to parameters: the active parameters, their buckets, and the implementation that serves each bucket."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .. import backends
from ..masks.mask_set import MaskSet, require_own_memory
from ..ops.checks import FLOAT_DTYPES
from .buckets import Bucket
from .gradient_buffer import NativeGradientBuffer, PythonGradientBuffer
from .segments import Segments, fits_uint16, index_dtype, pack_indices, run_length_of
from .stepping import NativeStepper, Stepper
from .tiles import Tiles


def active_parameters(
    named: dict[str, Parameter], mask: MaskSet, frozen: Collection[Parameter], model: nn.Module | None
) -> tuple[MaskSet, dict[Parameter, Tensor]]:
    """Return the mask under the parameters' names, and the indices of each parameter with active elements.

    Args:
        frozen: parameters that do not require grad only because the optimizer has frozen them.
        model: the module that the parameters belong to, if known; it may have others.

    Raises:
        MaskError: the mask does not fit the model, or a parameter with active elements shares memory with another.
        ValueError: the mask has no active element, or one in a parameter that cannot be trained.
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
            raise ValueError(f"{name!r} has strides {param.stride()}, expected a contiguous parameter")
        if param.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name!r} is {param.dtype}, expected bfloat16, float16 or float32")
    return mask, active


def build_buckets(
    groups: list[dict[str, Any]], active: dict[Parameter, Tensor], pattern: str, backend: str | None
) -> list[Bucket]:
    """Build the buckets of all groups, in the groups' order, without state and gradients, for a mask of `pattern`."""
    buckets: list[Bucket] = []
    for group, names, params, run_length, narrow in _bucket_keys(groups, active, pattern):
        segments = _segments_of(params, active, run_length, narrow)
        buckets.append(
            Bucket(
                **segments.shared(),
                group=group,
                names=names,
                ordinal=len(buckets),
                ops=backends.functions(segments.device, backend),
                lr=torch.zeros(1, dtype=torch.float32, device=segments.device),
                steps=torch.zeros(len(params), dtype=torch.float32, device=segments.device),
            )
        )
    return buckets


def _bucket_keys(
    groups: list[dict[str, Any]], active: dict[Parameter, Tensor], pattern: str
) -> Iterator[tuple[dict[str, Any], list[str], list[Parameter], int, bool]]:
    """Split each group's active parameters into sets that one op call can take: same device, dtype and index layout.

    The last two results are the run length and whether indices take two bytes. The run length follows from the mask's
    pattern; it is 1 for parameters whose rows do not hold whole runs. Two bytes suffice unless the active elements are
    scattered too widely.
    """
    for group in groups:
        split: dict[tuple[torch.device, torch.dtype, torch.dtype, int, bool], tuple[list[str], list[Parameter]]] = {}
        # The last parameter may be a ScalerProxy's, which has no name.
        for name, param in zip(group["param_names"], group["params"], strict=False):
            if param in active:
                run_length = run_length_of(param.shape, pattern)
                narrow = fits_uint16(param, active[param], run_length)
                key = (param.device, param.dtype, index_dtype(param), run_length, narrow)
                names, params = split.setdefault(key, ([], []))
                names.append(name)
                params.append(param)
        for (_, _, _, run_length, narrow), (names, params) in split.items():
            yield group, names, params, run_length, narrow


def _segments_of(params: list[Parameter], active: dict[Parameter, Tensor], run_length: int, narrow: bool) -> Segments:
    """Concatenate the indices of `params` on their device."""
    device = params[0].device
    counts = [active[p].numel() for p in params]
    ends = list(accumulate(counts))
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    parts = [active[p][::run_length].to(index_dtype(p)) for p in params]
    indices, index_bases = pack_indices(parts, starts, ends, narrow)
    index_bases = None if index_bases is None else index_bases.to(device)
    return Segments(params, indices.to(device), index_bases, starts, ends, run_length)


def bind(
    bucket: Bucket, op: str, backend: str | None, *, values: Tensor, tiles: Tiles | None, compact: bool
) -> Stepper:
    """Set the bucket's gradient buffer, and return the object that prepares its steps.

    This is the only place that chooses between the native and the Python implementation of both. With dense gradients
    autograd delivers nothing, and one op call gathers all gradients if they are clipped.

    Args:
        op: the name of the step's op.
        values: memory of the compact gradient, [nnz]; with dense gradients it may be [0].
        compact: whether the optimizer was built with grads='compact'.
    """
    bound = backends.bind(
        op,
        bucket.params,
        bucket.indices,
        bucket.starts,
        bucket.ends,
        run_length=bucket.run_length,
        index_bases=bucket.index_bases,
        backend=backend,
    )
    buffer = {
        **bucket.shared(),
        "names": bucket.names,
        "values": values,
        "sum_sq": torch.zeros(len(bucket.params), dtype=torch.float32, device=bucket.device),
        "tiles": tiles,
        "ops": bucket.ops,
    }
    if bound is not None and compact:
        bucket.gradient = NativeGradientBuffer(**buffer, bound=bound)
    else:
        bucket.gradient = PythonGradientBuffer(**buffer)
    return Stepper(bucket) if bound is None else NativeStepper(bucket, bound)
