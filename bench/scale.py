"""The largest model that one GPU trains: peak memory and time of a DPO step, by model size and method.

Each row is a job of `sparse-opt bench baseline dpo` on one pair, with random bf16 weights.

Models (--shapes): 3b Llama-3.2-3B, 8b Llama-3.1-8B, 14b Qwen2.5-14B, 32b Qwen2.5-32B, 70b Llama-3-70B;
qwen3_30b_a3b Qwen3-30B-A3B, a mixture of experts, and the same with 98 and 104 layers, which no published model has.
Methods (--methods):
  dense   full fine-tuning, torch's fused AdamW with bf16 moments, a frozen reference model
  lora    adapters of rank --lora_rank, which are off for the reference
  lean    SparseAdamW under a random mask, moments and compact gradients in bf16, base weights in host memory
A case whose memory ran out has a lower bound of what it needs. With --limit_gib, torch's allocator gets that much
memory, as on a smaller GPU: 78 for a GPU of 80 GB. With --resume, rows of the results file that are not measured again
are kept.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sparse_opt import MaskSet
from sparse_opt.cli.parser import CommandParser
from sparse_opt.masks.patterns import PATTERNS

from .harness import ALLOCATOR, Benchmark, comma_separated, not_between, one_of_each, run_in_process
from .models import masked_shapes, n_parameters
from .rows import Case, Row, Run, clean, label
from .shapes import SHAPES
from .training.baseline.inputs import preference_pairs, words_config, write_pairs
from .training.baseline.modes import Job
from .training.baseline.results import does_not_fit, first_loss_atol, wrong_results

METHODS = ("dense", "lora", "lean")
CHECKPOINTING = {"on": True, "off": False}
SMALL_SHAPES = [name for name in SHAPES if name.startswith("tiny")]
_EPILOG = """examples:
  sparse-opt bench scale --shapes 32b --methods lean --checkpointing on --limit_gib 78
  sparse-opt bench scale --small                                     # tiny models, on the CPU
"""
N_WARMUP = 1  # steps that are not timed: the first loads kernels


def options(parser: CommandParser) -> None:
    shapes = [name for name in SHAPES if name not in SMALL_SHAPES]
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shapes", type=comma_separated, help=f"of {','.join(shapes)} (all)")
    what.add_argument("--methods", type=comma_separated, default=list(METHODS), help=f"of {','.join(METHODS)} (all)")
    what.add_argument(
        "--base",
        choices=("bf16", "nf4"),
        default="bf16",
        help="the decoder layers' matrices: bf16, or NF4 with double quantization; then lora is QLoRA (%(default)s)",
    )
    what.add_argument(
        "--checkpointing",
        type=comma_separated,
        default=list(CHECKPOINTING),
        help="of on,off: whether activations are checkpointed (both)",
    )
    what.add_argument("--compile", action="store_true", help="torch.compile the model's layers")
    what.add_argument(
        "--precomputed_reference",
        action="store_true",
        help="compute the reference's log-probabilities before the first step",
    )
    what.add_argument("--sequence_length", type=int, default=1024, help="tokens, prompt and completion (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--pattern", choices=tuple(PATTERNS), default="tile64", help="of the masks (%(default)s)")
    what.add_argument("--lora_rank", type=int, default=16, help="of method lora (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="in every method (%(default)s)")
    run = parser.add_argument_group("how")
    run.add_argument("--n_steps", type=int, default=4, help="of each row; the first is left out of the time")
    run.add_argument("--limit_gib", type=float, help="GiB that torch's allocator may use (default: all of the GPU)")
    run.add_argument("--seed", type=int, default=0, help="of weights, masks and token ids (%(default)s)")
    run.add_argument("--small", action="store_true", help="tiny shapes, on the CPU")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on `--small`."""
    allowed = [name for name in SHAPES if (name in SMALL_SHAPES) == args.small]
    args.shapes = args.shapes or allowed
    if args.small:
        args.sequence_length = min(args.sequence_length, 32)
    if error := (
        one_of_each("shapes", args.shapes, allowed)
        or one_of_each("methods", args.methods, METHODS)
        or one_of_each("checkpointing", args.checkpointing, list(CHECKPOINTING))
        or not_between(args, "sequence_length", at_least=16)
    ):
        return error
    if args.base == "nf4" and "dense" in args.methods:
        return "--base nf4 needs --methods of lora,lean"
    return not_between(args, "n_steps", at_least=N_WARMUP + 1)


