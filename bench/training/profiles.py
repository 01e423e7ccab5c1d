"""Compares the profiles of `sparse-opt train rft` with plain training: seconds, tokens per second, memory and accuracy.

Each configuration runs the stages datagen, train and test in a process of its own, after a warm-up on few rows:

- plain: one prompt at a time, all weights in fp32, batches in random order, torch's AdamW as it is by default;
- each profile, as `--profile NAME` sets it.

A step has 32 examples in every configuration. Without a model it generates sums, and a Llama that SFT on
demonstrations, only some of them right, has prepared. All configurations start from the same weights; a repeat is
another seed.

The exit code is 1 if the accuracy of a profile is more than three standard errors below plain's.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparse_opt.integrations.rates import rate_factor
from sparse_opt.integrations.trl.train import run as train_with_trl
from sparse_opt.options import CommandParser
from sparse_opt.trainers.arithmetic import make_arithmetic
from sparse_opt.trainers.recipes import rft

from ..harness import Benchmark, WrongResult, job_main, not_between, run_in_process
from ..rows import Case, Row, Run

STAGES = ("datagen", "train", "test")
# Options of a stage that are not those of a profile.
PLAIN: dict[str, dict[str, Any]] = {
    "datagen": {"batch_size": 1},
    "train": {
        "per_device_train_batch_size": 32,
        "bf16": False,
        "optim": "adamw_torch",
        "gradient_checkpointing": False,
    },
    "test": {"batch_size": 1},
}
# A CPU trains this start in a minute; about a third of its sampled answers are right.
ARITHMETIC: dict[str, Any] = {"max_operand": 29, "n_train": 600, "p_right": 0.5}
SIGMAS = 3.0
SETTINGS = (
    *("model_name_or_path", "verifier", "answers", "hidden_size", "n_layers", "n_prompts", "oversample"),
    *("temperature", "max_completion_length", "train_steps", "learning_rate", "max_length", "n_test", "seed"),
)
COUNTS = ("n_prompts", "oversample", "train_steps", "n_test", "repeats", "start_steps", "n_layers")
_EPILOG = """examples:
  sparse-opt bench profiles                                    # sums, on this machine
  sparse-opt bench profiles --device cuda --hidden_size 768 --n_layers 14 --learning_rate 1e-4 --answers think \\
      --n_prompts 64 --n_test 75 --train_steps 30              # a Llama of 107 million weights
  sparse-opt bench profiles --model_name_or_path M --dataset_name train.json --test_dataset_name valid.json \\
      --verifier number --max_completion_length 100"""


def _options(parser: CommandParser) -> None:
    add = parser.add_argument_group("model, data and training").add_argument
    add("--profiles", nargs="+", choices=rft.PROFILES, default=list(rft.PROFILES), help="profiles to compare")
    add("--model_name_or_path", help="name or folder of a model; default: a small one for sums")
    add("--dataset_name", help="prompts with answers to train on; with --model_name_or_path")
    add("--test_dataset_name", help="prompts with answers to test on; with --model_name_or_path")
    add("--verifier", default=None, help="as of train rft; default: exact_match for sums, else number")
    add("--answers", choices=("plain", "think"), default="plain", help="sums: '42', or with the calculation")
    add("--hidden_size", type=int, default=128, help="sums: width of the model")
    add("--n_layers", type=int, default=2, help="sums: layers of the model")
    add("--start_steps", type=int, default=600, help="sums: steps of SFT that prepare the model")
    add("--n_prompts", type=int, default=256, help="prompts to sample completions of")
    add("--oversample", type=int, default=8, help="completions of each prompt")
    add("--temperature", type=float, default=1.0, help="temperature of these completions")
    add("--max_completion_length", type=int, help="tokens of a completion; default: what sums need, 8 or 32")
    add("--train_steps", type=int, default=100, help="steps of 32 examples")
    add("--learning_rate", type=float, default=1e-3, help="peak rate; times density^-0.75 under a mask")
    add("--max_length", type=int, default=64, help="tokens of a training example")
    add("--n_test", type=int, default=300, help="prompts to test on, greedily")
    add("--repeats", type=int, default=3, help="runs of every configuration, each with another seed")
    add("--seed", type=int, default=0, help="seed of the first repeat, and of the sums")


def _problem(args: Namespace) -> str:
    given = [args.model_name_or_path, args.dataset_name, args.test_dataset_name]
    if None in given and given != [None] * 3:
        return "expected all of --model_name_or_path, --dataset_name and --test_dataset_name, or none for sums"
    if None not in given and args.max_completion_length is None:
        return "expected --max_completion_length with --model_name_or_path"
    args.max_completion_length = args.max_completion_length or {"plain": 8, "think": 32}[args.answers]
    args.verifier = args.verifier or ("exact_match" if args.model_name_or_path is None else "number")
    return not_between(args, *COUNTS, "max_completion_length") or not_between(args, "max_length", at_least=2)


def _measure(args: Namespace, run: Run) -> None:
    with tempfile.TemporaryDirectory(prefix="sparse_opt_profiles_") as name:
        folder = Path(name)
        common = {"use_cpu": args.device == "cpu"}
        sampling = {**common, "verifier": args.verifier, "max_completion_length": args.max_completion_length}
        model, data, test_data = args.model_name_or_path, args.dataset_name, args.test_dataset_name
        commands: list[Any] = []
        if model is None:
            sizes = {"answers": args.answers, "hidden_size": args.hidden_size, "n_layers": args.n_layers}
            world = make_arithmetic(folder / "sums", **ARITHMETIC, **sizes, seed=args.seed)
            data, test_data = world / "data/train.jsonl", world / "data/test.jsonl"
            model, commands = folder / "start", [["sft", _start_options(args, world, folder / "start") | common]]
        sampling |= {"model_name_or_path": model}
        test = {**sampling, "dataset_name": test_data, "dataset_split": f"train[:{args.n_test}]"}
        start = _run(folder, "start", [*commands, ["test", {**test, **PLAIN["test"], "batch_size": 256}]])
        if start is None:
            raise WrongResult("the model that all configurations start from could not be made or tested")
        run.note(f"accuracy before training: {start['stages']['test']['accuracy']:.4f}")
        datagen = {**sampling, "dataset_name": data, "dataset_split": f"train[:{args.n_prompts}]", "keep": "all"}
        datagen |= {"oversample": args.oversample, "temperature": args.temperature}
        names = ["plain", *args.profiles]
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        train = {**common, "model_name_or_path": model, "max_steps": args.train_steps, "max_length": args.max_length}
        train |= {"learning_rate": args.learning_rate, "save_strategy": "no"}
        train |= {"logging_steps": args.train_steps}  # the last one counts the tokens of all steps
        options = {"datagen": datagen, "train": train, "test": test}
        for repeat in range(args.repeats):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:  # none is always the first
                own = {stage: _own_options(name, stage, args.learning_rate) for stage in STAGES}
                commands = [[s, {**options[s], **own[s], "seed": args.seed + repeat}] for s in STAGES]
                found = _run(folder, name, commands)
                if found is not None:
                    results[name].append(found)
    common = {name: getattr(args, name) for name in SETTINGS}
    for name in names:
        if len(results[name]) < args.repeats:
            run.miss(f"{name} ran {len(results[name])} times, expected {args.repeats}")
        if results[name]:
            add_rows(run, results[name], {"profile": name, **common})
            run.wrong += wrong_accuracy(name, results)


def _start_options(args: Namespace, world: Path, folder: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": world / "model",
        "dataset_name": world / "data/demonstrations.jsonl",
        "output_dir": folder,
        "per_device_train_batch_size": 64,
        "max_steps": args.start_steps,
        "learning_rate": 1e-3,
        "warmup_steps": 20,
        "gradient_checkpointing": False,
        "max_length": args.max_length,
        "save_strategy": "no",
    }


def _own_options(name: str, stage: str, learning_rate: float) -> dict[str, Any]:
    if name == "plain":
        return PLAIN[stage]
    density = rft.TRAINING["mask_density"][0][rft.PROFILES.index(name)]
    rate = {"learning_rate": learning_rate * rate_factor(density)} if stage == "train" and density else {}
    return {"profile": name, **rate}


def _run(folder: Path, name: str, commands: list[list[Any]]) -> dict[str, Any] | None:
    """What `run` measures in a process of its own; None, with its message printed, if it failed."""
    plain = [[stage, {key: str(value) for key, value in options.items()}] for stage, options in commands]
    with tempfile.TemporaryDirectory(dir=folder) as outputs:
        return run_in_process(f"{__package__}.profiles", name, {"commands": plain, "folder": outputs}, folder)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run the commands of a job, those of all three stages after a warm-up on few rows; returns their measurements."""
    folder, measured = Path(job["folder"]), {}
    for few in (True, False) if len(job["commands"]) == len(STAGES) else (False,):
        outputs = folder / ("few" if few else "all")
        for stage, options in job["commands"]:
            options = {"output_dir": str(outputs / stage), **options}
            if stage == "train":
                kept = next((outputs / "datagen").glob("rft.json*"))
                if few:  # none of its answers may be right
                    kept = outputs / "rows.jsonl"
                    kept.write_text(8 * '{"prompt": "1 + 1 =", "completion": " 2"}\n', encoding="utf-8")
                options |= {"dataset_name": str(kept), **({"max_steps": "2"} if few else {})}
            elif few:
                options["dataset_split"] = "train[:8]"
            if stage == "test" and "train" in dict(job["commands"]):
                options["model_name_or_path"] = str(outputs / "train")
            measured[stage] = _timed(stage, options)
    return {"stages": measured}


