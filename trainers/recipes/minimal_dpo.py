"""DPO from a YAML file of sections, as chengjiafeng857/temp-dpo-v1:

    sparse-opt train minimal_dpo --config config_dpo.yaml
    torchrun --nproc_per_node=8 -m sparse_opt train minimal_dpo --config config_dpo.yaml --fsdp

This is `sparse-opt train dpo`, TRL's DPOTrainer, with the original's option names, defaults and files. All of its
options are accepted, inside and outside of sections, and under a mask as well.

| file | |
|---|---|
| MOUNT_DIR/dpo_model | the model |
| MOUNT_DIR/logs/margins/margins_log.jsonl | statistics of the margins of each step |
| MOUNT_DIR/logs/margins/epoch_000/step_00001.npy | the margins of a step, see `integrations.trl.margins` |

Unlike the original, the held-out rows are evaluated after each epoch, and completions end with EOS. Questions and
answers are in the model's chat template; without one they are the original's "Prompt: ..." and "Response: ...", without
system messages. `--optim adamw_bnb_8bit` is the original's optimizer if bitsandbytes is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.integrations.trl.command_line import Options, Recipe, parse
from sparse_opt.integrations.trl.data import load_rows
from sparse_opt.integrations.trl.margins import MARGINS_FOLDER, MarginsCallback
from sparse_opt.integrations.trl.mask_arguments import option
from sparse_opt.integrations.trl.train import train
from sparse_opt.options import FALSE, TRUE
from sparse_opt.progress import hide_progress_bars

# Options of the original -> TRL's.
ALIASES = {
    "policy_name": "model_name_or_path",
    "subset": "dataset_train_split",
    "max_len": "max_length",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "log_steps": "logging_steps",
    "dpo_beta": "beta",
}
# What the original's code sets, and does not read from its file.
DEFAULTS = {
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,  # AdamW's default
    "max_grad_norm": 0.0,  # no clipping
    "gradient_checkpointing": False,
    "save_strategy": "no",
}


@dataclass(kw_only=True)
class MinimalDPOArguments:
    """Options of the original that TRL does not have."""

    ref_name: str | None = option(None, "reference model; default: the policy at the start")
    precision: Literal["bf16", "fp16", "fp32"] = option(
        "fp32", "bf16: weights, too, without fp32 copies; fp16: autocast of fp32 weights, with loss scaling"
    )
    val_ratio: float = option(0.1, "share of the rows that is held out, and evaluated")
    mount_dir: str = option(".", "folder of dpo_model and logs")
    wandb_project: str = option("handwritten-dpo", "project at W&B, with --report_to wandb")


def run(argv: Sequence[str]) -> int:
    """Train as the words after `sparse-opt train minimal_dpo` say, and return 0."""
    recipe = Recipe(
        "minimal_dpo",
        MinimalDPOArguments,
        DEFAULTS,
        "DPO from a YAML file of sections, with the names of temp-dpo-v1 and all options of 'sparse-opt train dpo'.",
        aliases=ALIASES,
        has_sections=True,
        translate=_translate,
    )
    hide_progress_bars()
    options = parse("dpo", argv, recipe)
    own, model = options.recipe, options.model
    if "wandb_project" in options.given or "WANDB_PROJECT" not in os.environ:
        os.environ["WANDB_PROJECT"] = own.wandb_project
    if options.script.dataset_streaming:
        raise ConfigError("--dataset_streaming: rows cannot be held out of a stream: leave it out")
    reference = held_out = None
    if own.ref_name not in (None, model.model_name_or_path):
        if options.mask.is_sparse or model.use_peft:
            raise ConfigError(f"--ref_name {own.ref_name}: under a mask, or with adapters, the reference is the policy")
        reference = AutoModelForCausalLM.from_pretrained(own.ref_name, dtype=model.dtype)
    rows = _as_text(load_rows(options.script, "dpo"), options)
    if own.val_ratio:
        try:
            split = rows.train_test_split(test_size=own.val_ratio, seed=options.training.seed)
        except ValueError as error:
            raise DataError(
                f"--val_ratio {own.val_ratio} of {len(rows)} rows leaves none to train or to test"
            ) from error
        rows, held_out = split["train"], split["test"]

    def prepare(trainer: Any) -> None:
        trainer.add_callback(MarginsCallback(trainer, Path(own.mount_dir) / MARGINS_FOLDER))

    return train("dpo", options, rows=rows, test_rows=held_out, prepare=prepare, ref_model=reference)


def _translate(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The values of TRL's options that follow from the original's, unless they are given."""
    if not 0 <= values["val_ratio"] < 1:
        raise ConfigError(f"--val_ratio is {values['val_ratio']}, expected a share of at least 0 and below 1")
    precision = values["precision"]
    implied = {
        "output_dir": str(Path(values["mount_dir"], "dpo_model")),
        "dtype": "bfloat16" if precision == "bf16" else "float32",
        "bf16": False,
        "fp16": precision == "fp16",
        "eval_strategy": "epoch" if values["val_ratio"] else "no",
        "per_device_eval_batch_size": values["per_device_train_batch_size"],
        "log_margins": False,  # `run` adds their callback
    }
    values |= {name: value for name, value in implied.items() if name not in given or name == "log_margins"}
    if precision == "bf16" and "master_weights" not in given and (values["mask"] or values["mask_density"]):
        values["master_weights"] = False
    fsdp = str(values["fsdp"]).lower()
    if fsdp in FALSE or values["fsdp"] is None:
        values["fsdp"] = None
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
        print("minimal_dpo: fsdp in one process: the model is not sharded; torchrun starts several processes")
        values["fsdp"] = None
    elif fsdp in TRUE:
        values["fsdp"] = True
    return values


def _as_text(rows: Any, options: Options) -> Any:
    """Messages as the text of the original, if the model has no chat template."""
    if isinstance(rows[0]["chosen"], str):
        return rows
    name, code = options.model.model_name_or_path, options.training.trust_remote_code
    if AutoTokenizer.from_pretrained(name, trust_remote_code=code).chat_template is not None:
        return rows

    def rendered(row: dict[str, Any]) -> dict[str, str]:
        return {
            column: "".join(
                f"{'Prompt' if message['role'] == 'user' else 'Response'}: {message['content'].strip()}\n"
                for message in row[column]
                if message["role"] != "system"
            )
            for column in ("prompt", "chosen", "rejected")
        }

    return rows.map(rendered, remove_columns=rows.column_names, load_from_cache_file=False)
