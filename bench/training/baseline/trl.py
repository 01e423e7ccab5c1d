"""One mode of `sparse-opt bench baseline trl`, in a process of its own: DPO in TRL's DPOTrainer.

| mode | |
|---|---|
| dense | DPOTrainer with torch's fused AdamW, whose moments are bf16 like the weights, and a reference model |
| sparse, tiles | `sparse_trainer(DPOTrainer)`: fp32 moments, compact fp32 gradients, the base weights as reference |

All modes train on the same pairs in the same order, with the trainer's own clipping and without fp32 master weights.
With a precomputed reference, its log-probabilities are computed before training, and there is no reference model.
The peak is that of torch's allocator from the first step on.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import xxhash

from sparse_opt.integrations import sparse_trainer

from ...harness import job_main
from .modes import Job
from .run import finite


def trainer_options(folder: str, n_steps: int, seed: int, *, on_gpu: bool) -> dict[str, Any]:
    """The options of TRL's trainers that all benchmarks have: metrics of every step, and no checkpoints."""
    quiet: dict[str, Any] = {"save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    arithmetic = {"bf16": True, "use_cpu": not on_gpu, "lr_scheduler_type": "constant", "seed": seed}
    return {"output_dir": folder, "max_steps": n_steps, **arithmetic, **quiet}


def step_watch(add: Callable[[dict[str, float]], object], *, on_gpu: bool) -> Any:
    """A callback of transformers' trainers. It passes the seconds of each step, which include the device's work, to
    `add`, and resets the peak of memory after the setup."""
    transformers = import_module("transformers")
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    class Watch(transformers.TrainerCallback):  # type: ignore[name-defined]  # a variable, to a type checker
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self._began, self._cpu_began = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            host_s = time.perf_counter() - self._began
            synchronize()
            step_s, cpu_s = time.perf_counter() - self._began, time.process_time() - self._cpu_began
            add({"step_s": step_s, "host_s": host_s, "cpu_s": cpu_s})

    return Watch()


def run(job: Job) -> dict[str, Any]:
    """Train for `n_steps` and return what was measured, step by step; a step includes the device's work."""
    transformers, trl, datasets = (import_module(name) for name in ("transformers", "trl", "datasets"))
    on_gpu, sparse = job.device != "cpu", job.mode != "dense"
    times: list[dict[str, float]] = []
    text = Path(job.dataset).read_text(encoding="utf-8")
    trainer_class = sparse_trainer(trl.DPOTrainer) if sparse else trl.DPOTrainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=transformers.AutoModelForCausalLM.from_pretrained(job.model_name, dtype=torch.bfloat16),
            args=trl.DPOConfig(
                **trainer_options(folder, job.n_steps, job.seed, on_gpu=on_gpu),
                max_length=job.sequence_length,
                per_device_train_batch_size=job.batch_size,
                gradient_checkpointing=job.gradient_checkpointing,
                precompute_ref_log_probs=job.precomputed_reference,
                learning_rate=job.learning_rate,
                train_sampling_strategy="sequential",
            ),
            train_dataset=datasets.Dataset.from_list([json.loads(line) for line in text.splitlines()]),
            processing_class=transformers.AutoTokenizer.from_pretrained(job.model_name),
            callbacks=[step_watch(times.append, on_gpu=on_gpu)],
            **({"mask": job.mask} if sparse else {}),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    metrics = [{name: finite(row[name], name, i) for name in ("loss", "grad_norm")} for i, row in enumerate(logged)]
    return {
        "mode": job.name,
        "fits": True,
        "n_trained": trainer.sparse_mask.nnz if sparse else trainer.get_num_trainable_parameters(),
        "n_tiled": len(trainer.sparse_optimizer.tiled_parameters) if sparse else 0,
        "data_digest": xxhash.xxh3_128_hexdigest(text.encode()),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "bytes": {},
        "steps": [{"section_s": {}, **one, **of_step} for one, of_step in zip(metrics, times, strict=True)],
    }


if __name__ == "__main__":
    sys.exit(job_main(lambda job: run(Job(**job))))
