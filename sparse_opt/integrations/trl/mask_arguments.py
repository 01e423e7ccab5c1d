"""`MaskArguments`: the options of `sparse-opt train` in addition to TRL's: the mask, SparseAdamW and the logs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from ...delta.schedule import Schedule
from ...errors import ConfigError
from ..arguments import SparseArguments


def option(default: Any, text: str, *aliases: str) -> Any:
    """A field of a dataclass for TRL's parser; a default that is a list is copied. `text` is its help."""
    of_list: Any = {"default_factory": lambda: list(default)}
    metadata = {"help": text, "aliases": list(aliases)}
    return field(**(of_list if isinstance(default, list) else {"default": default}), metadata=metadata)


@dataclass(kw_only=True)
class MaskArguments:
    """A mask is a file or made at the start; without one, all weights are trained, or with --use_peft adapters.

    The options that are not described here are those of `SparseArguments`.
    """

    mask: str | None = option(None, "mask file; train the active elements of the mask only")
    mask_density: float | None = option(None, "share of active elements of a random mask, in place of --mask")
    mask_pattern: Literal["element", "run16", "run32", "tile64", "tile128"] = option(
        "element", "pattern of the random mask"
    )
    mask_seed: int = option(0, "seed of the random mask")
    mask_pool: Literal["tensor", "global"] = option("tensor", "draw from each tensor, or from all together")

    grads: Literal["compact", "dense"] = option("compact", "gather gradients when they are produced, or read them")
    state_dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of Adam's moments under a mask")
    grad_dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of compact gradients")
    master_weights: bool | None = option(
        None, "keep fp32 copies of active 16-bit weights; true unless --stochastic_rounding"
    )
    stochastic_rounding: bool = option(False, "round 16-bit weights up or down at random, in place of master weights")
    keep_base_weights: bool | None = option(
        None, "keep the initial active weights, the reference of DPO and GRPO; false for SFT without a log or a delta"
    )
    offload_base_weights: bool = option(False, "keep them in host memory")
    tile_backward: bool | None = option(None, "compute weight gradients of active tiles only; default: where faster")
    backend: str | None = option(None, "backend of the optimizer's kernels")
    vllm_weights: Literal["full", "sparse", "shared"] = option(
        "full", "send vLLM all weights, send it what changed, or share one copy of the weights with a colocated vLLM"
    )
    vllm_options: dict[str, Any] | str | None = option(None, "JSON: options of vllm.LLM for which TRL has no argument")  # noqa: RUF009

    save_delta: bool = option(False, "write what training changed, to share, next to the weights that are saved")
    save_weights: bool = option(True, "save the weights, too; false saves what training changed in their place")
    delta_log_dir: str | None = option(None, "folder of a log of the weights, from which masks are found")
    delta_log_steps: str = option("every:1,last", "steps to log: every:10,last or 10-40:10,100")
    delta_log_keyframe_every: int | None = option(None, "patches between two whole states")
    statistics_steps: int | None = option(None, "write ranks and shares of the update every N steps")
    statistics_tau: float = option(1e-6, "size of the changes counted in share_above_tau")
    log_margins: bool = option(False, "write the margin of each pair of DPO to logs/margins")

    def __post_init__(self) -> None:
        if self.mask is not None and self.mask_density is not None:
            raise ConfigError("--mask and --mask_density exclude each other: give one")
        if self.mask_density is not None and not 0 < self.mask_density <= 1:
            raise ConfigError(f"--mask_density is {self.mask_density}, expected a share above 0, and at most 1")
        if self.statistics_steps is not None and self.statistics_steps < 1:
            raise ConfigError(f"--statistics_steps is {self.statistics_steps}, expected 1 or more")
        if isinstance(self.vllm_options, str):
            try:
                self.vllm_options = json.loads(self.vllm_options)
            except ValueError as error:
                raise ConfigError(f"--vllm_options {self.vllm_options}: {error}, expected JSON") from error
        Schedule.parse(self.delta_log_steps)

    def require_used(self) -> None:
        """Raise a ConfigError that names an option without effect: one of a mask, without a mask."""
        of_log = ("delta_log_", "statistics_", "log_margins")
        for option in fields(self):
            name, drawn = option.name, option.name in ("mask_pattern", "mask_seed", "mask_pool")
            if getattr(self, name) == option.default or name.startswith(of_log):
                continue
            if drawn and self.mask_density is None:
                raise ConfigError(f"--{name} is of a random mask: give --mask_density, or leave it out")
            if not self.is_sparse:
                raise ConfigError(f"--{name} has no effect without a mask: give --mask or --mask_density")

    @property
    def is_sparse(self) -> bool:
        """Whether there is a mask."""
        return self.mask is not None or self.mask_density is not None

    def sparse_arguments(self, *, has_reference: bool, fp16: bool) -> SparseArguments:
        """The options of the sparse trainer.

        Args:
            has_reference: whether base weights are needed as the reference.
            fp16: whether the run has a GradScaler.
        """
        names = set(SparseArguments.__dataclass_fields__) & set(self.__dataclass_fields__)
        options = {name: getattr(self, name) for name in names}
        for name in ("state_dtype", "grad_dtype"):
            options[name] = getattr(torch, options[name])
        if self.master_weights is None:
            options["master_weights"] = not self.stochastic_rounding
        if self.keep_base_weights is None:
            options["keep_base_weights"] = has_reference or self.delta_log_dir is not None or self.save_delta
        return SparseArguments(**options, amp_scaling=fp16 and self.grads == "compact")