def jobs(args: Namespace, shape: str, folder: Path) -> list[Job]:
    """The rows of a shape to measure, in this order; makes their data and mask in the folder."""
    dataset, mask = folder / "pairs.jsonl", folder / "mask.safetensors"
    write_pairs(dataset, preference_pairs(args.n_steps, args.sequence_length, args.seed))
    if "lean" in args.methods:
        shapes = masked_shapes(words_config(shape, args.sequence_length))
        MaskSet.random(shapes, density=args.density, pattern=args.pattern, seed=args.seed).save(mask)
    shared = {field.name: getattr(args, field.name) for field in fields(Job) if hasattr(args, field.name)}
    shared |= {"algorithm": "dpo", "shape": shape, "dataset": str(dataset), "batch_size": 1}
    lean: dict[str, Any] = {"mode": "sparse" if args.pattern == "element" else "tiles", "lean": True, "mask": str(mask)}
    return [
        Job(**shared, **(lean if method == "lean" else {"mode": method}), gradient_checkpointing=CHECKPOINTING[word])
        for method in args.methods
        for word in args.checkpointing
    ]


def case_of(job: Job, args: Namespace) -> Case:
    """The case of the rows, without what is not of the method."""
    method = "lean" if job.lean else job.mode
    own = {"lean": ("density", "pattern"), "lora": ("lora_rank",), "dense": ()}[method]
    names = ("compile", "precomputed_reference", "sequence_length", *own, "learning_rate", "seed", "limit_gib")
    return clean(
        {
            "shape": job.shape,
            "parameters": n_parameters(words_config(job.shape, job.sequence_length)),
            "method": method,
            "base": None if job.base == "bf16" else job.base,
            "checkpointing": job.gradient_checkpointing,
            **{name: getattr(args, name) for name in names},
        }
    )


def measure(args: Namespace, run: Run) -> None:
    """Run every case in a process of its own; rows are written to the output after each."""
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="sparse_opt_scale_") as folder:
            for job in jobs(args, shape, Path(folder)):
                case = case_of(job, args)
                name = label(case, ("parameters",))
                module = "sparse_opt.bench.training.baseline.run"
                result = run_in_process(module, name, asdict(job), Path(folder), ALLOCATOR)
                if result is None:
                    run.miss(f"{name}, whose run failed")
                    continue
                run.add(*result_rows(result, case))
                run.wrong += [f"{name}: {line}" for line in wrong_results("dpo", [result], first_loss_atol(job))]
                run.save()


def result_rows(result: dict[str, Any], case: Case) -> list[Row]:
    """The rows of a case: time and memory, or a lower bound of the memory if it does not fit."""
    shared: dict[str, Any] = {"suite": "scale", "case": case}
    if not result["fits"]:
        return [does_not_fit(result, **shared)]
    steps = [1e3 * step["step_s"] for step in result["steps"][N_WARMUP:]]
    found = [Row.of_samples(steps, **shared, metric="step", unit="ms")]
    memory = {name: result[f"{name}_bytes"] for name in ("peak_memory", "peak_reserved", "build_peak")}
    for name, nbytes in {**memory, "weights": result["bytes"]["weights"]}.items():
        if nbytes is not None:
            found.append(Row(**shared, metric=name.replace("_", " "), unit="bytes", value=nbytes))
    return found


main = Benchmark(
    name="scale",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/scale_{device}.json",
).main
