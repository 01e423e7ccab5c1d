"""DPO in TRL, with its own optimizer and with SparseAdamW: time of a step, and peak memory.

The model has the shape of Llama-3.2-3B and random bf16 weights, the texts are random words of exact length, and each
mode runs in a process of its own:

| mode | |
|---|---|
| trl | DPOTrainer with torch's fused AdamW, whose moments are bf16 like the weights, and a reference model |
| precomputed | the same without a reference model: its log-probabilities are computed before training |
| sparse | `sparse_trainer(DPOTrainer)` with a random mask: fp32 moments, compact gradients, reference by base weights |

All modes train on the same pairs in the same order, with the trainer's own clipping and without fp32 master weights.
The peak is that of torch's allocator from the first step on (`max_memory_allocated`); the reserved memory is what the
allocator holds.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from argparse import BooleanOptionalAction, Namespace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparse_opt import MaskSet
from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import SparseOptError
from sparse_opt.integrations import SparseArguments, sparse_trainer

from ..harness import Benchmark, job_main, run_in_process
from ..models import without_weights
from ..rows import Case, Row, Run
from ..shapes import LLAMA_3_2_3B_SIZES, TINY_SIZES
from .baseline.inputs import make_checkpoint, preference_pairs, words_config, write_pairs

MODES = ("trl", "precomputed", "sparse")
SIZES = {"3b": LLAMA_3_2_3B_SIZES, "tiny": TINY_SIZES}
OF_SPARSE = ("density", "pattern", "grad_dtype")
OF_ALL = (
    *("shape", "sequence_length", "batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("learning_rate", "seed"),
)
PACKAGES = ("trl", "transformers", "accelerate")
# Largest difference of the losses of the first step, before which all modes have the same weights. The policy equals
# its reference, so the loss is ln 2 up to the order in which bf16 log-probabilities are summed.
LOSS_TOLERANCE = 0.02


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train one mode for `n_steps` and return what was measured, step by step.

    Args:
        settings: options of the benchmark, `mode`, and the `folder` with model, pairs and mask.
    """
    job, folder = Namespace(**settings), Path(settings["folder"])
    transformers, trl, datasets = (import_module(name) for name in ("transformers", "trl", "datasets"))

    class Watch(transformers.TrainerCallback):  # type: ignore[name-defined]  # a variable, to a type checker
        """Times each step including the device's work, and resets the peak after the setup."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self._began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.seconds.append(time.perf_counter() - self._began)

    on_gpu = job.device != "cpu"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    watch = Watch()
    trainer_class = sparse_trainer(trl.DPOTrainer) if job.mode == "sparse" else trl.DPOTrainer
    ours = {
        "mask": str(folder / "mask.safetensors"),
        "sparse": SparseArguments(grad_dtype=getattr(torch, job.grad_dtype)),
    }
    trainer = trainer_class(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16),
        args=trl.DPOConfig(
            output_dir=str(folder / "out"),
            max_steps=job.n_steps,
            max_length=job.sequence_length,
            per_device_train_batch_size=job.batch_size,
            gradient_accumulation_steps=job.gradient_accumulation_steps,
            gradient_checkpointing=job.gradient_checkpointing,
            precompute_ref_log_probs=job.mode == "precomputed",
            learning_rate=job.learning_rate,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            bf16=True,
            use_cpu=not on_gpu,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=job.seed,
        ),
        train_dataset=datasets.load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[watch],
        **(ours if job.mode == "sparse" else {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for row in logged:
        if not (math.isfinite(row["loss"]) and row["grad_norm"] > 0):
            raise SparseOptError(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}")
    return {
        "n_trained": trainer.sparse_mask.nnz if job.mode == "sparse" else trainer.get_num_trainable_parameters(),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "losses": [row["loss"] for row in logged],
        "step_s": watch.seconds,
    }


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shape", choices=SIZES, default="3b", help="of the model; tiny is for a CPU (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="density of mode sparse's mask (%(default)s)")
    what.add_argument("--pattern", default="element", help="pattern of the mask (%(default)s)")
    what.add_argument("--grad_dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    what.add_argument("--sequence_length", type=int, default=512, help="tokens, prompt and completion (%(default)s)")
    what.add_argument("--batch_size", type=int, default=1, help="pairs of a micro-batch (%(default)s)")
    what.add_argument("--gradient_accumulation_steps", type=int, default=1, help="(%(default)s)")
    what.add_argument("--gradient_checkpointing", action=BooleanOptionalAction, default=True, help="as TRL's default")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="in every mode (%(default)s)")
    run = parser.add_argument_group("how")
    run.add_argument("--n_steps", type=int, default=6, help="of each mode (%(default)s)")
    run.add_argument("--n_warmup", type=int, default=1, help="steps left out of the times (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of weights, mask and pairs (%(default)s)")
    run.add_argument("--work_dir", type=Path, help="folder for the checkpoint, 6.4 GB (default: a temporary one)")


def problem(args: Namespace) -> str:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return f"needs {', '.join(missing)}: pip install 'sparse-opt[test]'"
    return ""


def measure(args: Namespace, run: Run) -> None:
    """Run all modes."""
    run.environment["versions"] |= {name: import_module(name).__version__ for name in PACKAGES}
    with tempfile.TemporaryDirectory(dir=args.work_dir) as name:
        folder, config = Path(name), words_config(SIZES[args.shape], args.sequence_length)
        make_checkpoint(folder / "model", config, seed=args.seed, device=torch.device(args.device))
        n_pairs = args.n_steps * args.batch_size * args.gradient_accumulation_steps
        write_pairs(folder / "pairs.jsonl", preference_pairs(n_pairs, args.sequence_length, args.seed))
        mask = MaskSet.random(without_weights(config), density=args.density, pattern=args.pattern, seed=args.seed)
        mask.save(folder / "mask.safetensors")
        shared = {name: getattr(args, name) for name in (*OF_ALL, *OF_SPARSE, "n_steps", "device")}
        caches = {"HF_DATASETS_CACHE": str(folder / "datasets")}
        firsts = []
        for mode in MODES:
            job = shared | {"mode": mode, "folder": str(folder)}
            result = run_in_process("sparse_opt.bench.training.trl", mode, job, folder, caches)
            if result is None:
                raise SparseOptError(f"mode {mode} failed")
            add_rows(run, result, mode, args)
            run.save()
            firsts.append(result["losses"][0])
    if max(firsts) - min(firsts) > LOSS_TOLERANCE:
        run.wrong.append(f"the first losses are {firsts}, of the same weights and pairs")


def add_rows(run: Run, result: dict[str, Any], mode: str, args: Namespace) -> None:
    """The rows of one mode, compared with TRL's own."""
    names = (*OF_ALL, *(OF_SPARSE if mode == "sparse" else ()))
    case: Case = {"mode": mode, **{name: getattr(args, name) for name in names}}
    peers: dict[str, float | Case] = {} if mode == "trl" else {"trl": {"mode": "trl", **dict.fromkeys(OF_SPARSE)}}
    steps = [1000 * seconds for seconds in result["step_s"][args.n_warmup :]]
    run.add(Row.of_samples(steps, suite="trl", case=case, metric="step", unit="ms", peers=peers))
    values = {
        "peak memory": ("bytes", result["peak_memory_bytes"]),
        "reserved memory": ("bytes", result["peak_reserved_bytes"]),
        "values trained": ("", result["n_trained"]),
        "first loss": ("", result["losses"][0]),
        "last loss": ("", result["losses"][-1]),
    }
    for metric, (unit, value) in values.items():
        if value is not None:
            of_peak = peers if metric == "peak memory" else {}
            run.add(Row(suite="trl", case=case, metric=metric, unit=unit, value=value, peers=of_peak))


main = Benchmark(
    name="trl",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    output="bench/results/trl.json",
).main

if __name__ == "__main__":
    sys.exit(job_main(run))
