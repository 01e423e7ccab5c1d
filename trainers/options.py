"""Options that every training loop has: what to train, on which data, how, and where the results go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparse_opt.delta_schedule import Schedule
from sparse_opt.errors import ConfigError

from .config import option


@dataclass(kw_only=True)
class TrainingOptions:
    """Shared by all loops; each adds its own in a subclass."""

    policy_name: str = option(help="model to train: hub name or local folder", aliases=("model_name",))
    checkpoint: Path | None = option(
        None, "local folder with other weights of the model policy_name; training starts from them"
    )
    dataset: str = option(help="hub name, or local .json, .jsonl or .parquet file")
    dataset_split: str = option("train", "split of a hub dataset")
    subset_size: int | None = option(None, "train on this many examples, drawn with the seed")
    max_length: int = option(1024, "longest sequence in tokens, prompt and completion together")
    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start", "which end of a sequence longer than max_length stays (as in TRL)"
    )

    mode: Literal["dense", "sparse"] = option("dense", "train all weights, or the mask's active elements only")
    mask: Path | None = option(None, "mask file of mode sparse")
    mlp_only: bool = option(False, "train MLP weights only; with a mask, its elements in MLP weights only")
    backend: Literal["auto", "reference", "cpu", "triton", "cuda"] = option("auto", "kernels of mode sparse")
    device: str = option("auto", "torch device; auto is cuda where there is one, else cpu")
    dtype: Literal["bf16", "fp32"] = option("bf16", "dtype of the weights")
    master_weights: bool | None = option(
        None, "keep fp32 master copies of the trained weights; none means yes for 16-bit weights"
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")

    n_steps: int = option(100, "optimizer steps")
    batch_size: int = option(4, "examples per forward pass")
    gradient_accumulation_steps: int = option(1, "forward passes per optimizer step")
    learning_rate: float = option(1e-6, "peak learning rate")
    lr_schedule: Literal["linear", "cosine", "constant"] = option(
        "linear", "learning rate after warm-up, to step n_steps"
    )
    warmup_steps: int = option(0, "steps of linear warm-up from 0")
    weight_decay: float = option(0.0, "decoupled weight decay")
    adam_beta1: float = option(0.9, "AdamW beta1")
    adam_beta2: float = option(0.999, "AdamW beta2")
    adam_epsilon: float = option(1e-8, "AdamW epsilon")
    max_grad_norm: float | None = option(1.0, "clip the global gradient norm to this; none to leave it")
    seed: int = option(0, "seed of the example order; on a CPU the same seed gives the same run")

    output_dir: Path | None = option(
        None, "new or empty folder for metrics and the final checkpoint; none is checkpoints_{model}_{algorithm}"
    )
    delta_log_dir: Path | None = option(None, "write a delta log of the weights to this folder")
    delta_log_steps: str = option(
        "every:10,last",
        "steps to log: '1,5,10', '1-10', '10-100:10', 'every:5', 'last', 'until:500', or several with commas",
    )
    delta_log_level: Literal["fast", "packed", "tight"] = option("packed", "how small patches of the log are coded")

    def __post_init__(self) -> None:
        for name in ("n_steps", "batch_size", "gradient_accumulation_steps", "subset_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"option '{name}' is {value}: wanted at least 1")
        if self.max_length < 2:
            raise ConfigError(
                f"option 'max_length' is {self.max_length}: wanted at least 2 (a prompt and a completion token)"
            )
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"option '{name}' is {getattr(self, name)}: wanted at least 0")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"option 'max_grad_norm' is {self.max_grad_norm}: wanted more than 0, or none")
        if self.mode == "sparse" and self.mask is None:
            raise ConfigError("mode sparse wants a mask file: --mask FILE")
        if self.mode == "dense" and self.mask is not None:
            raise ConfigError(f"a mask ({self.mask}) is used in mode sparse only: add --mode sparse")
        if not Schedule.parse(self.delta_log_steps).steps(self.n_steps):
            raise ConfigError(
                f"option 'delta_log_steps' is '{self.delta_log_steps}': selects no step of 1 to n_steps {self.n_steps}"
            )

    @property
    def examples_per_step(self) -> int:
        """Examples in one optimizer step."""
        return self.batch_size * self.gradient_accumulation_steps


def model_slug(name: str) -> str:
    """A model's name as part of a file name: `meta_llama_llama_3_1_8b` for `meta-llama/Llama-3.1-8B`.

    Of a local folder only the last part counts.
    """
    if Path(name).exists():
        name = Path(name).resolve().name
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
