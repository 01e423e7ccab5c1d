"""Options shared by the training loops: model, data, training, output and rollout options."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from sparse_opt.config import option, require_count, require_number_ranges
from sparse_opt.delta.schedule import Schedule
from sparse_opt.errors import ConfigError
from sparse_opt.option_parser import read_yaml

from .ranks import Parallel

# Names of subfolders of a run, in these loops and in transformers' Trainer.
_OF_ANY_RUN = re.compile(r"final|adapter|step_\d+|checkpoint-\d+")


@dataclass(kw_only=True)
class ModelOptions:
    """The model, the data and the device, for training and for sampling."""

    policy_name: str = option(
        help="model to train or sample from: hub name or local folder", aliases=("model_name", "model_name_or_path")
    )
    checkpoint: Path | None = option(None, "local folder with other weights of the model policy_name to start from")
    dataset: str = option(
        help="hub name, or local .json, .jsonl or .parquet file", aliases=("dataset_name", "dataset_id_or_path")
    )
    dataset_split: str = option("train", "split of a hub dataset")
    subset_size: int | None = option(None, "use this many examples, drawn with the seed", at_least=1)
    subset: str | None = option(
        None, "a number is subset_size; other text is dataset_split, which may be a part such as train[:90%]"
    )
    device: str = option("auto", "torch device; auto is cuda if available, else cpu")
    parallel: Parallel = option(
        "auto",
        "processes, which torchrun starts and which share the examples of a step: replicate, each has the model; fsdp, "
        "each has a part of every weight (FSDP2); none, a single process; auto is replicate under torchrun, else none",
    )
    fsdp: bool | None = option(None, "true is parallel fsdp; false is any other")
    dtype: Literal["bf16", "fp16", "fp32"] = option(
        "bf16",
        "dtype of the weights; fp16 trains fp32 weights under fp16 autocast with loss scaling",
        aliases=("precision",),
    )
    bf16: bool | None = option(None, "true is dtype bf16; false is fp32")
    fp16: bool | None = option(None, "true is dtype fp16; false is any other")
    seed: int = option(0, "seed of the data order and of all sampling; on a CPU the same seed gives the same results")
    mount_dir: Path | None = option(None, "folder that relative output folders, and those named by default, are in")

    def __post_init__(self) -> None:
        if self.subset is not None:
            if self.subset.isdecimal():
                self.subset_size = int(self.subset)
            else:
                self.dataset_split = self.subset
            self.subset = None
        require_number_ranges(self)
        if self.fsdp and self.parallel == "auto":
            self.parallel = "fsdp"
        if self.fsdp is not None and self.fsdp != (self.parallel == "fsdp"):
            raise ConfigError(f"option 'fsdp' is {str(self.fsdp).lower()}, and parallel is {self.parallel}: give one")
        self._apply_dtype_names()

    def _apply_dtype_names(self) -> None:
        """Set `dtype` to what `bf16` and `fp16` say. bf16, the default of `dtype`, gives way to them."""
        given = {"bf16": self.bf16, "fp16": self.fp16}
        named = [name for name, on in given.items() if on]
        if len(named) > 1:
            raise ConfigError("options 'bf16' and 'fp16' are true: give one")
        for name in named:
            if self.dtype not in ("bf16", name):
                raise ConfigError(f"option '{name}' is true, and dtype is {self.dtype}: give one")
            self.dtype = name  # type: ignore[assignment]
        if self.fp16 is False and self.dtype == "fp16":
            raise ConfigError("option 'fp16' is false, and dtype is fp16: give one")
        if self.bf16 is False and self.dtype == "bf16":
            self.dtype = "fp32"

    def mounted(self, folder: Path) -> Path:
        """The folder, under `mount_dir` unless it is absolute."""
        return folder if self.mount_dir is None else self.mount_dir / folder


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
    )
    mask: Path | None = option(None, "mask file of mode sparse")
    lora_rank: int = option(16, "rank of mode lora's adapters, on all linear layers but the output", at_least=1)
    lora_alpha: int | None = option(None, "alpha of mode lora's adapters; none is twice the rank", at_least=1)
    mlp_only: bool = option(False, "train MLP weights only; with a mask, its elements in MLP weights only")
    backend: Literal["auto", "reference", "cpu", "triton", "cuda"] = option("auto", "kernels of mode sparse")
    master_weights: bool | None = option(
        None, "keep fp32 master copies of the trained weights; none means yes for 16-bit weights"
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
    )
    batch_size: int = option(4, "examples per forward pass", at_least=1, aliases=("train_batch_size",))
    per_device_train_batch_size: int | None = option(
        None, "examples per forward pass of each process, in place of batch_size, which is that of all", at_least=1
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
    warmup_steps: int = option(0, "steps of linear warm-up from 0", at_least=0)
    warmup_ratio: float | None = option(
        None, "warm-up as a share of n_steps, if warmup_steps is 0", at_least=0, at_most=1
    )
    optim: Literal["adamw_torch_fused", "adamw_torch"] = option(
        "adamw_torch_fused",
        "AdamW of the modes dense and lora: torch's fused kernel, or its slower default",
    )
    weight_decay: float = option(0.0, "decoupled weight decay", at_least=0)
    adam_beta1: float = option(0.9, "AdamW beta1", at_least=0, below=1)
    adam_beta2: float = option(0.999, "AdamW beta2", at_least=0, below=1)
    adam_epsilon: float = option(1e-8, "AdamW epsilon", at_least=0, aliases=("adam_eps",))
    max_grad_norm: float | None = option(1.0, "clip the global gradient norm to this; none to leave it", above=0)

    eval_dataset: str | None = option(None, "evaluate on this dataset: hub name or local file, of the training format")
    eval_ratio: float | None = option(
        None,
        "without an eval_dataset: hold out this share of the examples, drawn with the seed, and evaluate on them",
        above=0,
        below=1,
        aliases=("val_ratio",),
    )
    eval_dataset_split: str = option("test", "split of a hub eval_dataset")
    eval_subset_size: int | None = option(None, "evaluate on this many examples, drawn with the seed", at_least=1)
    eval_steps: int = option(
        50, "with an eval_dataset: evaluate every so many steps, before the first, after the last", at_least=1
    )

    output_dir: Path | None = option(
        None, "new or empty folder for metrics and checkpoints; none is checkpoints_{model}_{algorithm}"
    )
    save_dir: Path | None = option(None, "new or empty folder for the final model; none is final in output_dir")
    resume: bool = option(
        False, "resume from the newest checkpoint in output_dir; from the beginning if there is none yet"
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
        aliases=("save_every", "save_ckpt_every"),
    )
    save_strategy: Literal["no", "steps", "epoch"] | None = option(
        None, "epoch sets save_steps to the steps of a pass over the data; no sets it to none; steps uses it"
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
        aliases=("log_steps",),
    )
    report_to: list[Literal["wandb", "tensorboard"]] = option([], "send metrics to wandb, tensorboard, or both")
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
        if self.mode == "lora" and self.mlp_only:
            raise ConfigError("option 'mlp_only' is for the modes dense and sparse: mode lora adapts all linear layers")
        if self.delta_log_dir == Path("auto_if_dense"):
            self.delta_log_dir = Path("auto") if self.mode == "dense" else None
        if self.n_epochs is None:
            self._require_logged_step()

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

    A base class to name before one of `TrainingOptions`. It is none itself, because a dataclass takes the defaults of
    all fields of its first base class, inherited ones included.
    """

    delta_log_dir: Path | None = option(Path("auto_if_dense"))
    delta_log_steps: str = option("10-50:10,every:100,last")