def _timed(stage: str, options: dict[str, str]) -> dict[str, Any]:
    words = [f"--{name}={value}" for name, value in options.items()]
    on_gpu = torch.cuda.is_available() and options["use_cpu"] == "False"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train_with_trl("sft", words) if stage == "sft" else rft.run([stage, *words])
    found: dict[str, Any] = {"peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}
    folder = Path(options["output_dir"])
    if stage in ("sft", "train"):
        logs = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        log = {name: value for row in logs for name, value in row.items()}  # of each number the last
        return {**found, "work_s": log["train_runtime"], "tokens_per_s": log["num_tokens"] / log["train_runtime"]}
    report = json.loads((folder / rft.REPORT_FILE).read_text(encoding="utf-8"))
    names = ("tokens_per_s", "accuracy", "n_prompts")
    return {**found, "work_s": report["seconds"], **{name: report[name] for name in names if name in report}}


def add_rows(run: Run, results: Sequence[dict[str, Any]], case: Case) -> None:
    """The rows of a configuration, without loading: medians of the repeats, and of the accuracy the mean."""
    plain: dict[str, float | Case] = {"plain": {"profile": "plain"}} if case["profile"] != "plain" else {}

    def add(metric: str, unit: str, values: list[float], peers: dict[str, float | Case] | None = None) -> None:
        row = Row.of_samples(values, suite="profiles", case=case, metric=metric, unit=unit, peers=peers or {})
        run.add(replace(row, value=statistics.fmean(values)) if metric == "accuracy" else row)

    add("all", "s", [sum(result["stages"][stage]["work_s"] for stage in STAGES) for result in results], plain)
    for stage in STAGES:
        stages = [result["stages"][stage] for result in results]
        add(stage, "s", [found["work_s"] for found in stages])
        if stage != "test":
            add(f"{stage}, tokens", "1/s", [found["tokens_per_s"] for found in stages])
        if stages[0]["peak_memory_bytes"]:
            add(f"peak memory, {stage}", "bytes", [found["peak_memory_bytes"] for found in stages])
    add("accuracy", "share", [result["stages"]["test"]["accuracy"] for result in results])


def wrong_accuracy(name: str, results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The error of a profile whose accuracy does not hold: it is more than three standard errors below plain's.

    The standard error is that of the difference of two independent shares of the n prompts of a test,
    sqrt(2 p (1 - p) / n) with p the mean of both.
    """
    if not results["plain"] or name == "plain":
        return []
    found, plain = (
        statistics.fmean(result["stages"]["test"]["accuracy"] for result in of_one)
        for of_one in (results[name], results["plain"])
    )
    mean, n_prompts = (found + plain) / 2, results[name][0]["stages"]["test"]["n_prompts"]
    tolerance = SIGMAS * math.sqrt(2 * mean * (1 - mean) / n_prompts)
    if found >= plain - tolerance:
        return []
    return [f"accuracy of {name} is {found:.4f}, {plain - found:.4f} below plain; the tolerance is {tolerance:.4f}"]


main = Benchmark(
    name="profiles",
    doc=__doc__,
    epilog=_EPILOG,
    options=_options,
    problem=_problem,
    measure=_measure,
    output="bench/results/profiles_{device}.json",
).main

if __name__ == "__main__":
    sys.exit(job_main(run))
