"""The largest model that one GPU trains: peak memory and time of a DPO step, by model size and method.

Each row is a process of its own, with random bf16 weights made on the device layer by layer, in transformers' Llama and
Qwen2 classes. Steps are those of `sparse-opt bench baseline dpo`, on one pair.

Models (--shapes): 3b Llama-3.2-3B, 8b Llama-3.1-8B, 14b Qwen2.5-14B, 32b Qwen2.5-32B, 70b Llama-3-70B,
qwen3_30b_a3b Qwen3-30B-A3B, a mixture of experts.
Methods (--methods):
  dense   full fine-tuning, torch's fused AdamW with bf16 moments, a frozen reference model
  lora    adapters of rank --lora_rank, which are off for the reference
  lean    SparseAdamW under a random mask, moments and compact gradients in bf16, base weights in host memory
A case whose memory ran out has a lower bound of what it needs. With --limit_gib, torch's allocator gets that much
memory, as on a smaller GPU: 78 for a GPU of 80 GB. With --resume, rows of the results file that are not measured again
are kept.
"""

from __future__ import annotations

import functools
import math
import sys
import tempfile
from argparse import Namespace
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from sparse_opt import MaskSet
from sparse_opt.cli.parser import CommandParser
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.trainers.console import StepTimer
from sparse_opt.trainers.dpo import reference_logprobs
from sparse_opt.trainers.models import add_lora, make_masks_skippable
from sparse_opt.trainers.modes import Trained, adapter_training, dense_training, sparse_training

from .harness import (
    Benchmark,
    comma_separated,
    job_main,
    limit_memory,
    not_between,
    one_of_each,
    run_in_process,
)
from .models import make_model, masked_shapes, model_config, n_parameters, parameter_shapes
from .rows import Row, Run, clean, label
from .shapes import SHAPES
from .training.baseline.inputs import random_pairs
from .training.baseline.peers import add_lora_to_quantized, quantize_linear_layers
from .training.baseline.run import DPO_BETA, dpo_steps, measure_steps

