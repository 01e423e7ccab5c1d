"""`sparse-opt train dpo|sft`: the training loops, their options from a file, from flags and from `key=value` words."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ..errors import SparseOptError
from .output import format_bytes, print_json
from .parser import CommandParser, add_json_flag

# Algorithm -> the name of its config class in sparse_opt.trainers.<algorithm>.
ALGORITHMS = {"dpo": "DPOConfig", "sft": "SFTConfig"}

_EPILOG = """'sparse-opt train dpo --help' lists an algorithm's options. They come from YAML files, flags and
key=value words; later ones win, and a misspelt one is an error.

dense, keeping a log of the weights to find a mask from:
  sparse-opt train dpo --model_name M --dataset pairs.jsonl --learning_rate 5e-7 --n_steps 200 \\
      --delta_log_dir delta_logs_M --delta_log_steps every:10,last --output_dir runs/dense

sparse, from the same start:
  sparse-opt train dpo --model_name M --dataset pairs.jsonl --mode sparse --mask masks/FILE.safetensors \\
      --learning_rate 5e-7 --n_steps 200 --output_dir runs/sparse

the options of an earlier run, with one of them changed:
  sparse-opt train dpo --config runs/dense/options.yaml output_dir=runs/dense_2 seed=2
"""


def run(argv: Sequence[str]) -> int:
    """Train, then print what came of it: a summary, or with --json all of it."""
    parser = CommandParser(
        prog="sparse-opt train",
        usage="sparse-opt train ALGORITHM [--json] [--config FILE] [--key value ...] [key=value ...]",
        description="Train a causal language model, dense or under a mask.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "algorithm",
        metavar="ALGORITHM",
        choices=ALGORITHMS,
        help="dpo: preference pairs; sft: prompts with completions",
    )
    add_json_flag(parser)
    words = [word for word in argv if word != "--json"]
    # Only the first word is this parser's: the others are the algorithm's options.
    args = parser.parse_words(words[:1])
    summary = train(args.algorithm, words[1:])
    if len(words) < len(argv):
        print_json(summary)
    else:
        print(_text(summary))
    return 0


def train(algorithm: str, words: Sequence[str]) -> dict[str, Any]:
    """The summary of one run, whose options are `words`."""
    import torch

    from sparse_opt.trainers.config import parse_config

    from .progress import hide_progress_bars

    module = importlib.import_module(f"sparse_opt.trainers.{algorithm}")
    config = parse_config(getattr(module, ALGORITHMS[algorithm]), words, prog=f"sparse-opt train {algorithm}")
    hide_progress_bars()
    try:
        return module.train(config)
    except torch.OutOfMemoryError as error:
        raise SparseOptError(
            f"out of GPU memory; lower --batch_size or --max_length, or add --gradient_checkpointing: {error}"
        ) from error


def _text(summary: dict[str, Any]) -> str:
    first, last, median, nbytes = (summary[key] for key in ("first", "last", "median", "optimizer_bytes"))
    shown = [name for name in ("loss", "accuracy", "margin") if name in last]
    changed = [f"{name} {first[name]:.4f} -> {last[name]:.4f}" for name in shown]
    parts = [f"{name.removesuffix('_time_s')} {time:.3f}" for name, time in median.items() if name != "step_time_s"]
    sizes = [f"{what} {format_bytes(size)}" for what, size in nbytes.items() if size]
    lines = [
        f"{summary['algorithm']} {summary['mode']}: {summary['n_steps']} steps, {', '.join(changed)}",
        f"step       {median['step_time_s']:.3f} s (median; {', '.join(parts)})",
        f"optimizer  {', '.join(sizes)}",
    ]
    if summary["peak_memory_bytes"] is not None:
        lines.append(f"GPU peak   {format_bytes(summary['peak_memory_bytes'])}")
    lines += [f"checkpoint {summary['checkpoint']}", f"metrics    {summary['metrics_file']}"]
    if summary["delta_log_dir"] is not None:
        lines.append(f"delta log  {summary['delta_log_dir']}")
    return "\n".join(lines)
