"""Options of training: weights, optimizer, length, evaluation, and what a run writes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparse_opt.config import option, require_count
from sparse_opt.delta.schedule import Schedule
from sparse_opt.errors import ConfigError

from .model import ModelOptions


@dataclass(kw_only=True)
class TrainingOptions(ModelOptions):
    """Shared by all loops; each adds its own in a subclass."""

    max_length: int = option(
        1024,
        "longest sequence in tokens, prompt and completion together",
        at_least=2,
        aliases=("max_len", "max_seq_length"),
    )
    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start", "the end of a sequence longer than max_length that is kept (as in TRL)"
    )

    mode: Literal["dense", "sparse", "lora"] | None = option(
        None,
        "train all weights, the mask's active elements only, or low-rank adapters (peft); none is sparse with a mask, "
        "dense without",
        hints={"use_peft": "mode=lora"},
    )
    mask: Path | None = option(None, "mask file of mode sparse")
    adapter: Literal["lora", "shira", "supertuning"] = option(
        "lora",
        "adapters of mode lora: low-rank ones; SHiRA's, rank x (m + n) values of an m x n weight at random; or "
        "Super-Tuning's, as many in all, the largest of each weight",
    )
    lora_rank: int = option(16, "rank of mode lora's adapters, on all linear layers but the output", at_least=1)
    lora_alpha: int | None = option(None, "alpha of mode lora's adapters; none is twice the rank", at_least=1)
    mlp_only: bool = option(False, "train MLP weights only; with a mask, its elements in MLP weights only")
    backend: Literal["auto", "reference", "cpu", "triton", "cuda"] = option("auto", "kernels of mode sparse")
    master_weights: bool | None = option(
        None, "keep fp32 master copies of the trained weights; none means yes for 16-bit weights, unless lean"
    )
    lean: bool = option(
        False,
        "mode sparse in bf16: bf16 moments and compact gradients, stochastic rounding in place of fp32 master copies, "
        "and the initial values in host memory: with AdamW 6 bytes for each active weight on the GPU, and its index",
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    compile: bool = option(
        False,
        "torch.compile the model's layers (regional compilation): less time and activation memory, after a minute of "
        "compilation",
        aliases=("torch_compile", "use_compile"),
    )

    gather_for_generation: bool = option(
        True,
        "with parallel fsdp: gather all weights on every GPU while completions are sampled; false gathers a layer at a "
        "time for each token, for models that do not fit one GPU",
        aliases=("ds3_gather_for_generation",),
    )

    n_steps: int = option(100, "steps, each with its own batch", at_least=1, aliases=("max_steps", "num_updates"))
    n_epochs: float | None = option(
        None,
        "train for this many passes over the data, in place of n_steps steps",
        above=0,
        aliases=("num_train_epochs", "epochs"),
        in_place_of="n_steps",
    )
    batch_size: int = option(4, "examples per forward pass", at_least=1)
    per_device_train_batch_size: int | None = option(
        None,
        "examples per forward pass of each process, in place of batch_size, which is that of all",
        at_least=1,
        in_place_of="batch_size",
    )
    train_batch_size: int | None = option(
        None,
        "examples per optimizer step, in place of gradient_accumulation_steps, which becomes this over batch_size",
        at_least=1,
        in_place_of="gradient_accumulation_steps",
    )
    gradient_accumulation_steps: int = option(
        1, "forward passes per optimizer step", at_least=1, aliases=("grad_accum",)
    )
    dataloader_num_workers: int = option(
        0, "processes that make the batches of coming steps while a step runs; 0 makes them within the step", at_least=0
    )
    group_by_length: bool = option(
        False, "put examples of similar lengths into the same step, for less padding; the steps are in random order"
    )
    learning_rate: float = option(1e-6, "peak learning rate", at_least=0, aliases=("lr",))
    lr_schedule: Literal["linear", "cosine", "constant"] = option(
        "linear", "learning rate after warm-up, to step n_steps", aliases=("lr_scheduler_type",)
    )
    warmup_steps: int = option(
        0,
        "steps of linear warm-up from 0",
        at_least=0,
        in_place_of=lambda steps: "warmup_steps" if steps else None,  # 0, and a ratio: transformers' files have both
    )
    warmup_ratio: float | None = option(
        None,
        "warm-up as a share of n_steps, if warmup_steps is 0",
        at_least=0,
        at_most=1,
        in_place_of="warmup_steps",
    )
    optim: Literal["adamw_torch_fused", "adamw_torch", "sgd"] = option(
        "adamw_torch_fused",
        "AdamW, in the modes dense and lora by torch's fused kernel or its slower default; or SGD without momentum",
        aliases=("optimizer",),
    )
    weight_decay: float = option(0.0, "decoupled weight decay", at_least=0)
    adam_beta1: float = option(0.9, "AdamW beta1", at_least=0, below=1)
    adam_beta2: float = option(0.999, "AdamW beta2", at_least=0, below=1)
    adam_epsilon: float = option(1e-8, "AdamW epsilon", at_least=0, aliases=("adam_eps",))
    max_grad_norm: float | None = option(
        1.0, "clip the global gradient norm to this; none to leave it", above=0, aliases=("grad_clip",)
    )

    eval_dataset: str | None = option(
        None,
        "evaluate on this dataset: hub name or local file, of the training format",
        hints=dict.fromkeys(("eval_strategy", "evaluation_strategy"), "eval_dataset or eval_ratio, with eval_steps"),
    )
    eval_ratio: float | None = option(
        None,
        "without an eval_dataset: hold out this share of the examples, drawn with the seed, and evaluate on them",
        above=0,
        below=1,
        aliases=("val_ratio",),
        in_place_of="eval_dataset",
    )
    eval_dataset_split: str = option("test", "split of a hub eval_dataset")
    eval_subset_size: int | None = option(None, "evaluate on this many examples, drawn with the seed", at_least=1)
    eval_steps: int = option(
        50,
        "with an eval_dataset: evaluate every so many steps, before the first, after the last",
        at_least=1,
        aliases=("eval_interval",),
    )

    output_dir: Path | None = option(
        None, "new or empty folder for metrics and checkpoints; none is checkpoints_{model}_{algorithm}"
    )
    save_dir: Path | None = option(None, "new or empty folder for the final model; none is final in output_dir")
    resume: bool = option(
        False,
        "resume from the newest checkpoint in output_dir; from the beginning if there is none yet",
        hints={"resume_from_checkpoint": "resume, and resume_step for another than the newest"},
    )
    resume_step: int | None = option(
        None,
        "with resume: resume from the checkpoint of this step, and remove later ones; 0 is the beginning",
        at_least=0,
    )
    save_steps: int | None = option(
        None,
        "write a checkpoint to resume from every so many steps; none writes none",
        at_least=1,
        aliases=("save_every", "save_interval", "save_ckpt_every"),
    )
    save_strategy: Literal["no", "steps", "epoch"] | None = option(
        None,
        "epoch sets save_steps to the steps of a pass over the data; no sets it to none; steps uses it",
        in_place_of=lambda strategy: None if strategy == "steps" else "save_steps",
    )
    save_total_limit: int | None = option(
        2,
        "keep this many of the newest checkpoints to resume from; none keeps all, and one of the initial weights",
        at_least=1,
    )
    sample_steps: int | None = option(25, "write sample completions every so many steps; none writes none", at_least=1)
    logging_steps: int = option(
        1,
        "report metrics to trackers every so many steps, as means over these; metrics.jsonl has every step",
        at_least=1,
        aliases=("log_steps", "log_interval"),
    )
    report_to: list[Literal["wandb", "tensorboard"]] = option(
        [], "send metrics to wandb, tensorboard, or both", hints={"use_wandb": "report_to=wandb"}
    )
    project_name: str | None = option(
        None, "project at wandb; none is {model}-{algorithm}-subnetwork-emergence", aliases=("wandb_project",)
    )
    run_name: str | None = option(
        None, "name of the run at wandb; none is the output folder's", aliases=("wandb_run_name",)
    )

    statistics_steps: int | None = option(
        None,
        "measure the update's sparsity and ranks every so many steps; keeps the initial weights on the CPU",
        at_least=1,
        aliases=("rank_log_every",),
    )
    statistics_include: list[str] | None = option(
        None, "shell patterns of the weight matrices whose ranks are computed; none selects all"
    )
    statistics_method: Literal["exact", "gram", "lowrank"] = option("gram", "method for the singular values")
    statistics_tau: float = option(
        1e-6, "count the weights of these matrices that moved by more than this", at_least=0, aliases=("tau",)
    )

    delta_log_dir: Path | None = option(
        None,
        "write a delta log of the weights to this folder; auto is delta_log in output_dir or, if that is not given, "
        "delta_logs_{model}, with _{algorithm} except for dpo; auto_if_dense is auto in mode dense, else none",
    )
    delta_log_steps: str = option(
        "every:10,last",
        "steps to log: '1,5,10', '1-10', '10-100:10', 'every:5', 'last', 'until:500', or several with commas",
    )
    delta_log_level: Literal["fast", "packed", "tight"] = option(
        "packed", "encoding of the log's patches, from the fastest to the smallest"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume_step is not None and not self.resume:
            raise ConfigError(f"option 'resume_step' is {self.resume_step}: it is used with --resume only")
        if self.per_device_train_batch_size is not None:
            self.batch_size = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
            self.per_device_train_batch_size = None
        if self.train_batch_size is not None:
            if self.train_batch_size % self.batch_size:
                raise ConfigError(
                    f"option 'train_batch_size' is {self.train_batch_size}, the examples per optimizer step: expected "
                    f"a multiple of batch_size {self.batch_size}, the examples per forward pass"
                )
            self.gradient_accumulation_steps = self.train_batch_size // self.batch_size
            self.train_batch_size = None
        if self.warmup_steps:
            self.warmup_ratio = None
        require_count("batch_size x gradient_accumulation_steps", self.batch_size * self.gradient_accumulation_steps)
        if self.save_strategy == "no":
            self.save_steps = None
        if self.save_strategy == "steps" and self.save_steps is None:
            raise ConfigError("option 'save_strategy' is steps: expected save_steps")
        if self.eval_ratio is not None and self.eval_dataset is not None:
            raise ConfigError(
                f"option 'eval_ratio' is {self.eval_ratio:g}, and eval_dataset is {self.eval_dataset}: give one"
            )
        if self.mode is None:
            self.mode = "dense" if self.mask is None else "sparse"
        if self.mode == "sparse" and self.mask is None:
            raise ConfigError("mode sparse needs a mask file: --mask FILE")
        if self.mode != "sparse" and self.mask is not None:
            raise ConfigError(
                f"a mask ({self.mask}) is used in mode sparse only, and mode is {self.mode}: leave out one"
            )
        if self.adapter != "lora" and (self.mode != "lora" or self.lora_alpha is not None):
            raise ConfigError(
                f"option 'adapter' is {self.adapter} with mode {self.mode} and lora_alpha {self.lora_alpha}: expected "
                "mode lora and no alpha"
            )
        if self.mode == "lora" and self.mlp_only:
            raise ConfigError("option 'mlp_only' is for the modes dense and sparse: mode lora adapts all linear layers")
        if self.lean:
            self._require_lean()
        if self.delta_log_dir == Path("auto_if_dense"):
            self.delta_log_dir = Path("auto") if self.mode == "dense" else None
        if self.n_epochs is None:
            self._require_logged_step()

    def _require_lean(self) -> None:
        expected = {"mode": "sparse", "dtype": "bf16"}
        for name, value in expected.items():
            if (given := getattr(self, name)) != value:
                raise ConfigError(f"option 'lean' is true, and {name} is {given}: expected {value}")
        if self.master_weights:
            raise ConfigError("option 'lean' is true, and master_weights too: lean rounds at random without them")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(
                f"option 'seed' is {self.seed} with lean, whose rounding it determines: expected 0 to 2**32"
            )
        if self.parallel == "fsdp":
            raise ConfigError(
                "option 'lean' is true with parallel fsdp, whose ranks keep their part of the initial values on the "
                "GPU: expected parallel replicate"
            )

    def further_folders(self) -> dict[str, Path]:
        """Option -> folder that the run creates outside of its output folder, except for the delta log."""
        return {} if self.save_dir is None else {"save_dir": self.mounted(self.save_dir)}

    def set_length(self, n_examples: int) -> None:
        """Set `n_steps`, `save_steps` and `warmup_steps`, where options give them as shares, for this many examples.

        Raises:
            ConfigError: the number of steps is too large, or `delta_log_steps` selects none of them.
        """
        epoch = n_examples / self.examples_per_step
        if self.n_epochs is not None:
            self.n_steps = math.ceil(self.n_epochs * epoch)
            require_count(f"n_epochs {self.n_epochs:g} x {n_examples} examples, in steps", self.n_steps)
            self._require_logged_step()
        if self.save_strategy == "epoch":
            self.save_steps = math.ceil(epoch)
        if self.warmup_ratio is not None and self.warmup_steps == 0:
            self.warmup_steps = math.ceil(self.warmup_ratio * self.n_steps)

    def _require_logged_step(self) -> None:
        if not Schedule.parse(self.delta_log_steps).names_step(self.n_steps):
            raise ConfigError(
                f"option 'delta_log_steps' is '{self.delta_log_steps}': selects no step of 1 to n_steps {self.n_steps}"
            )

    @property
    def examples_per_step(self) -> int:
        """Number of examples per step."""
        return self.batch_size * self.gradient_accumulation_steps


@dataclass(kw_only=True)
class LoggedOptions:
    """Defaults of loops whose dense runs log their weights, so that a mask can be found in every one of them.

    A mixin that is listed before a subclass of `TrainingOptions`. It is not a subclass of `TrainingOptions` itself,
    because a dataclass takes the defaults of all fields of its first base class, inherited ones included.
    """

    delta_log_dir: Path | None = option(Path("auto_if_dense"))
    delta_log_steps: str = option("10-50:10,every:100,last")


@dataclass(kw_only=True)
class ReferenceOptions(TrainingOptions):
    """Options of loops with a reference policy."""

    ref_name: str | None = option(
        None,
        "reference model: hub name or local folder; none is the initial policy",
        aliases=("ref_model_name", "ref_model_name_or_path"),
    )
