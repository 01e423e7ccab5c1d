"""The runs of the study that are left, one line of results.jsonl each; a call that was stopped continues.

    python -m studies.smollm2.run --output_dir study --workers 8
    python -m studies.smollm2.run --output_dir study --claims 1 4 --dry_run
    python -m studies.smollm2.run --output_dir small --plan studies/learning/small.yaml    # on a CPU
    python -m studies.smollm2.run --output_dir quantised --plan studies/smollm2/quantised.yaml

Everything that is trained has learning rates of its own: tuning makes one run with a seed of its own at each of a few
rates, scored on questions that are neither trained on nor held out, and further ones while the best is the lowest or
highest. The runs of the seeds at the best rate are scored on the held-out questions.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sparse_opt.bench.rows import environment
from sparse_opt.errors import ConfigError

from ..training import (
    EARLY,
    NF4,
    Trained,
    answers,
    dequantise,
    in_process,
    make_mask,
    options_for,
    read_rows,
    train,
    visible_gpus,
    work,
    write_rows,
)
from .measures import make_texts, measure_update, scores
from .plan import FINDING_SEED, OF_DENSE, PLAN, Part, Run, Study

DATA = {"grpo": "train", "dpo": "pairs", "rft": "kept", "sft": "demonstrations"}  # algorithm -> file of its task
# Not trained here: adapters that `sparse-opt train` does not have, and runs that need the weights of another one.
NOT_HERE = ("shira", "supertuning", *OF_DENSE)


def prepare(study: Study, parts: Sequence[Part]) -> None:
    """Make what the runs share and does not exist yet: the model, questions, its own answers and texts, its scores."""
    settings, folder = study.settings, study.folder
    if settings["model"] == "smollm2":
        from studies.smollm2.questions import make_model, make_questions

        if not start_of(study).is_dir():
            make_model(start_of(study))
        for task in study.tasks:
            if not (folder / "questions" / task).is_dir():
                make_questions(folder / "questions" / task, task, **settings["questions"])
    else:
        _make_arithmetic(study)
    make_texts(folder / "texts.jsonl", start_of(study), **settings["texts"])
    over_nf4 = start_of(study, nf4=True)
    if (has_nf4 := any(part.trained.has_nf4_base for part in parts)) and not over_nf4.is_dir():
        dequantise(start_of(study), over_nf4)
    for task in study.tasks:
        of_task = [part for part in parts if part.subject.task == task]
        if any(part.subject.algorithm != "grpo" or part.trained.source in ("fisher", "snip") for part in of_task):
            _make_answers(study, folder / "questions" / task)
        if any(part.trained.source in early_steps(study) for part in of_task):
            _find(study, task)
        for name, start in {task: start_of(study), **({f"{task}:nf4": over_nf4} if has_nf4 else {})}.items():
            if name not in study.starts:
                study.starts[name] = scores(study, task, start)
                (folder / "starts.json").write_text(json.dumps(study.starts, indent=1), encoding="utf-8")


def start_of(study: Study, *, nf4: bool = False) -> Path:
    """The weights that every run starts from; over a base in NF4, what quantising these and dequantising gives."""
    return study.folder / (("model" if study.settings["model"] == "smollm2" else "start") + ("_nf4" if nf4 else ""))


def _make_arithmetic(study: Study) -> None:
    """A small Llama after SFT, and sums to train on, to tune with, and held out."""
    from sparse_opt.trainers.arithmetic import make_arithmetic

    made, (task,), settings = study.folder / "arithmetic", study.tasks, study.settings
    if not made.is_dir():
        make_arithmetic(made, **settings["world"])
    if not (start_of(study) / "model.safetensors").is_file():
        of_data = {"model_name_or_path": made / "model", "dataset_name": made / "data/demonstrations.jsonl"}
        train("sft", settings["shared"] | settings["start"] | of_data, start_of(study))
    rows, n_tune = read_rows(made / "data/train.jsonl"), settings["questions"]["n_tune"]
    named = {"tune": rows[:n_tune], "train": rows[n_tune:], "test": read_rows(made / "data/test.jsonl")}
    for name, of_file in named.items():
        write_rows(study.folder / "questions" / task / f"{name}.jsonl", of_file)


def _make_answers(study: Study, folder: Path) -> None:
    """The data of SFT, RFT and DPO: right answers, the start's own right ones, and pairs of a right and a wrong one."""
    if (folder / "pairs.jsonl").is_file():
        return
    rows, settings = read_rows(folder / "train.jsonl"), dict(study.settings["answers"])

    def as_completion(row: dict[str, Any], text: str) -> Any:
        return text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]

    demonstrations = ({"prompt": row["prompt"], "completion": as_completion(row, row["answer"])} for row in rows)
    write_rows(folder / "demonstrations.jsonl", demonstrations)
    asked = rows[: settings.pop("n_questions", None)]
    kept, pairs = [], []
    for row, found in zip(asked, answers(start_of(study), asked, study.settings["reward"], **settings), strict=True):
        texts = {right: list(dict.fromkeys(answer.text.strip() for answer in found if answer.ended
                                           and answer.right is right)) for right in (True, False)}  # fmt: skip
        kept += [{"prompt": row["prompt"], "completion": as_completion(row, text)} for text in texts[True]]
        for two in list(zip(texts[True], filter(None, texts[False]), strict=False))[:2]:
            chosen, rejected = (as_completion(row, text) for text in two)
            pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    write_rows(folder / "kept.jsonl", kept)
    write_rows(folder / "pairs.jsonl", pairs)


