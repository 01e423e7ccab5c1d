"""RFT's profiles beside plain training: time, memory and accuracy of each, and of each optimisation alone.

`sparse-opt bench profiles` takes a model through RFT's three stages (sample and verify, train on what was right, test),
once for each configuration and repeat, each in a process of its own, the configurations in turns:

- plain: dense training and transformers' generate in --baseline_dtype, without any of the optimisations;
- each profile, whole;
- each setting of a profile that differs from plain, alone (with what it has no effect without), and those of --also:
  off is the plain row.

A step reads 32 examples in every configuration: with packing, as many rows as hold that many on average.

Without a model it makes generated arithmetic and a small Llama, taught by SFT on demonstrations of which a part is
right. All configurations start from the same weights; a repeat is another seed of sampling, order and mask. A profile's
accuracy holds where it is at most `--sigmas` binomial standard errors of the difference below plain's, counted with the
test's prompts alone, whatever the number of repeats; the exit code is 1 where one does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparse_opt.cli.parser import CommandParser
from sparse_opt.trainers.profiles import NAMES, STAGES, Profile, load_profile

from ...common.environment import environment
from ...common.report import why_unwritable, write_json
from .report import failures, summarized, text
from .run import Configuration, Job, StartJob

# A world that a CPU learns in a minute: sampled answers are right about a third of the time after the start.
ARITHMETIC: dict[str, Any] = {"max_operand": 29, "n_train": 600, "p_right": 0.5}

_EPILOG = """examples:
  sparse-opt bench profiles                                    # arithmetic, on the machine at hand
  sparse-opt bench profiles --profiles balanced --no_settings --repeats 1
  sparse-opt bench profiles --model_name M --dataset train.jsonl --test_dataset test.jsonl --reward_functions math \\
      --max_completion_length 1024 --max_length 2048 --train_steps 200 --learning_rate 1e-5
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every configuration ran and every profile's accuracy holds, else 1.

    Raises:
        ConfigError: the call or a profile is wrong. SparseOptError: model or data cannot be used.
    """
    parser = _parser()
    args = parser.parse_words(sys.argv[1:] if argv is None else argv)
    if problem := _problem(args):
        parser.error(problem)
    configurations = make_configurations(
        [load_profile(name) for name in args.profiles],
        args.baseline_dtype,
        settings=not args.no_settings,
        also=[] if args.no_settings else args.also,
    )
    with tempfile.TemporaryDirectory(prefix="sparse_opt_profiles_", dir=args.work_dir) as name:
        folder = Path(name).resolve()
        shared = _shared_options(folder, args)
        start = _run(_start_job(folder, args, shared))
        results: list[dict[str, Any] | None] = []
        if start is not None:
            if start["checkpoint"] is not None:
                for stage in ("datagen", "train"):
                    shared[stage]["checkpoint"] = start["checkpoint"]
            for repeat in range(args.repeats):
                # Turned from repeat to repeat, so that a busy neighbour meets all of them.
                first = repeat % len(configurations)
                for i in [*range(first, len(configurations)), *range(first)]:
                    place = folder / f"{repeat}_{i}"
                    results.append(_run(_job(place, configurations[i], shared, args.seed, args.seed + repeat)))
    report = {
        "benchmark": "profiles",
        "environment": environment("cuda" if args.device.startswith("cuda") else "cpu"),
        # Where the files were says nothing of what was measured.
        "settings": {k: v for k, v in vars(args).items() if k not in ("json", "output", "work_dir")},
        "profiles": {name: asdict(load_profile(name)) for name in args.profiles},
        "start": relative_to(folder, start),
        **summarized(configurations, [relative_to(folder, one) for one in results if one is not None], args.sigmas),
    }
    write_json(args.output, report)
    print(json.dumps(report, indent=2) if args.json else f"\n{text(report)}\n\nresults: {args.output}")
    wrong = failures(report, args.repeats)
    for line in wrong:
        print(f"WRONG RESULT: {line}", file=sys.stderr)
    return 1 if wrong else 0


def make_configurations(
    profiles: Sequence[Profile], baseline_dtype: str, *, settings: bool, also: Sequence[tuple[str, str]] = ()
) -> list[Configuration]:
    """Plain, each profile whole, and with `settings` each setting alone that differs from plain, once.

    Args:
        also: further settings to take alone, (option, value), in every stage that has the option.
    """
    plain = plain_values(baseline_dtype)
    found = [Configuration("plain", "plain", plain)]
    for profile in profiles:
        changed = {stage: {**plain[stage], **profile.values(stage)} for stage in STAGES}
        found.append(Configuration(profile.name, "profile", changed))
    if not settings:
        return found
    seen = [plain]
    for profile in profiles:
        for setting in profile.settings:
            values = {stage: dict(plain[stage]) for stage in STAGES}
            parts = profile.with_needs(setting.key)
            for part in parts:
                for stage in part.stages:
                    values[stage][part.key] = part.value
            if values not in seen:
                seen.append(values)
                name = ", ".join(f"{part.key}={_shown(part.value)}" for part in parts)
                found.append(Configuration(name, "setting", values))
    for key, value in also:
        values = {stage: {**plain[stage], **({key: value} if key in plain[stage] else {})} for stage in STAGES}
        if values not in seen:
            seen.append(values)
            found.append(Configuration(f"{key}={value}", "setting", values))
    return found


def plain_values(dtype: str) -> dict[str, dict[str, Any]]:
    """What plain training and sampling are, by stage: every option that a profile sets, without an optimisation."""
    common = {"dtype": dtype, "float32_matmul_precision": "highest"}
    sampling = {**common, "rollout_engine": "generate", "prompts_per_batch": 32}
    train = {
        **common,
        "mode": "dense",
        "learning_rate_scale": 1.0,
        "master_weights": True,
        "gradient_checkpointing": False,
        "packing": False,
        "batch_size": 32,
        "gradient_accumulation_steps": 1,
    }
    return {"datagen": sampling, "train": train, "test": dict(sampling)}


def relative_to(folder: Path, found: Any) -> Any:
    """What a job has written, with paths in the work folder as names relative to it, its own as a dot."""
    if isinstance(found, dict):
        return {key: relative_to(folder, value) for key, value in found.items()}
    if isinstance(found, list):
        return [relative_to(folder, value) for value in found]
    if isinstance(found, str) and Path(found).is_relative_to(folder):
        return str(Path(found).relative_to(folder))
    return found


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt bench profiles", description=__doc__, epilog=_EPILOG)
    what = parser.add_argument_group("what is compared")
    what.add_argument("--profiles", default=",".join(NAMES), help="names or .yaml files, with commas (%(default)s)")
    what.add_argument("--baseline_dtype", choices=("fp32", "bf16"), default="fp32", help="of plain (%(default)s)")
    what.add_argument("--no_settings", action="store_true", help="leave out the settings alone")
    what.add_argument(
        "--also",
        nargs="*",
        default=["rollout_engine=continuous_batching"],
        metavar="KEY=VALUE",
        help="settings of no profile to measure alone (%(default)s)",
    )
    data = parser.add_argument_group("on what")
    data.add_argument("--model_name", help="hub name or local folder; default: a small model for arithmetic")
    data.add_argument("--dataset", help="prompts with answers to train on; wanted with --model_name")
    data.add_argument("--test_dataset", help="prompts with answers to test on; wanted with --model_name")
    data.add_argument("--reward_functions", help="what verifies (exact_match for arithmetic, else math)")
    data.add_argument("--start_steps", type=int, default=600, help="arithmetic: steps of SFT before (%(default)s)")
    work = parser.add_argument_group("how much")
    work.add_argument("--n_prompts", type=int, default=256, help="prompts to sample for (%(default)s)")
    work.add_argument("--n_generations", type=int, default=8, help="completions of each (%(default)s)")
    work.add_argument("--temperature", type=float, default=1.0, help="of these completions (%(default)s)")
    work.add_argument("--max_completion_length", type=int, default=8, help="tokens (%(default)s)")
    work.add_argument("--train_steps", type=int, default=100, help="of 32 examples (%(default)s)")
    work.add_argument("--learning_rate", type=float, default=1e-3, help="peak, in every configuration (%(default)s)")
    work.add_argument(
        "--max_length", type=int, default=64, help="of a training example, and of packed rows (%(default)s)"
    )
    work.add_argument("--n_test", type=int, default=300, help="prompts to test on (%(default)s)")
    work.add_argument("--test_generations", type=int, default=4, help="1: greedy; more: at temperature 1 (%(default)s)")
    work.add_argument("--repeats", type=int, default=3, help="of every configuration, each with its seed (%(default)s)")
    how = parser.add_argument_group("how")
    how.add_argument("--sigmas", type=float, default=3.0, help="standard errors that accuracy may fall (%(default)s)")
    how.add_argument("--seed", type=int, default=0, help="of the first repeat, and of the arithmetic (%(default)s)")
    how.add_argument("--device", help="cuda where there is one, else cpu")
    how.add_argument("--work_dir", type=Path, help="for what the runs write (default: a temporary folder)")
    out = parser.add_argument_group("what for")
    out.add_argument("--output", type=Path, help="JSON (bench/results/profiles_DEVICE.json)")
    out.add_argument("--json", action="store_true", help="print the JSON on stdout instead of tables")
    return parser


def _problem(args: argparse.Namespace) -> str:
    """What is wrong with the call, before any work; empty if nothing is. Fills in what was left to choose."""
    args.profiles = args.profiles.split(",")
    if len(set(args.profiles)) < len(args.profiles):
        return f"--profiles {','.join(args.profiles)}: wanted each once"
    counts = ("n_prompts", "n_generations", "max_completion_length", "train_steps", "n_test", "test_generations")
    for name in (*counts, "repeats", "start_steps"):
        if getattr(args, name) < 1:
            return f"--{name} is {getattr(args, name)}, wanted at least 1"
    for name in ("sigmas", "learning_rate", "temperature"):
        if not getattr(args, name) > 0:
            return f"--{name} is {getattr(args, name)}, wanted more than 0"
    for name in ("dataset", "test_dataset"):
        if (getattr(args, name) is None) != (args.model_name is None):
            return "--model_name, --dataset and --test_dataset go together: wanted all three, or none for arithmetic"
    args.also = [tuple(word.partition("=")[::2]) for word in args.also]
    known = {key for values in plain_values(args.baseline_dtype).values() for key in values}
    for key, value in args.also:
        if key not in known or not value:
            return f"--also {key}={value}: wanted KEY=VALUE with a key of {', '.join(sorted(known))}"
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        return f"--device {args.device}: torch {torch.__version__} finds no CUDA device here"
    args.reward_functions = args.reward_functions or ("exact_match" if args.model_name is None else "math")
    if args.work_dir is not None and not args.work_dir.is_dir():
        return f"--work_dir {args.work_dir}: no such folder"
    args.output = args.output or Path(f"bench/results/profiles_{args.device.partition(':')[0]}.json")
    return why_unwritable(args.output)


def _shared_options(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Stage -> options of every configuration; makes the arithmetic where no model is given."""
    model, dataset, test_dataset = args.model_name, args.dataset, args.test_dataset
    if model is None:
        from sparse_opt.trainers.arithmetic import make_arithmetic

        world = make_arithmetic(folder / "arithmetic", **ARITHMETIC, n_test=args.n_test, seed=args.seed)
        model, dataset, test_dataset = (str(world / part) for part in ("model", "data/train.jsonl", "data/test.jsonl"))
    common = {"policy_name": model, "device": args.device, "mount_dir": str(folder)}
    sampling = {
        **common,
        "max_completion_length": args.max_completion_length,
        "reward_functions": args.reward_functions,
    }
    return {
        "datagen": {
            **sampling,
            "dataset": dataset,
            "subset_size": args.n_prompts,
            "n_generations": args.n_generations,
            "temperature": args.temperature,
        },
        "train": {
            **common,
            "n_steps": args.train_steps,
            "learning_rate": args.learning_rate,
            "max_length": args.max_length,
            "sample_steps": None,
        },
        "test": {
            **sampling,
            "dataset": test_dataset,
            "subset_size": args.n_test,
            "n_generations": args.test_generations,
            "temperature": 0.0 if args.test_generations == 1 else 1.0,
        },
    }


