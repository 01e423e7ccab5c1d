"""Masks found from the weight changes that a delta log kept."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from .delta_log import DeltaLog, StateDelta
from .delta_state import TensorSpec
from .errors import MaskError
from .masks import MaskSet
from .score_selection import change_bits, crossing, lower_histogram, top, upper_histogram

# What transformers' models call their feed-forward blocks: Llama, Qwen, Gemma, GPT-2 mlp; Mixtral block_sparse_moe; OPT
# fc1 and fc2.
_MLP_NAMES = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "fc1", "fc2"})

_INFINITY_BITS = 0x7F800000


def mask_file_name(sparsity: float, method: str, step: int) -> str:
    """`sparsity_97.5pct_magnitude_step50.safetensors`; sparsity in percent."""
    return f"sparsity_{float(sparsity)}pct_{method}_step{step}.safetensors"


def is_mlp_parameter(name: str) -> bool:
    """True if a dotted part of the name is mlp, feed_forward, ffn, block_sparse_moe, fc1 or fc2."""
    return not _MLP_NAMES.isdisjoint(name.split("."))


def select_names(
    names: Iterable[str],
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
) -> list[str]:
    """The names that a choice of tensors leaves, in their order.

    Args:
        include: shell patterns (`*.layers.3.*`), case-sensitive, over whole names; a name must match one. None: all do.
        exclude: likewise; a name must match none.
        mlp_only: only tensors of feed-forward blocks (`is_mlp_parameter`).
    """
    return [
        name
        for name in names
        if (include is None or any(fnmatchcase(name, pattern) for pattern in include))
        and not any(fnmatchcase(name, pattern) for pattern in exclude or ())
        and (not mlp_only or is_mlp_parameter(name))
    ]


def find_magnitude(
    log: DeltaLog,
    *,
    sparsity: float,
    target_step: int | None = None,
    min_tensor_keep: float = 0.0025,
    pool: Literal["global", "tensor"] = "global",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
) -> MaskSet:
    """Keep the elements that moved furthest from the base weights: score abs(W_t - W_0), in fp32.

    Of the N elements of the chosen tensors, round((100 - sparsity) % of N) are kept. Pool `global`: each tensor first
    keeps its own best ceil(min_tensor_keep * numel), then the best of all others fill the quota. Pool `tensor`: each
    tensor keeps its own share, or its floor if that is more. The result is that of sorting all scores at once: ties go
    to the earlier tensor, in the model's order, and then to the lower position.

    An element that did not move is never kept, neither for the quota nor for a floor: nothing but its position would
    speak for it. Where fewer elements moved than were asked for, the mask keeps those that did, and a UserWarning says
    so; a tensor that did not move at all is listed without active elements. Where none moved, there is no mask.

    The base is read tensor by tensor and three times over; the state of the target step is held in memory.

    Args:
        log: the delta log of a run.
        sparsity: percent of elements to leave out, above 0 and below 100.
        target_step: t, a logged step; the last one by default.
        min_tensor_keep: the floor, as a share of each tensor, 0 to 1.
        pool: where elements compete.
        include, exclude, mlp_only: which tensors take part (`select_names`), out of the floating-point parameters.

    Returns:
        A mask over the chosen tensors, with the metadata method, sparsity, step, pool, min_tensor_keep, log_digest (of
        the target state), and model where the log's metadata has one.

    Raises:
        MaskError: an argument out of range, no tensor chosen, the floors alone exceed the quota, a score is NaN (names
            the tensor), or no element moved.
        DeltaLogError: the log is damaged, or the step is not logged.
    """
    if not 0.0 < sparsity < 100.0:
        raise MaskError(f"sparsity is {sparsity} percent, wanted above 0 and below 100")
    if not 0.0 <= min_tensor_keep <= 1.0:
        raise MaskError(f"min_tensor_keep is {min_tensor_keep}, wanted a share from 0 to 1")
    if pool not in ("global", "tensor"):
        raise MaskError(f"pool is {pool!r}, wanted global or tensor")
    step = log.steps[-1] if target_step is None else target_step
    specs = _chosen(log, include, exclude, mlp_only)
    quota = _rounded(specs, 100.0 - sparsity)
    floors = {name: math.ceil(min_tensor_keep * spec.numel) for name, spec in specs.items()}
    if pool == "global" and sum(floors.values()) > quota:
        raise MaskError(
            f"min_tensor_keep {min_tensor_keep} keeps {sum(floors.values())} elements, "
            f"but sparsity {sparsity} leaves {quota}: lower one of the two"
        )
    scores = _Scores(log.iter_delta(step, list(specs)))
    threshold: int | None = None
    if pool == "global":
        wanted = quota
        kept, threshold = _global_counts(scores, floors, quota)
    else:
        kept = {n: max(floors[n], _rounded({n: spec}, 100.0 - sparsity)) for n, spec in specs.items()}
        wanted = sum(kept.values())
    indices = {}
    for name, bits in scores:
        indices[name] = top(bits, min(kept[name], int(bits.count_nonzero())), threshold)
    found = sum(t.numel() for t in indices.values())
    if wanted and not found:
        raise MaskError(
            f"{log.directory}: no element of step {step} has changed since step {log.steps[0]} in the chosen tensors; "
            "wanted a step after training moved them"
        )
    if found < wanted:
        warnings.warn(
            f"only {found} elements moved by step {step}: the mask keeps these, not the {wanted} that were asked for",
            stacklevel=2,
        )
    metadata = {
        "method": "magnitude",
        "sparsity": str(float(sparsity)),
        "step": str(step),
        "pool": pool,
        "min_tensor_keep": str(min_tensor_keep),
        "log_digest": log.digest(step),
    }
    model = log.metadata.get("model")
    if model is not None:
        metadata["model"] = model
    return MaskSet(indices, {name: spec.shape for name, spec in specs.items()}, metadata=metadata)


class _Scores:
    """(name, score bits) of each tensor, as often as it is iterated."""

    def __init__(self, delta: StateDelta) -> None:
        self._delta = delta

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, base, tensor in self._delta:
            bits = change_bits(base, tensor)
            if bits.numel() and int(bits.max()) > _INFINITY_BITS:
                nans = int((bits > _INFINITY_BITS).count_nonzero())
                raise MaskError(f"the change of {name} is NaN at {nans} of {bits.numel()} elements, wanted numbers")
            yield name, bits


def _global_counts(scores: _Scores, floors: Mapping[str, int], quota: int) -> tuple[dict[str, int], int]:
    """How many elements each tensor keeps, and the bits of the score at which the quota ends."""
    uppers = {name: upper_histogram(bits) for name, bits in scores}
    # A floor, and the quota, cannot ask for more than moved.
    floors = {name: min(floors[name], histogram.total) for name, histogram in uppers.items()}
    quota = min(quota, sum(histogram.total for histogram in uppers.values()))
    if quota == sum(floors.values()):
        return floors, 0
    upper = crossing(uppers, dict.fromkeys(uppers, 0), floors, quota)
    over = {name: histogram.at_least(upper + 1) for name, histogram in uppers.items()}
    lowers = {name: lower_histogram(bits, upper) for name, bits in scores}
    lower = crossing(lowers, over, floors, quota)
    # Everything above the threshold is kept, and as many at the threshold as there is room for, earlier tensors first.
    kept = {name: max(floors[name], over[name] + h.at_least(lower + 1)) for name, h in lowers.items()}
    room = quota - sum(kept.values())
    for name, histogram in lowers.items():
        ties = min(room, max(0, over[name] + histogram.at_least(lower) - kept[name]))
        kept[name] += ties
        room -= ties
    return kept, (upper << 16) + lower


def _chosen(
    log: DeltaLog, include: Sequence[str] | None, exclude: Sequence[str] | None, mlp_only: bool
) -> dict[str, TensorSpec]:
    layout = log.layout
    specs = {
        spec.name: spec
        for spec in layout.tensors
        if spec.name not in layout.buffers and getattr(torch, spec.dtype).is_floating_point
    }
    names = select_names(specs, include=include, exclude=exclude, mlp_only=mlp_only)
    if not names:
        raise MaskError(f"no tensor of {log.directory} is chosen by include, exclude and mlp_only")
    return {name: specs[name] for name in names}


def _rounded(specs: Mapping[str, TensorSpec], percent: float) -> int:
    """`percent` of the tensors' elements, halves rounded up."""
    return math.floor(percent * sum(spec.numel for spec in specs.values()) / 100.0 + 0.5)
