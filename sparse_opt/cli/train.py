"""`sparse-opt train ALGORITHM`: TRL's trainers under a mask, and the recipes of `sparse_opt.trainers.recipes`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ..errors import ConfigError, SparseOptError
from ..options import nearest
from .common import is_out_of_memory

TRL_ALGORITHMS = ("sft", "dpo", "grpo")
RECIPES = ("ppo", "rlt", "rft", "minimal_dpo")

_HELP = """usage: sparse-opt train ALGORITHM [--config FILE] [--key value ...] [key=value ...]

Train a causal language model: all of its weights, those of a mask, or low-rank adapters.

by TRL, with TRL's arguments and those of a mask:
  sft          prompts with completions
  dpo          preference pairs
  grpo         prompts with reward functions

recipes, each with the options of the research code that it comes from:
  ppo          PPO of a small model on the score of a classifier
  rlt          a teacher, rewarded by what its student learns from it
  rft          samples that a verifier accepted: datagen, train, test
  minimal_dpo  DPO from a YAML file of sections

'sparse-opt train dpo --help' lists the options of an algorithm. They come from YAML files, flags and key=value words;
later ones win, and a misspelled one is an error.

all weights, with a delta log to find a mask in:
  sparse-opt train dpo --model_name_or_path M --dataset_name pairs.jsonl --learning_rate 5e-7 --max_steps 200 \\
      --delta_log_dir delta_logs_M --delta_log_steps every:10,last --output_dir runs/dense

under a mask, from the same weights; without --learning_rate, the dense default times density^-0.75:
  sparse-opt train dpo --model_name_or_path M --dataset_name pairs.jsonl --mask masks/FILE.safetensors \\
      --max_steps 200 --output_dir runs/sparse

the options of an earlier run, with one of them changed:
  sparse-opt train dpo --config runs/dense/options.yaml output_dir=runs/dense_2 seed=2

with checkpoints, and resumed after an interruption:
  sparse-opt train grpo --config grpo.yaml --save_steps 50
  sparse-opt train grpo --config grpo.yaml --save_steps 50 --resume_from_checkpoint true

on the GPUs of one machine:
  torchrun --nproc_per_node=4 -m sparse_opt train dpo --config dpo.yaml"""


def run(argv: Sequence[str]) -> int:
    """Train; under torchrun, as one of its processes."""
    if not argv or argv[0] in ("-h", "--help"):
        if not argv:
            raise ConfigError(f"the algorithm is missing{nearest('', (*TRL_ALGORITHMS, *RECIPES))}")
        print(_HELP)
        return 0
    algorithm, *words = argv
    if algorithm not in (*TRL_ALGORITHMS, *RECIPES):
        raise ConfigError(f"unknown algorithm '{algorithm}'{nearest(algorithm, (*TRL_ALGORITHMS, *RECIPES))}")
    try:
        if algorithm in RECIPES:
            return importlib.import_module(f"sparse_opt.trainers.recipes.{algorithm}").run(words)
        from ..integrations.trl.train import run as train

        return train(algorithm, words)  # type: ignore[arg-type]  # it is one of TRL_ALGORITHMS
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SparseOptError(
            "out of memory; lower --per_device_train_batch_size, the lengths of rows or --vllm_gpu_memory_utilization, "
            "or train under a mask, with adapters, or with --gradient_checkpointing: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from error
