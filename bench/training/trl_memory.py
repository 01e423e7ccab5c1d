"""Peak memory of DPO in TRL, theirs and with SparseAdamW: `python -m sparse_opt.bench.training.trl_memory`.

A model of Llama-3.2-3B's shape with random bf16 weights, random words of exact length, and one process for each mode:

| mode | |
|---|---|
| trl | DPOTrainer with fused torch AdamW, whose moments are bf16 as the weights are, and a reference model |
| precomputed | the same without a reference model: its log-probabilities are made before training |
| sparse | `sparse_trainer(DPOTrainer)` with a random mask: fp32 moments, compact gradients, reference by base weights |

All train on the same pairs in the same order, with the trainer's own clipping, and none has fp32 master weights. The
peak is that of torch's allocator from the first step on (`max_memory_allocated`), the reserved one what it holds of the
GPU. On a CPU it is the process's largest resident set, imports and all, which says little of a tiny model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sparse_opt import MaskSet
from sparse_opt.errors import SparseOptError
from sparse_opt.integrations import SparseArguments, sparse_trainer

from ..common.environment import environment
from ..common.report import table, why_unwritable, write_json
from ..common.shapes import LLAMA_3_2_3B_SIZES
from .baseline.inputs import SMALL, make_checkpoint, preference_pairs, without_weights, words_config, write_pairs

MODES = ("trl", "precomputed", "sparse")
SHAPES = {"3b": LLAMA_3_2_3B_SIZES, "tiny": SMALL}
HEADERS = ("mode", "trained", "peak GiB", "reserved GiB", "step ms", "first loss", "last loss")
PACKAGES = ("trl", "transformers", "accelerate")
# Of the losses of the first step, before which all modes have the same weights. The policy is its reference there, so
# that the loss is ln 2 but for bf16 log-probabilities that are summed in another order.
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
        """Times each step, the device waited for, and forgets the peak of setting up."""

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

    on_gpu = job.device == "cuda"
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
        "mode": job.mode,
        "n_trained": trainer.sparse_mask.nnz if job.mode == "sparse" else trainer.get_num_trainable_parameters(),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else resident,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "optimizer_bytes": trainer.sparse_optimizer.nbytes() if job.mode == "sparse" else None,
        "losses": [row["loss"] for row in logged],
        "grad_norms": [row["grad_norm"] for row in logged],
        "step_s": watch.seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all modes, print a table and write JSON; 0 if every mode ran and all began at the same loss, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.job is not None:
        return _child(args.job)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    problem = f"needs {', '.join(missing)}: pip install 'sparse-opt[test]'" if missing else why_unwritable(args.output)
    device = args.device or ("cpu" if args.shape == "tiny" else "cuda")
    if not problem and device == "cuda" and not torch.cuda.is_available():
        problem = f"--device cuda: torch {torch.__version__} sees no CUDA GPU; --shape tiny runs on the CPU"
    if not problem and min(args.n_steps, args.batch_size, args.gradient_accumulation_steps) < 1:
        problem = "--n_steps, --batch_size and --gradient_accumulation_steps want 1 or more"
    if problem:
        parser.error(problem)
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        results = _run_all(args, device, Path(folder))
    if results is None:
        return 1
    report = {
        "settings": {name: value for name, value in vars(args).items() if name not in ("job", "work_dir", "output")},
        "results": results,
        "versions": {name: import_module(name).__version__ for name in PACKAGES},
        "environment": environment(device),
    }
    print(table(HEADERS, cells(results)))
    write_json(args.output, report)
    firsts = [result["losses"][0] for result in results]
    if max(firsts) - min(firsts) > LOSS_TOLERANCE:
        print(f"WRONG RESULT: the first losses are {firsts}, of the same weights and pairs", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_opt.bench.training.trl_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="of the model (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, and cpu for --shape tiny")
    parser.add_argument("--density", type=float, default=0.025, help="of mode sparse's random mask (%(default)s)")
    parser.add_argument("--pattern", default="element", help="of the mask (%(default)s)")
    parser.add_argument("--grad_dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens, prompt and completion (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=1, help="pairs of a micro-batch (%(default)s)")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1, help="(%(default)s)")
    parser.add_argument(
        "--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=True, help="as TRL's default"
    )
    parser.add_argument("--n_steps", type=int, default=6, help="of each mode; the first is left out of the time")
    parser.add_argument("--learning_rate", type=float, default=1e-6, help="in every mode (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, mask and pairs (%(default)s)")
    parser.add_argument(
        "--work_dir", type=Path, help="where to make the checkpoint, 6.4 GB (default: a temporary folder)"
    )
    parser.add_argument("--output", type=Path, default=Path("bench/results/trl_memory.json"), help="JSON (%(default)s)")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # one mode, in a process of its own
    return parser


def _run_all(args: argparse.Namespace, device: str, folder: Path) -> list[dict[str, Any]] | None:
    config = words_config(SHAPES[args.shape], args.sequence_length)
    make_checkpoint(folder / "model", config, seed=args.seed, device=torch.device(device))
    n_pairs = args.n_steps * args.batch_size * args.gradient_accumulation_steps
    write_pairs(folder / "pairs.jsonl", preference_pairs(n_pairs, args.sequence_length, args.seed))
    mask = MaskSet.random(without_weights(config), density=args.density, pattern=args.pattern, seed=args.seed)
    mask.save(folder / "mask.safetensors")
    results = []
    for mode in MODES:
        job = Job(
            mode=mode,
            model=str(folder / "model"),
            pairs=str(folder / "pairs.jsonl"),
            mask=str(folder / "mask.safetensors"),
            sequence_length=args.sequence_length,
            batch_size=args.batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            gradient_checkpointing=args.gradient_checkpointing,
            n_steps=args.n_steps,
            learning_rate=args.learning_rate,
            grad_dtype=args.grad_dtype,
            device=device,
            seed=args.seed,
        )
        file = folder / f"{mode}.json"
        file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        print(f"{mode}: {args.n_steps} steps", flush=True)
        command = [sys.executable, "-m", "sparse_opt.bench.training.trl_memory", "--job", str(file)]
        done = subprocess.run(command, check=False, env={**os.environ, "HF_DATASETS_CACHE": str(folder / "datasets")})
        if done.returncode != 0:
            print(f"{mode}: the run ended with exit code {done.returncode}", file=sys.stderr)
            return None
        results.append(json.loads((folder / f"{mode}_result.json").read_text(encoding="utf-8")))
    return results


def _child(job_file: Path) -> int:
    job = Job(**json.loads(job_file.read_text(encoding="utf-8")))
    try:
        result = run(job, job_file.parent)
    except SparseOptError as error:
        print(f"sparse-opt: error: mode {job.mode}: {error}", file=sys.stderr)
        return 1
    write_json(job_file.with_name(f"{job.mode}_result.json"), result)
    return 0


def cells(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each mode, in the order of HEADERS."""
    gib = 2**30
    return [
        [
            result["mode"],
            f"{result['n_trained']:,}",
            f"{result['peak_memory_bytes'] / gib:.2f}",
            "-" if result["peak_reserved_bytes"] is None else f"{result['peak_reserved_bytes'] / gib:.2f}",
            f"{1000 * median(result['step_s'][1:] or result['step_s']):.0f}",
            f"{result['losses'][0]:.4f}",
            f"{result['losses'][-1]:.4f}",
        ]
        for result in results
    ]


if __name__ == "__main__":
    sys.exit(main())
