"""`SparseArguments`: the options of SparseAdamW in a trainer, in addition to the trainer's own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..delta.schedule import Schedule
from ..errors import ConfigError
from ..masks.mask_set import MaskSet, RandomMask

Mask = MaskSet | RandomMask | float | str | PathLike[str] | Mapping[str, Tensor]


@dataclass(kw_only=True)
class SparseArguments:
    """Options of `SparseAdamW` and of the delta log, for `sparse_trainer`.

    Learning rate, betas, epsilon, weight decay, gradient norm and schedule are set by the trainer's own arguments.
    Their default rate is one for all weights, with which a mask hardly learns: a start for tuning is this rate times
    density^-0.75 (5.6 at 10 %, 16 at 2.5 %, 32 at 1 %). A trainer whose rate is the default or below warns.

    Args:
        grads, state_dtype, grad_dtype, master_weights, stochastic_rounding, freeze_inactive, keep_base_weights,
            offload_base_weights, compact_weights, amp_scaling, tile_backward, backend: see `SparseAdamW`. fp16 mixed
            precision requires `amp_scaling=True` or grads='dense'. In several processes compact gradients are averaged
            by the optimizer, and dense ones by DistributedDataParallel.
        seed: seed of the stochastic rounding; None takes the trainer's seed.
        delta_log_dir: folder of a `DeltaLog` of the weights; None writes no log. In a folder without a log, a new one
            is created whose step 0 is W0, even if the run is resumed; otherwise a resumed run appends to the existing
            log. Patches are coded over the mask's elements.
        delta_log_steps: the optimizer steps to log (`delta.schedule.Schedule`): `every:10,last`, `1-100:10,until:500`.
        delta_log_keyframe_every: keyframe_every of `DeltaLog.create`.
        save_delta: write a `SparseDelta`, what training has changed since W0, next to the weights of each checkpoint
            and of the saved model; `push_to_hub` uploads that of the model. Not with FSDP2.
        save_weights: False saves the delta alone, in place of the weights. A run resumes from such a checkpoint if its
            model has the weights that the first run started from.
        vllm_weights: how the weights of GRPO with `use_vllm=True` reach vLLM. "full": TRL sends all of them before
            vLLM generates. "sparse": the values that have changed under the mask are sent; the model needs vLLM's
            dtype and the weights of the checkpoint that vLLM has loaded. With `vllm_mode="server"` the server needs
            the backend `sparse_opt`, see `integrations.vllm.VLLMWeightSync`. "shared": nothing is sent, because the
            model's parameters are views of vLLM's, with `vllm_mode="colocate"` only; see
            `integrations.vllm.share_weights`. With `vllm_enable_sleep_mode`, vLLM then gives its key-value cache
            back while the model trains. A colocated vLLM has no tensor parallelism with "sparse" and "shared", and no
            sleep mode with "sparse".
        vllm_options: options of `vllm.LLM` for which TRL has no argument, with `vllm_mode="colocate"` and another
            `vllm_weights` than "full": `{"enforce_eager": True, "enable_prefix_caching": False}`.

    Raises:
        ConfigError: an option of the log is out of range, or has no effect without `delta_log_dir`; or a log or
            a delta is requested with keep_base_weights=False; or vllm_options with vllm_weights="full".
    """

    grads: Literal["compact", "dense"] = "compact"
    state_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    master_weights: bool = False
    stochastic_rounding: bool = False
    seed: int | None = None
    freeze_inactive: bool = True
    keep_base_weights: bool = True
    offload_base_weights: bool = False
    compact_weights: bool = False
    amp_scaling: bool = False
    tile_backward: bool | None = None
    backend: str | None = None
    delta_log_dir: str | PathLike[str] | None = None
    delta_log_steps: str = "every:1,last"
    delta_log_keyframe_every: int | None = None
    save_delta: bool = False
    save_weights: bool = True
    vllm_weights: Literal["full", "sparse", "shared"] = "full"
    vllm_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        Schedule.parse(self.delta_log_steps)
        if self.vllm_weights not in ("full", "sparse", "shared"):
            raise ConfigError(f"vllm_weights is {self.vllm_weights!r}, expected full, sparse or shared")
        if self.vllm_options is not None and self.vllm_weights == "full":
            raise ConfigError("vllm_options needs vllm_weights='sparse' or 'shared', which is 'full'")
        if self.delta_log_keyframe_every is not None and self.delta_log_keyframe_every < 1:
            raise ConfigError(f"delta_log_keyframe_every is {self.delta_log_keyframe_every}, expected 1 or more")
        for option in fields(self):
            if self.delta_log_dir is None and option.name.startswith("delta_log_"):
                if getattr(self, option.name) != option.default:
                    raise ConfigError(f"{option.name} has no effect without delta_log_dir")
        if self.delta_log_dir is not None and not self.keep_base_weights:
            raise ConfigError("delta_log_dir needs keep_base_weights=True: a delta log starts with the base weights")
        if not self.save_weights and not self.save_delta:
            raise ConfigError("save_weights=False needs save_delta=True: a checkpoint would have no weights at all")
        if self.save_delta and not self.keep_base_weights:
            raise ConfigError("save_delta needs keep_base_weights=True: a delta is the difference to the base weights")


def read_mask(mask: Mask) -> MaskSet | RandomMask | float:
    """Make a MaskSet of a file for `MaskSet.load`, or of a dictionary of bool tensors; return other masks as they are.

    Raises:
        MaskError: the file or a tensor is not a mask; the message names it.
        TypeError: `mask` has another type.
    """
    if isinstance(mask, MaskSet | RandomMask | int | float) and not isinstance(mask, bool):
        return mask
    if isinstance(mask, Mapping):
        return MaskSet.from_bool(mask)
    if isinstance(mask, str | PathLike):
        return MaskSet.load(Path(mask))
    raise TypeError(
        f"mask is a {type(mask).__name__}, expected a MaskSet, a RandomMask, a density, a path, or a dict of bool "
        "tensors"
    )
