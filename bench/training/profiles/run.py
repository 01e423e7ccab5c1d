"""Run all three stages of one RFT configuration in a separate process: `... bench.training.profiles.run JOB RESULT`.

Each stage first runs on a small share of the work, so that one-time costs (imports, compilation, allocation) are not
measured.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparse_opt.config import parse_config
from sparse_opt.trainers import sft
from sparse_opt.trainers.data.loaders import data_loader
from sparse_opt.trainers.data.packing import pack
from sparse_opt.trainers.policy.models import load_tokenizer
from sparse_opt.trainers.rft import train as rft

from ...common.harness import job_main

_WARMUP_PROMPTS = 8
_WARMUP_STEPS = 2
STAGES = tuple(rft.STAGES)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process runs: the stages of RFT, or SFT and a test for the model that all configurations start from."""

    name: str
    folder: str  # new, for the outputs of the stages
    values: dict[str, dict[str, Any]]  # stage -> its options; paths are strings, so that a job can be written as JSON


def run(job: Job) -> dict[str, Any]:
    """Run the stages of a job; return the measurements of each, and the last checkpoint that they wrote."""
    if "train" in job.values:
        _stages(job, Path(job.folder) / "warmup", few=True)
    measured, checkpoint = _stages(job, Path(job.folder) / "run", few=False)
    resident = _peak_resident_bytes()
    return {"name": job.name, "stages": measured, "checkpoint": checkpoint, "peak_resident_bytes": resident}


def _stages(job: Job, folder: Path, *, few: bool) -> tuple[dict[str, dict[str, Any]], str | None]:
    measured: dict[str, dict[str, Any]] = {}
    outputs: dict[str, dict[str, Any]] = {}
    checkpoint: str | None = None
    for stage, options in job.values.items():
        values = {**options, "output_dir": folder / stage}
        if stage == "train":
            # The warm-up's few prompts may have no right answer to train on.
            values["dataset"] = _any_rows(folder) if few else outputs["datagen"]["kept_file"]
            values |= {"n_steps": _WARMUP_STEPS} if few else {}
            if values["packing"] in (True, "true"):
                values["batch_size"] = rows_for(values)
        elif few:
            values["subset_size"] = _WARMUP_PROMPTS
        if stage == "test" and checkpoint is not None:
            values["checkpoint"] = checkpoint
        outputs[stage], seconds = _timed(stage, values)
        if stage in ("sft", "train"):
            checkpoint = outputs[stage]["checkpoint"]
        if stage != "sft":
            measured[stage] = {"wall_s": seconds, **_measurements(stage, outputs[stage])}
    return measured, checkpoint


def _any_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    row = json.dumps({"prompt": "1 + 1 =", "completion": " 2"}) + "\n"
    path.write_text(_WARMUP_PROMPTS * row, encoding="utf-8")
    return path


def _timed(stage: str, values: dict[str, Any]) -> tuple[dict[str, Any], float]:
    config_class, function = (sft.SFTConfig, sft.train) if stage == "sft" else rft.STAGES[stage]
    config = configured(config_class, values)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    began = time.perf_counter()
    output = function(config)
    return output, time.perf_counter() - began


def rows_for(values: dict[str, Any]) -> int:
    """How many packed rows hold `batch_size` of the dataset's examples on average."""
    config = configured(rft.RFTConfig, values)
    examples, _ = data_loader("demonstration", config)(config.dataset, "train", load_tokenizer(config), None, 0)
    rows = pack([len(sequence.ids) for (sequence,) in examples], config.max_length)
    return max(1, round(config.batch_size * len(rows) / len(examples)))


def configured(config_class: type, values: dict[str, Any]) -> Any:
    """The options as the command line would read them."""
    return parse_config(config_class, [f"{name}={_word(value)}" for name, value in values.items()])


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _measurements(stage: str, output: dict[str, Any]) -> dict[str, Any]:
    if stage == "train":
        rows = [json.loads(line) for line in Path(output["metrics_file"]).read_text(encoding="utf-8").splitlines()]
        seconds = sum(row["step_time_s"] for row in rows)
        return {
            "work_s": seconds,
            "tokens_per_s": sum(row["n_tokens"] for row in rows) / seconds,
            "peak_memory_bytes": output["peak_memory_bytes"],
            "optimizer_bytes": output["optimizer_bytes"],
            "loss": [rows[0]["loss"], rows[-1]["loss"]],
            "padding": sum(row["padding"] for row in rows) / len(rows),
            "epochs": rows[-1]["epoch"],
        }
    shares = {name: output[name] for name in ("accuracy", "answer_rate", "n_prompts", "n_completions")}
    return {
        "work_s": output["generate_time_s"] + output["verify_time_s"],
        "tokens_per_s": output["tokens_per_s"],
        "peak_memory_bytes": output["peak_memory_bytes"],
        **shares,
        **({"n_kept": output["n_kept"]} if stage == "datagen" else {}),
    }


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts KiB


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that a JSON file describes and write the measurements to another."""
    return job_main(lambda job: run(Job(**job)), argv)


if __name__ == "__main__":
    sys.exit(main())