def _start_job(folder: Path, args: argparse.Namespace, shared: dict[str, dict[str, Any]]) -> StartJob:
    sft = None
    if args.model_name is None:
        sft = {
            "policy_name": shared["train"]["policy_name"],
            "dataset": str(folder / "arithmetic/data/demonstrations.jsonl"),
            "device": args.device,
            "dtype": "fp32",
            "n_steps": args.start_steps,
            "batch_size": 64,
            "learning_rate": 1e-3,
            "lr_schedule": "cosine",
            "warmup_steps": 20,
            "sample_steps": None,
            "seed": args.seed,
        }
    test = {**shared["test"], "dtype": args.baseline_dtype, "seed": args.seed}
    return StartJob(name="start", folder=str(folder / "start"), sft=sft, test=test)


def _job(
    folder: Path, configuration: Configuration, shared: dict[str, dict[str, Any]], test_seed: int, seed: int
) -> Job:
    values = {
        stage: {
            **shared[stage],
            **configuration.values[stage],
            # The mask of a repeat is in its own folder; the test's prompts are the same for all.
            "mount_dir": str(folder),
            "seed": test_seed if stage == "test" else seed,
        }
        for stage in STAGES
    }
    return Job(name=configuration.name, folder=str(folder), values=values)


def _run(job: Job | StartJob) -> dict[str, Any] | None:
    """A job in its own process, so that peaks are its own; None, with its message already printed, if it failed."""
    folder = Path(job.folder)
    folder.mkdir()
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    print(f"{job.name}: running", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "sparse_opt.bench.training.profiles.run", str(job_file), str(result_file)]
    done = subprocess.run(command, check=False, stdout=sys.stderr)
    if done.returncode != 0:
        print(f"{job.name}: the run ended with exit code {done.returncode}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    from sparse_opt.cli.main import main as command_line

    sys.exit(command_line(["bench", "profiles", *sys.argv[1:]]))