def early_steps(study: Study) -> dict[str, int]:
    """Source of a mask -> the step of the dense run that it is found in."""
    n_steps = study.settings["grpo"]["max_steps"]
    return {"found": n_steps, **{f"early{percent}": max(1, round(percent * n_steps / 100)) for percent in EARLY}}


def _find(study: Study, task: str) -> None:
    """The dense run that masks are found in, with a log of its weights."""
    log = study.folder / f"delta_logs_grpo_{task}"
    folder = study.folder / "runs" / f"finding_{task}"
    if not (folder / "model.safetensors").is_file():
        shutil.rmtree(log, ignore_errors=True)
        run = Run("grpo", task, "dense", float(study.settings["learning_rates"]["grpo"]), FINDING_SEED)
        steps = ",".join(map(str, sorted(set(early_steps(study).values()))))
        train("grpo", options_of(study, run) | {"delta_log_dir": log, "delta_log_steps": steps}, folder)


def options_of(study: Study, run: Run) -> dict[str, Any]:
    """The options of `sparse-opt train` for a run. Its mask is made unless it exists."""
    settings, trained = study.settings, Trained.parse(run.trained)
    options = {**settings["shared"], **settings[run.algorithm], "learning_rate": run.learning_rate, "seed": run.seed}
    options |= {"model_name_or_path": start_of(study)}
    options |= {"dataset_name": study.folder / "questions" / run.task / f"{DATA[run.algorithm]}.jsonl"}
    if run.algorithm == "grpo":
        options["reward_funcs"] = settings["reward"]
    if run.n_steps is not None:
        options["max_steps"] = run.n_steps
    if trained.source in ("lean", "nf4"):
        options |= dict.fromkeys(("dtype", "state_dtype", "grad_dtype"), "bfloat16") | {"stochastic_rounding": "true"}
        options |= NF4 if trained.has_nf4_base else {}
        trained = trained._replace(source="random")
    if not trained.is_mask:
        return options | options_for(trained)
    of_task = study.folder / "questions" / run.task
    # As many of the start's own right answers as a step of SFT has.
    n_scored = settings["sft"]["per_device_train_batch_size"] if trained.source in ("fisher", "snip") else None
    step = early_steps(study).get(trained.source)
    log = None if step is None else (study.folder / f"delta_logs_grpo_{run.task}", step)
    kept = None if n_scored is None else (of_task / "kept.jsonl", n_scored)
    options |= settings.get("masked", {})
    folder = study.folder / "masks" / run.task
    return options | {"mask": make_mask(folder, start_of(study), trained, seed=run.seed, log=log, dataset=kept)}


def do(study: Study, run: Run) -> dict[str, Any]:
    """Train, measure and remove the weights of a run."""
    began, folder = time.perf_counter(), study.folder / "runs" / run.name
    start = start_of(study, nf4=Trained.parse(run.trained).has_nf4_base)
    algorithm = "sft" if run.algorithm == "rft" else run.algorithm
    measured = train(algorithm, options_of(study, run), folder, merge_into=start)
    log = measured.pop("log")
    if run.algorithm == "grpo":
        measured["rewards"] = {row["step"]: row["reward"] for row in log if "reward" in row and row["step"] % 5 == 0}
    measured |= measure_update(start, folder) | scores(study, run.task, folder)
    shutil.rmtree(folder)
    return measured | {"seconds": time.perf_counter() - began}


def jobs(study: Study, parts: Sequence[Part]) -> Iterator[Run]:
    """The runs that can begin, in their order."""
    return (run for part in study.in_order(parts) for run in study.left(part))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.smollm2.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True, help="model, questions, runs and results")
    parser.add_argument("--plan", type=Path, default=PLAN, help="settings and plan (%(default)s)")
    parser.add_argument("--claims", type=int, nargs="+", help="the runs of these claims only")
    parser.add_argument("--workers", type=int, default=1, help="runs at once; with several on a GPU, no times")
    parser.add_argument("--dry_run", action="store_true", help="print the runs that can begin now")
    args = parser.parse_args(argv)
    folder = args.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(folder, args.plan)
    header = {"settings": study.settings_digest(), "jobs": math.ceil(args.workers / max(1, len(visible_gpus())))}
    if study.digest not in (None, header["settings"]):
        raise ConfigError(f"{folder}/results.jsonl has runs of settings {study.digest}, and {args.plan} has "
                          f"{header['settings']}: choose another --output_dir")  # fmt: skip
    parts = [part for part in study.parts if part.trained.source not in NOT_HERE]
    parts = [part for part in parts if not args.claims or set(part.claims) & set(args.claims)]
    if args.dry_run:
        print(*(run.name for run in jobs(study, parts)), sep="\n")
        return 0
    in_process(prepare, study, parts)
    study = Study(folder, args.plan)
    header |= environment("cuda" if torch.cuda.is_available() else "cpu")

    def keep(run: Run, measured: dict[str, Any]) -> None:
        study.add(run, measured | header)
        print(f"{run.name}: {measured['accuracy']:.3f}, {measured['seconds']:.0f} s", flush=True)

    return int(work(functools.partial(do, study), lambda: jobs(study, parts), keep, args.workers) > 0)


if __name__ == "__main__":
    sys.exit(main())