@dataclass(kw_only=True)
class ReferenceOptions(TrainingOptions):
    """Of loops with a reference policy."""

    ref_name: str | None = option(None, "reference model: hub name or local folder; none is the initial policy")


@dataclass(kw_only=True)
class CompletionOptions(ModelOptions):
    """How completions are sampled and rewarded."""

    n_generations: int = option(8, "completions per prompt", at_least=1, aliases=("num_generations", "oversample"))
    max_prompt_length: int = option(
        512, "longest prompt in tokens; longer ones are left out", at_least=1, aliases=("max_prompt_tokens",)
    )
    max_completion_length: int = option(256, "longest completion in tokens", at_least=1, aliases=("max_new_tokens",))
    temperature: float = option(1.0, "sampling temperature; 0 takes the most likely token", at_least=0)
    top_p: float = option(1.0, "sample from the most likely tokens of this total probability", above=0, at_most=1)
    top_k: int = option(0, "sample from this many of the most likely tokens; 0 from all", at_least=0)
    rollout_engine: Literal["generate", "continuous_batching", "vllm"] = option(
        "generate", "engine that samples", aliases=("engine",)
    )
    vllm_gpu_memory_utilization: float = option(0.3, "share of the GPU's memory that vLLM may use", above=0, at_most=1)
    vllm_enforce_eager: bool = option(
        False, "run vLLM without torch.compile and CUDA graphs: a faster start and slower sampling"
    )
    vllm_enable_prefix_caching: bool | None = option(
        None, "whether vLLM reuses keys and values of common beginnings of prompts; none is vLLM's default"
    )
    vllm_server_base_url: str | None = option(
        None,
        "URL of a vLLM server on this host to sample with, instead of vLLM in the same process, also with several "
        "processes; it needs VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs, and --worker-extension-cls "
        "or, for mode sparse, --weight-transfer-config, see docs/trainers.md",
        aliases=("rollout_server",),
    )
    reward_functions: list[str] = option([], "rewards by name or as module:function, several with commas")
    reward_weights: list[float] | None = option(None, "a weight for each reward function; none weighs all 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm_server_base_url is not None and self.rollout_engine != "vllm":
            raise ConfigError(
                f"option 'vllm_server_base_url' is {self.vllm_server_base_url}: rollout_engine is "
                f"{self.rollout_engine}, expected vllm"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_functions):
            raise ConfigError(
                f"option 'reward_weights' has {len(self.reward_weights)} values, reward_functions "
                f"{len(self.reward_functions)}"
            )


@dataclass(kw_only=True)
class RolloutOptions(CompletionOptions, ReferenceOptions):
    """Of loops that train on sampled completions. Their batches count completions, not prompts, like TRL's."""

    batch_size: int = option(8, "completions per forward pass of training")
    n_minibatches: int = option(1, "optimizer steps in one pass over a rollout", at_least=1)
    num_iterations: int = option(1, "passes over each rollout", at_least=1, aliases=("ppo_epochs",))
    min_completion_length: int = option(
        0,
        "shortest completion in tokens: EOS is not sampled before; log-probabilities are those of all tokens",
        at_least=0,
        aliases=("min_new_tokens",),
    )
    temperature: float = option(1.0, "sampling temperature, also of the log-probabilities", above=0)
    max_logprob_difference: float | None = option(
        None,
        "stop if the log-probabilities of engine vllm and the policy differ by more than this, as the mean absolute "
        "difference of a rollout's tokens; none for no limit",
        above=0,
    )
    vllm_importance_sampling_correction: bool = option(
        False, "multiply a token's policy loss by an importance weight, policy over engine vllm"
    )
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        option(
            "token_truncate",
            "weight each token or the whole completion; truncate weights outside the bounds to them, or mask them to 0",
        )
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0, "upper bound of importance weights; none for no bound", above=0
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None, "lower bound of importance weights; none for no bound", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_completion_length > self.max_completion_length:
            raise ConfigError(
                f"option 'min_completion_length' is {self.min_completion_length}: expected at most "
                f"max_completion_length {self.max_completion_length}"
            )
        if self.min_completion_length and self.rollout_engine == "continuous_batching":
            raise ConfigError(
                f"option 'min_completion_length' is {self.min_completion_length}: rollout_engine continuous_batching "
                "cannot suppress EOS; use generate or vllm"
            )
        for name in ("vllm_importance_sampling_correction", "max_logprob_difference"):
            if getattr(self, name) and self.rollout_engine != "vllm":
                raise ConfigError(
                    f"option '{name}' is {getattr(self, name)}: rollout_engine {self.rollout_engine} reports no "
                    "log-probabilities; use vllm"
                )
            if getattr(self, name) and (self.top_p < 1 or self.top_k > 0):
                raise ConfigError(
                    f"option '{name}' is {getattr(self, name)} with top_p {self.top_p} and top_k {self.top_k}: "
                    "expected 1 and 0, because the engine's probabilities are otherwise renormalised over fewer tokens"
                )
        for field in fields(self):
            of_correction = field.name.startswith(("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_"))
            if of_correction and not self.vllm_importance_sampling_correction:
                if (value := getattr(self, field.name)) != field.default:
                    raise ConfigError(
                        f"option '{field.name}' is {value}: it needs vllm_importance_sampling_correction true"
                    )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"option 'vllm_importance_sampling_clip_min' is {low}: expected less than "
                f"vllm_importance_sampling_clip_max {high}"
            )
        if self.vllm_importance_sampling_correction and low is None and high is None:
            if self.vllm_importance_sampling_mode.endswith("_truncate"):
                raise ConfigError(
                    f"option 'vllm_importance_sampling_mode' is {self.vllm_importance_sampling_mode}: expected "
                    "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min"
                )
        if self.dataloader_num_workers:
            raise ConfigError(
                f"option 'dataloader_num_workers' is {self.dataloader_num_workers}: batches of sampled completions "
                "cannot be made ahead of time; expected 0"
            )
        require_count("batch_size x gradient_accumulation_steps x n_minibatches", self.completions_per_step)
        if self.completions_per_step % self.n_generations:
            raise ConfigError(
                f"batch_size {self.batch_size} x gradient_accumulation_steps {self.gradient_accumulation_steps} x "
                f"n_minibatches {self.n_minibatches} = {self.completions_per_step} completions a step: expected a "
                f"multiple of n_generations {self.n_generations}"
            )

    @property
    def completions_per_step(self) -> int:
        """Number of completions per rollout."""
        return self.batch_size * self.gradient_accumulation_steps * self.n_minibatches

    @property
    def examples_per_step(self) -> int:
        """Number of prompts per rollout."""
        return self.completions_per_step // self.n_generations


def model_slug(name: str) -> str:
    """A model's name as part of a file name: `meta_llama_llama_3_1_8b` for `meta-llama/Llama-3.1-8B`.

    A local folder is named by its last part: `model` for `runs/model`. A folder with the same name in every run
    (`final`, `adapter`, `step_00000100`, `checkpoint-500`) is named by the model that its run started from, which
    options.yaml has, and without options.yaml by the run: `sft_final` for `runs/sft/final`.
    """
    if Path(name).exists():
        path = Path(name).resolve()
        name = path.name
        if _OF_ANY_RUN.fullmatch(name):
            run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
            options = read_yaml(file, "options file") if (file := run / "options.yaml").is_file() else None
            if isinstance(options, dict) and isinstance(trained := options.get("policy_name"), str):
                return model_slug(trained)
            name = f"{run.name}_{name}"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
