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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparse_opt.config import parse_config
from sparse_opt.errors import SparseOptError
from sparse_opt.trainers import sft
from sparse_opt.trainers.data.loaders import data_loader
from sparse_opt.trainers.data.packing import pack
from sparse_opt.trainers.policy.models import load_tokenizer
from sparse_opt.trainers.profiles import STAGES
from sparse_opt.trainers.rft import train as rft

from ...common.report import write_json

_WARMUP_PROMPTS = 8
_WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process runs. Paths are strings, so that it goes through JSON."""

    name: str
    folder: str  # new, for what the stages write
    values: dict[str, dict[str, Any]]  # stage -> options, those of the configuration under measure among them


def run(job: Job) -> dict[str, Any]:
    """Sample, train and test; return the measurements of each stage."""
    _stages(job, Path(job.folder) / "warmup", few=True)
    figures = _stages(job, Path(job.folder) / "run", few=False)
    return {"name": job.name, "stages": figures, "peak_resident_bytes": _peak_resident_bytes()}


def _stages(job: Job, folder: Path, *, few: bool) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    outputs: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        values = {**job.values[stage], "output_dir": folder / stage}
        if stage == "train":
            # The warm-up's few prompts may have no right answer to train on.
            values["dataset"] = _any_rows(folder) if few else outputs["datagen"]["kept_file"]
            values |= {"n_steps": _WARMUP_STEPS} if few else {}
            if values["packing"]:
                values["batch_size"] = rows_for(values)
        else:
            values |= {"subset_size": _WARMUP_PROMPTS} if few else {}
        if stage == "test":
            values["checkpoint"] = outputs["train"]["checkpoint"]
        outputs[stage], seconds = _timed(stage, values)
        figures[stage] = {"wall_s": seconds, **_figures(stage, outputs[stage])}
    return figures


def _any_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    row = json.dumps({"prompt": "1 + 1 =", "completion": " 2"}) + "\n"
    path.write_text(_WARMUP_PROMPTS * row, encoding="utf-8")
    return path


def _timed(stage: str, values: dict[str, Any]) -> tuple[dict[str, Any], float]:
    config_class, function = rft.STAGES[stage]
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


def _figures(stage: str, output: dict[str, Any]) -> dict[str, Any]:
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


@dataclass(frozen=True, kw_only=True)
class StartJob:
    """The model that every configuration starts from: SFT on demonstrations, where there are some, and its test."""

    name: str
    folder: str
    sft: dict[str, Any] | None  # options of the SFT start
    test: dict[str, Any]


def run_start(job: StartJob) -> dict[str, Any]:
    """Train the start if it is to be, and test it: its checkpoint and accuracy."""
    folder, checkpoint = Path(job.folder), None
    if job.sft is not None:
        config = configured(sft.SFTConfig, {**job.sft, "output_dir": folder / "sft"})
        checkpoint = sft.train(config)["checkpoint"]
    values = {**job.test, "output_dir": folder / "test", **({} if checkpoint is None else {"checkpoint": checkpoint})}
    summary = rft.test(configured(rft.TestConfig, values))
    return {
        "name": job.name,
        "checkpoint": checkpoint,
        "accuracy": summary["accuracy"],
        "answer_rate": summary["answer_rate"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that a JSON file describes and write what was measured to another."""
    job_file, result_file = map(Path, sys.argv[1:] if argv is None else argv)
    described = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        if "sft" in described:
            start = StartJob(**described)
            result = {"job": asdict(start), **run_start(start)}
        else:
            job = Job(**described)
            result = {"job": asdict(job), **run(job)}
    except (SparseOptError, torch.OutOfMemoryError, OSError) as error:
        print(f"sparse-opt: error: {described['name']}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    write_json(result_file, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())


@dataclass(frozen=True)
class Configuration:
    """What is measured: option values by stage, over those that all configurations share."""

    name: str
    kind: str  # plain, profile or setting
    values: dict[str, dict[str, Any]]
