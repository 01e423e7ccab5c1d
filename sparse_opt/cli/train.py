"""`sparse-opt train ALGORITHM`: the training loops, with options from files, flags and `key=value` words."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..config import add_options
from ..errors import SparseOptError
from ..tables import format_bytes
from .output import is_out_of_memory, print_json
from .parser import CommandParser, add_json_flag

T = TypeVar("T")
# Trained by TRL, with its arguments.
TRL_ALGORITHMS = ("sft", "dpo", "grpo")
# Algorithm -> the name of its config class in sparse_opt.trainers.<algorithm>; for rft, of its table of stages.
ALGORITHMS = {
    "minimal_dpo": "DPOConfig",
    "ppo": "PPOConfig",
    "rft": "STAGES",
    "rlt": "RLTConfig",
}
# Options to lower if memory runs out, in addition to mode sparse and --gradient_checkpointing.
_MEMORY_OPTIONS = {
    "sft": "--per_device_train_batch_size or --max_length",
    "dpo": "--per_device_train_batch_size or --max_length",
    "grpo": "--per_device_train_batch_size, --max_completion_length or --vllm_gpu_memory_utilization",
    "minimal_dpo": "--batch_size or --max_length",
    "ppo": "--batch_size, --max_completion_length or --vllm_gpu_memory_utilization",
    "rft": "--batch_size, --max_length or --max_completion_length",
    "rlt": "--batch_size, --max_completion_length or --vllm_gpu_memory_utilization, or set --offload_untrained_models",
}

_EPILOG = """sft, dpo and grpo are TRL's trainers and take TRL's arguments, in addition to those of a mask.
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
  torchrun --nproc_per_node=4 -m sparse_opt train dpo --config dpo.yaml

rft has three stages, 'sparse-opt train rft datagen|train|test', and 'sparse-opt train rft show_optimizations' prints
what --profile conservative|balanced|aggressive sets. minimal_dpo is a DPO loop of this project with a YAML of sections.
"""


def run(argv: Sequence[str]) -> int:
    """Train, then print a summary, or with --json all results; under torchrun, as one of its processes."""
    if argv and argv[0] in TRL_ALGORITHMS:
        return _run_trl(argv[0], argv[1:])
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _run(argv)
    from sparse_opt.trainers.ranks import joined

    with joined():
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="sparse-opt train",
        usage="sparse-opt train ALGORITHM [--json] [--config FILE] [--key value ...] [key=value ...]",
        description="Train a causal language model: all of its weights, those of a mask, or low-rank adapters.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "algorithm",
        metavar="ALGORITHM",
        choices=(*TRL_ALGORITHMS, *ALGORITHMS),
        help="sft: prompts with completions; dpo: preference pairs; grpo, ppo: rewarded completions; rft: samples that "
        "a verifier accepted; rlt: a teacher, rewarded by its student",
    )
    algorithm = parser.parse_words(argv[:1]).algorithm
    module = importlib.import_module(f"sparse_opt.trainers.{algorithm.removeprefix('minimal_')}")
    values = vars(_algorithm_parser(algorithm, module).parse_words(argv[1:]))
    as_json = values.pop("json")
    if algorithm == "rft":
        config_class, work = module.STAGES[values.pop("stage")]
    else:
        config_class, work = getattr(module, ALGORITHMS[algorithm]), module.train
    summary = _train(algorithm, work, config_class(**values))
    if os.environ.get("RANK", "0") != "0":
        return 0
    if as_json:
        print_json(summary)
    else:
        print(summary.get("text") or _text(summary))
    return 0


def _run_trl(algorithm: Any, argv: Sequence[str]) -> int:
    from ..integrations.factory import require

    for package in ("transformers", "trl"):
        require(package)
    from ..integrations.trl.train import run as train

    return _with_memory_advice(algorithm, lambda: train(algorithm, argv))


def _algorithm_parser(algorithm: str, module: Any) -> CommandParser:
    """The parser of an algorithm's options; that of rft has a parser for each stage."""
    parser = CommandParser(prog=f"sparse-opt train {algorithm}")
    if algorithm != "rft":
        parsers = {parser: getattr(module, ALGORITHMS[algorithm])}
    else:
        parser.usage = f"{parser.prog} STAGE [--json] [--config FILE] [--key value ...] [key=value ...]"
        parser.epilog = f"'{parser.prog} STAGE --help' lists a stage's options."
        stages = parser.add_subparsers(title="stages", metavar="STAGE", dest="stage", prog=parser.prog)
        parsers = {
            stages.add_parser(stage, help=(config_class.__doc__ or "").partition("\n")[0]): config_class
            for stage, (config_class, _) in module.STAGES.items()
        }
    for one, config_class in parsers.items():
        add_json_flag(add_options(one, config_class))
    return parser


def _train(algorithm: str, work: Callable[[Any], dict[str, Any]], config: Any) -> dict[str, Any]:
    from ..progress import hide_progress_bars

    hide_progress_bars(always=os.environ.get("RANK", "0") != "0")
    return _with_memory_advice(algorithm, lambda: work(config))


def _with_memory_advice(algorithm: str, work: Callable[[], T]) -> T:
    """The result of `work`; if memory runs out, the error names the options to lower."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SparseOptError(
            f"out of memory; lower {_MEMORY_OPTIONS[algorithm]}, or train under a mask, with adapters, or with "
            f"--gradient_checkpointing: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _text(summary: dict[str, Any]) -> str:
    median, nbytes = summary["median"], summary["optimizer_bytes"]
    parts = [f"{name.removesuffix('_time_s')} {time:.3f}" for name, time in median.items() if name != "step_time_s"]
    sizes = [f"{what} {format_bytes(size)}" for what, size in nbytes.items() if size]
    lines = [f"{summary['algorithm']} {summary['mode']}: {summary['n_steps']} steps"]
    if summary["last_evaluation"] is not None:
        before, after = summary["first_evaluation"], summary["last_evaluation"]
        names = [
            name
            for name in after
            if name not in ("step", "eval_time_s")
            and all(isinstance(row.get(name), int | float) for row in (before, after))
        ]
        lines.append(
            "evaluation "
            + ", ".join(f"{name.removeprefix('eval_')} {before[name]:.4f} -> {after[name]:.4f}" for name in names)
        )
    lines += [
        f"step       {median['step_time_s']:.3f} s (median; {', '.join(parts)})",
        f"optimizer  {', '.join(sizes)}",
    ]
    if summary["peak_memory_bytes"] is not None:
        lines.append(f"GPU peak   {format_bytes(summary['peak_memory_bytes'])}")
    lines += [f"checkpoint {summary['checkpoint']}", f"metrics    {summary['metrics_file']}"]
    if summary["delta_log_dir"] is not None:
        lines.append(f"delta log  {summary['delta_log_dir']}")
    return "\n".join(lines)
