"""DPO end to end, dense beside sparse: time of a step and peak memory, on a model of real shape with random weights.

Makes a checkpoint in Hugging Face format, a tokenizer of one token a word, preference pairs of an exact length and a
random mask, all on local disk, and runs `sparse-opt train dpo` on them, each mode in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparse_opt import MaskSet

from .environment import environment
from .report import table, why_unwritable, write_json
from .timing import percentiles

MODES = ("dense", "sparse")
N_WORDS, N_PAIRS = 1000, 64
# The first step's policy is its reference: the loss is ln 2 whatever the weights. Room for kernels that differ between
# a forward pass with and without gradients: beta = 0.1 times the rounding of sums of some hundred log-probabilities.
FIRST_LOSS_ATOL = 1e-3


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings."""

    hidden: int
    intermediate: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int


# https://huggingface.co/meta-llama/Llama-3.2-3B/blob/main/config.json
LLAMA_3_2_3B = Shape(3072, 8192, 28, 24, 8, 128, 128256)
SMALL = Shape(64, 160, 2, 4, 2, 16, 2048)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if both runs began at a loss of ln 2, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.n_steps <= args.n_warmup:
        parser.error(f"--n_steps {args.n_steps} leaves nothing after --n_warmup {args.n_warmup}")
    if problem := why_unwritable(args.output):
        parser.error(problem)
    device = torch.device("cpu" if args.small else args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"device {device}: torch {torch.__version__} finds no CUDA device here; --small runs on a CPU")
    report: dict[str, Any] = {"benchmark": "dpo_step", "environment": environment(device)}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_dpo_step_", dir=args.work_dir) as folder:
        report |= _make_inputs(Path(folder), SMALL if args.small else LLAMA_3_2_3B, args, device)
        report["rows"] = [row for mode in MODES if (row := _run_mode(mode, Path(folder), args, device)) is not None]
    write_json(args.output, report)
    print(f"\n{_text(report)}\n\nresults: {args.output}")
    wrong = [row for row in report["rows"] if not abs(row["first_loss"] - math.log(2)) <= FIRST_LOSS_ATOL]
    for row in wrong:
        print(f"WRONG RESULT: {row['mode']} DPO begins at a loss of {row['first_loss']}, wanted ln 2", file=sys.stderr)
    return 1 if wrong or len(report["rows"]) < len(MODES) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparse-opt bench dpo_step", description=__doc__, allow_abbrev=False)
    default = Path("bench/results/dpo_step.json")
    parser.add_argument("--output", type=Path, default=default, help="JSON (%(default)s)")
    parser.add_argument(
        "--work_dir", type=Path, help="where to make the checkpoint, 13 GB (default: a temporary folder)"
    )
    parser.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    parser.add_argument("--density", type=float, default=0.025, help="of the random mask (%(default)s)")
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens, prompt and completion (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=1, help="pairs a step (%(default)s)")
    parser.add_argument("--n_steps", type=int, default=20, help="of each mode (%(default)s)")
    parser.add_argument("--n_warmup", type=int, default=5, help="steps left out of the medians (%(default)s)")
    parser.add_argument(
        "--master_weights", action="store_true", help="fp32 copies of the trained weights, in both modes"
    )
    parser.add_argument("--gradient_checkpointing", action="store_true", help="in both modes")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _make_inputs(folder: Path, shape: Shape, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """`model`, `pairs.jsonl` and `mask.safetensors` in the folder; returns what the report says of them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = word_tokenizer()
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(2048, args.sequence_length),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(args.seed)
    print(f"making a checkpoint, a mask and {N_PAIRS} pairs in {folder}", flush=True)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    numel = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    mask = MaskSet.random(model, density=args.density, seed=args.seed)
    mask.save(folder / "mask.safetensors")
    rows = preference_pairs(N_PAIRS, args.sequence_length, args.seed)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the runs are other processes on the same GPU
    return {
        "numel": numel,
        "nnz": mask.nnz,
        "sequence_length": args.sequence_length,
        "batch_size": args.batch_size,
        "n_steps": args.n_steps,
        "n_warmup": args.n_warmup,
        "master_weights": args.master_weights,
        "gradient_checkpointing": args.gradient_checkpointing,
    }


def word_tokenizer() -> Any:
    """A tokenizer whose tokens are the words w0 ... w999, so that a text's length in tokens is known."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(N_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def preference_pairs(n: int, sequence_length: int, seed: int) -> list[dict[str, str]]:
    """Pairs of random words; prompt, completion and the closing EOS make ``sequence_length`` tokens."""
    generator = random.Random(seed)
    n_prompt = sequence_length // 8

    def words(count: int) -> str:
        return " ".join(f"w{generator.randrange(N_WORDS)}" for _ in range(count))

    n_completion = sequence_length - n_prompt - 1
    return [
        {"prompt": words(n_prompt), "chosen": f" {words(n_completion)}", "rejected": f" {words(n_completion)}"}
        for _ in range(n)
    ]


def _run_mode(mode: str, folder: Path, args: argparse.Namespace, device: torch.device) -> dict[str, Any] | None:
    """One run of the trainer; None, with its message already printed, if it failed."""
    options: dict[str, Any] = {
        "policy_name": folder / "model",
        "dataset": folder / "pairs.jsonl",
        "output_dir": folder / mode,
        "mode": mode,
        "device": device.type,
        "n_steps": args.n_steps,
        "batch_size": args.batch_size,
        "max_length": args.sequence_length,
        "lr_schedule": "constant",
        "master_weights": args.master_weights,
        "gradient_checkpointing": args.gradient_checkpointing,
        "seed": args.seed,
    }
    if mode == "sparse":
        options["mask"] = folder / "mask.safetensors"
    command = [sys.executable, "-m", "sparse_opt.cli", "train", "dpo"]
    print(f"{mode}: {args.n_steps} steps", flush=True)
    done = subprocess.run(command + [f"{key}={value}" for key, value in options.items()], check=False)
    if done.returncode != 0:
        print(f"{mode}: the trainer ended with exit code {done.returncode}", file=sys.stderr)
        return None
    lines = (folder / mode / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    shutil.rmtree(folder / mode)  # its checkpoint is as large as the model
    return _summary(mode, [json.loads(line) for line in lines], args.n_warmup)


def _summary(mode: str, metrics: list[dict[str, Any]], n_warmup: int) -> dict[str, Any]:
    timed = metrics[n_warmup:]
    p20, _, p80 = percentiles([row["step_time_s"] for row in timed])
    times = [name for name in timed[0] if name.endswith("_time_s")]
    return {
        "mode": mode,
        "first_loss": metrics[0]["loss"],
        "n_tokens": timed[0]["n_tokens"],
        "median_s": {name.removesuffix("_time_s"): statistics.median(row[name] for row in timed) for name in times},
        "p20_s": p20,
        "p80_s": p80,
        "peak_memory_bytes": metrics[-1].get("peak_memory_bytes"),
    }


def _text(report: dict[str, Any]) -> str:
    machine = report["environment"]["machine"]
    parts = [part for row in report["rows"][:1] for part in row["median_s"]]
    rows = [
        [
            row["mode"],
            *(f"{1e3 * row['median_s'][part]:.1f}" for part in parts),
            f"{1e3 * row['p20_s']:.1f} - {1e3 * row['p80_s']:.1f}",
            "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.1f}",
        ]
        for row in report["rows"]
    ]
    lines = [
        f"{report['numel'] / 1e9:.2f} B parameters, {report['nnz'] / report['numel']:.1%} active in mode sparse; "
        f"{report['batch_size']} pair(s) of {report['sequence_length']} tokens a step; "
        f"{machine.get('gpu', {}).get('name', machine['cpu'])}",
        table(("DPO, ms", *parts, "p20 - p80", "peak GiB"), rows),
    ]
    if len(rows) == len(MODES):
        dense, sparse = (row["median_s"]["step"] for row in report["rows"])
        lines.append(f"a sparse step takes {sparse / dense:.2f} of a dense one")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