Method = Literal["dense", "lora", "lean"]
METHODS: tuple[str, ...] = get_args(Method)
CHECKPOINTING = {"on": True, "off": False}
SMALL_SHAPES = [name for name in SHAPES if name.startswith("tiny")]
# Segments that grow: a peak of allocated memory then needs hardly more reserved memory.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# The first step's policy is its reference, so that the loss is ln 2. Its two forward passes may use different kernels.
FIRST_LOSS_ATOL = 0.01
# Compiled passes with and without gradients are fused differently. On the 32B shape the log-probability of a token then
# differs by 0.067 (the root of the mean square; docs/dev/notebook.md). For the sums over n tokens of two sequences,
# times the beta of DPO, that is 0.1 * 0.067 * sqrt(2 n), and half of it in the loss; twice this is allowed.
COMPILED_TOKEN_RMS = 0.067
_EPILOG = """examples:
  sparse-opt bench scale --shapes 32b --methods lean --checkpointing on --limit_gib 78
  sparse-opt bench scale --small                                     # tiny models, on the CPU
"""
# Options of SparseAdamW. Weights are bf16 and rounded at random, without fp32 master weights.
LEAN: dict[str, Any] = {
    "stochastic_rounding": True,
    "grad_dtype": torch.bfloat16,
    "state_dtype": torch.bfloat16,
    "offload_base_weights": True,
}
N_WARMUP = 1  # steps that are not timed: the first loads kernels


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. Its values go through JSON.

    A limit keeps torch's allocator below as many GiB, as on a smaller GPU.
    """

    shape: str
    method: Method
    base: Literal["bf16", "nf4"]  # the weights of the decoder layers' matrices; methods lora and lean
    checkpointing: bool  # of activations
    compile: bool  # the layers, with torch.compile
    precomputed_reference: bool  # its log-probabilities are computed before the first step
    sequence_length: int
    density: float
    pattern: str
    lora_rank: int
    learning_rate: float
    n_steps: int
    seed: int
    device: str
    limit_gib: float | None

    def described(self) -> dict[str, Any]:
        """The case of the rows: what is not of the method is left out, and so is the number of steps."""
        own = {"lean": {"density", "pattern"}, "lora": {"lora_rank"}, "dense": set[str]()}
        others = {"density", "pattern", "lora_rank", "n_steps", "device"} - own[self.method]
        if self.base == "bf16":
            others.add("base")
        values = {name: value for name, value in asdict(self).items() if name not in others}
        return clean({"shape": values.pop("shape"), "parameters": n_parameters(self.config), **values})

    @functools.cached_property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return model_config(self.shape, self.sequence_length)

    def least_bytes(self) -> int:
        """Bytes that a step holds at once for certain: weights, reference, gradients and moments, no activations.

        Offloaded base weights are among them, because they are on the GPU while the reference is computed. LoRA's
        adapters, the indices of whole tiles, and the rounding of the density to whole tiles are left out.
        """
        n = n_parameters(self.config)
        weights = sum(
            math.prod(shape) // 2
            if self.base == "nf4" and ".layers." in name and len(shape) == 2
            else 2 * math.prod(shape)
            for name, shape in parameter_shapes(self.config).items()
        )
        if self.method == "dense":
            return (8 if self.precomputed_reference else 10) * n  # weights, gradients, moments, reference, all bf16
        if self.method == "lora":
            return weights
        active = int(self.density * sum(map(math.prod, masked_shapes(self.config).values())))
        base = 0 if self.precomputed_reference else 2
        # base weights, or over NF4 the active weights; compact gradients, two moments
        return weights + active * (base + 2 + 4)


def run(case: Case) -> dict[str, Any]:
    """Build the model, take the steps, and return what was measured; `fits` is False if memory ran out."""
    device = torch.device(case.device)
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if case.least_bytes() > limit_memory(device, case.limit_gib):  # it would run out of memory, but later
        return {"fits": False, "needs_more_than_bytes": case.least_bytes()}
    try:
        measured = _measure(case, device)
    except torch.OutOfMemoryError:
        reached = torch.cuda.max_memory_allocated(device) if on_gpu else 0
        return {"fits": False, "needs_more_than_bytes": max(reached, case.least_bytes())}
    return {"fits": True, **measured}


def _measure(case: Case, device: torch.device) -> dict[str, Any]:
    trained = make_training(case, device)
    build_peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    length, vocab = case.sequence_length, case.config.vocab_size
    batches = [random_pairs(1, length, vocab, case.seed + i).to(device) for i in range(case.n_steps)]
    references = reference_logprobs(trained, batches) if case.precomputed_reference else None
    timer = StepTimer(device)
    step = dpo_steps(trained, batches, timer.section, references)
    return {"build_peak_bytes": build_peak, **measure_steps(trained, step, case.n_steps, timer, device)}


def make_training(case: Case, device: torch.device) -> Trained:
    """The model with random weights, made layer by layer on the device, and what trains it."""
    torch.manual_seed(case.seed)
    policy: Any = make_model(
        case.config,
        device,
        case.seed,
        checkpointing=case.checkpointing,
        compiled=case.compile,
        prepare=quantize_linear_layers if case.base == "nf4" else None,
    )
    make_masks_skippable(policy)
    policy.train()  # transformers checkpoints activations only then
    if case.method == "dense":
        return dense_training(policy, case.learning_rate, copied=not case.precomputed_reference)
    if case.method == "lora":
        add = add_lora_to_quantized if case.base == "nf4" else add_lora
        return adapter_training(add(policy, case.lora_rank), case.learning_rate)
    mask = MaskSet.random(masked_shapes(case.config), density=case.density, pattern=case.pattern, seed=case.seed)
    options = LEAN
    if case.precomputed_reference:
        options = {**LEAN, "keep_base_weights": False, "offload_base_weights": False}
    return sparse_training(policy, mask, case.learning_rate, **options)


# The command


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


def cases(args: Namespace) -> list[Case]:
    """The rows to measure, in this order."""
    own = ("shape", "method", "checkpointing")
    shared = {field.name: getattr(args, field.name) for field in fields(Case) if field.name not in own}
    return [
        Case(**shared, shape=shape, method=method, checkpointing=CHECKPOINTING[checkpointing])
        for shape in args.shapes
        for method in args.methods
        for checkpointing in args.checkpointing
    ]


def measure(args: Namespace, run: Run) -> None:
    """Run every case in a process of its own; rows are written to the output after each."""
    with tempfile.TemporaryDirectory(prefix="sparse_opt_scale_") as folder:
        for case in cases(args):
            name = label(case.described(), ("parameters",))
            result = run_in_process("sparse_opt.bench.scale", name, asdict(case), Path(folder), ALLOCATOR)
            if result is None:
                run.miss(f"{name}, whose run failed")
                continue
            run.add(*result_rows(result, case))
            run.wrong += [f"{name}: {line}" for line in wrong_results(result, case)]
            run.save()


def result_rows(result: dict[str, Any], case: Case) -> list[Row]:
    """The rows of a case: time and memory, or a lower bound of the memory if it does not fit."""
    shared: dict[str, Any] = {"suite": "scale", "case": case.described()}
    if not result["fits"]:
        return [Row(**shared, metric="does not fit: more than", unit="bytes", value=result["needs_more_than_bytes"])]
    steps = [1e3 * step["step_s"] for step in result["steps"][N_WARMUP:]]
    found = [Row.of_samples(steps, **shared, metric="step", unit="ms")]
    memory = {name: result[f"{name}_bytes"] for name in ("peak_memory", "peak_reserved", "build_peak")}
    for name, nbytes in {**memory, "weights": result["bytes"]["weights"]}.items():
        if nbytes is not None:
            found.append(Row(**shared, metric=name.replace("_", " "), unit="bytes", value=nbytes))
    return found


def first_loss_atol(case: Case) -> float:
    """How far the first step's loss may be from ln 2."""
    if not case.compile:
        return FIRST_LOSS_ATOL
    return 2 * 0.5 * DPO_BETA * COMPILED_TOKEN_RMS * math.sqrt(2 * case.sequence_length)


def wrong_results(result: dict[str, Any], case: Case) -> list[str]:
    """The errors in a result, a line each."""
    if not result["fits"]:
        return []
    wrong, first = [], result["steps"][0]["loss"]
    if not abs(first - math.log(2)) <= first_loss_atol(case):
        wrong.append(f"begins at a DPO loss of {first}, expected ln 2 = {math.log(2):.6f}")
    if not all(step["grad_norm"] > 0 for step in result["steps"]):
        wrong.append("has a gradient norm of 0, expected more than 0")
    if case.method == "lean" and case.pattern != "element" and not result["n_tiled"]:
        wrong.append("computes no weight gradient by tiles")
    return wrong


main = Benchmark(
    name="scale",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/scale_{device}.json",
).main

if __name__ == "__main__":
    sys.exit(job_main(lambda job: run(Case(**job))))
