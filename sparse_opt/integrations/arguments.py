"""What SparseAdamW in a trainer is told beside the trainer's own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..masks import MaskSet

Mask = MaskSet | str | PathLike[str] | Mapping[str, Tensor]


@dataclass(kw_only=True)
class SparseArguments:
    """Options of `SparseAdamW` and of the delta log, for `sparse_trainer`.

    Learning rate, betas, epsilon, weight decay, gradient norm and schedule are the trainer's own arguments.

    Args:
        grads, state_dtype, grad_dtype, master_weights, stochastic_rounding, freeze_inactive, keep_base_weights,
            amp_scaling, backend: as `SparseAdamW` takes them. fp16 mixed precision wants `amp_scaling=True` or
            grads='dense'; DistributedDataParallel wants grads='dense'.
        seed: of the stochastic rounding; None takes the trainer's seed.
        delta_log_dir: where to keep a `DeltaLog` of the weights; None keeps none. A folder without a log gets one whose
            step 0 is W0, also when a run is resumed; a resumed run appends to the log that is there.
        delta_log_every: log the weights after every so many optimizer steps, and after the last of `max_steps`.
        delta_log_keyframe_every: `DeltaLog.create`'s keyframe_every.

    Raises:
        ConfigError: an option of the log is out of range, or does nothing without `delta_log_dir`; a log is wanted and
            the base weights are not.
    """

    grads: Literal["compact", "dense"] = "compact"
    state_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    master_weights: bool = False
    stochastic_rounding: bool = False
    seed: int | None = None
    freeze_inactive: bool = True
    keep_base_weights: bool = True
    amp_scaling: bool = False
    backend: str | None = None
    delta_log_dir: str | PathLike[str] | None = None
    delta_log_every: int = 1
    delta_log_keyframe_every: int | None = None

    def __post_init__(self) -> None:
        if self.delta_log_every < 1:
            raise ConfigError(f"delta_log_every is {self.delta_log_every}, wanted 1 or more")
        if self.delta_log_keyframe_every is not None and self.delta_log_keyframe_every < 1:
            raise ConfigError(f"delta_log_keyframe_every is {self.delta_log_keyframe_every}, wanted 1 or more, or None")
        if self.delta_log_dir is None and (self.delta_log_every != 1 or self.delta_log_keyframe_every is not None):
            raise ConfigError("delta_log_every and delta_log_keyframe_every do nothing without delta_log_dir")
        if self.delta_log_dir is not None and not self.keep_base_weights:
            raise ConfigError("a delta log begins with the base weights: delta_log_dir wants keep_base_weights=True")


def as_mask(mask: Mask) -> MaskSet:
    """The mask from an object, a file that `MaskSet.load` reads, or name -> bool tensor.

    Raises:
        MaskError: the file or a tensor is not a mask; names it.
        TypeError: it is none of these.
    """
    if isinstance(mask, MaskSet):
        return mask
    if isinstance(mask, Mapping):
        return MaskSet.from_bool(mask)
    if isinstance(mask, str | PathLike):
        return MaskSet.load(Path(mask))
    raise TypeError(f"mask is a {type(mask).__name__}, wanted a MaskSet, a path, or a dict of bool tensors")
