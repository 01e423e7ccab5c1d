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
allocator holds. On a CPU the peak is the process's largest resident set, including imports, which says little about a
tiny model.
"""

from __future__ import annotations

import math
import resource
import sys
import tempfile
import time
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
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
from ..rows import Case, Row, Run
from ..shapes import LLAMA_3_2_3B_SIZES
from .baseline.inputs import SMALL, make_checkpoint, preference_pairs, without_weights, words_config, write_pairs

MODES = ("trl", "precomputed", "sparse")
SHAPES = {"3b": LLAMA_3_2_3B_SIZES, "tiny": SMALL}
MODULE = "sparse_opt.bench.training.trl"
PACKAGES = ("trl", "transformers", "accelerate")
# Largest difference of the losses of the first step, before which all modes have the same weights. The policy equals
# its reference, so the loss is ln 2 up to the order in which bf16 log-probabilities are summed.
LOSS_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one mode trains. Paths are strings, so that it goes through JSON."""

    mode: str
    model: str
    pairs: str
    mask: str
    sequence_length: int
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    n_steps: int
    learning_rate: float
    grad_dtype: str
    device: str
    seed: int


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train for `n_steps` and return what was measured, step by step."""
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
        "mask": job.mask,
        "sparse": SparseArguments(grad_dtype=getattr(torch, job.grad_dtype)),
    }
    trainer = trainer_class(
        model=transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16),
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
        train_dataset=datasets.load_dataset("json", data_files=job.pairs, split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(job.model),
        callbacks=[watch],
        **(ours if job.mode == "sparse" else {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for row in logged:
        if not (math.isfinite(row["loss"]) and row["grad_norm"] > 0):
            raise SparseOptError(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {
        "n_trained": trainer.sparse_mask.nnz if job.mode == "sparse" else trainer.get_num_trainable_parameters(),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else resident,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "losses": [row["loss"] for row in logged],
        "step_s": watch.seconds,
    }


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shape", choices=SHAPES, default="3b", help="of the model; tiny is for a CPU (%(default)s)")
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
        folder, config = Path(name), words_config(SHAPES[args.shape], args.sequence_length)
        make_checkpoint(folder / "model", config, seed=args.seed, device=torch.device(args.device))
        n_pairs = args.n_steps * args.batch_size * args.gradient_accumulation_steps
        write_pairs(folder / "pairs.jsonl", preference_pairs(n_pairs, args.sequence_length, args.seed))
        mask = MaskSet.random(without_weights(config), density=args.density, pattern=args.pattern, seed=args.seed)
        files = {"model": folder / "model", "pairs": folder / "pairs.jsonl", "mask": folder / "mask.safetensors"}
        mask.save(files["mask"])
        paths: dict[str, Any] = {key: str(path) for key, path in files.items()}
        shared = {field.name: getattr(args, field.name) for field in fields(Job) if hasattr(args, field.name)}
        caches = {"HF_DATASETS_CACHE": str(folder / "datasets")}
        firsts = []
        for mode in MODES:
            job = Job(**shared, **paths, mode=mode)
            result = run_in_process(MODULE, mode, asdict(job), folder, caches)
            if result is None:
                raise SparseOptError(f"mode {mode} failed")
            add_rows(run, result, job, args)
            run.save()
            firsts.append(result["losses"][0])
    if max(firsts) - min(firsts) > LOSS_TOLERANCE:
        run.wrong.append(f"the first losses are {firsts}, of the same weights and pairs")


OF_SPARSE = ("density", "pattern", "grad_dtype")
OF_ALL = (
    *("shape", "sequence_length", "batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("learning_rate", "seed"),
)


def add_rows(run: Run, result: dict[str, Any], job: Job, args: Namespace) -> None:
    """The rows of one mode, compared with TRL's own."""
    names = (*OF_ALL, *(OF_SPARSE if job.mode == "sparse" else ()))
    case: Case = {"mode": job.mode, **{name: getattr(args, name) for name in names}}
    peers: dict[str, float | Case] = {} if job.mode == "trl" else {"trl": {"mode": "trl", **dict.fromkeys(OF_SPARSE)}}
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


benchmark = Benchmark(
    name="trl",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    output="bench/results/trl.json",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or in a process that it started, the job of a file."""
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0].endswith(".json"):
        return job_main(lambda job: run(Job(**job), Path(words[0]).parent), words)
    return benchmark.main(words)


if __name__ == "__main__":
    sys.exit(main())
