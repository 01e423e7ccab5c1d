"""Compares RFT's profiles with plain training: time, memory and accuracy of each profile, and of each setting alone.

`sparse-opt bench profiles` takes a model through RFT's three stages (sample and verify, train on the right completions,
test), once for each configuration and repeat, each in its own process:

- plain: what a plain script with transformers does: one prompt at a time with `generate`, all weights trained in
  --baseline_dtype, padded batches, and torch's AdamW as it is by default;
- each profile;
- each setting of a profile that differs from plain, alone or with the settings it depends on, and those of --also.

A step reads 32 examples in every configuration: with packing, as many rows as hold that many on average.

Without a model it generates arithmetic and a Llama of --hidden_size and --n_layers, trained by SFT on demonstrations,
only some of them right.
All configurations start from the same weights; a repeat is another seed of sampling, order and mask. The accuracy of a
profile holds if it is at most `--sigmas` binomial standard errors of the difference below plain's, counted with the
prompts of the test alone, whatever the number of repeats; the exit code is 1 if the accuracy of a profile does not
hold. On a GPU the report has a verdict on each profile's speed-up over plain; a missed target fails the run only with
--strict.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sparse_opt.config import add_options, option, require_number_ranges
from sparse_opt.errors import ConfigError
from sparse_opt.option_parser import CommandParser
from sparse_opt.trainers.policy.models import resolve_device
from sparse_opt.trainers.profiles import NAMES, profile_settings

from ...common.environment import environment
from ...common.harness import run_in_process
from ...common.report import why_unwritable, write_json
from .report import Configuration, failures, judge, summarized, text
from .run import STAGES, Job

# A CPU trains this start in a minute; about a third of its sampled answers are right.
ARITHMETIC: dict[str, Any] = {"max_operand": 29, "n_train": 600, "p_right": 0.5}
# Setting -> the settings without which it has no effect, or another one.
_DEPENDS_ON = {
    "max_rows": ("prompts_per_batch",),
    "group_by_length": ("prompts_per_batch", "max_rows"),
    "drop_ended": ("prompts_per_batch", "max_rows"),
    "lr_schedule": ("warmup_ratio",),
    "warmup_ratio": ("lr_schedule",),
    "mode": ("mask_density",),
    "mask_density": ("mode",),
    "learning_rate_scale": ("mode", "mask_density"),
    "master_weights": ("dtype",),
    "batch_size": ("gradient_accumulation_steps",),
    "gradient_accumulation_steps": ("batch_size",),
}

_EPILOG = """examples:
  sparse-opt bench profiles                                    # arithmetic, on this machine
  sparse-opt bench profiles --device cuda --hidden_size 768 --n_layers 14 --learning_rate 1e-4 \\
      --answers think --n_prompts 64 --n_test 75 --train_steps 30    # a Llama of 107 million weights
  sparse-opt bench profiles --profiles balanced --no_settings --repeats 1
  sparse-opt bench profiles --model_name M --dataset train.jsonl --test_dataset test.jsonl --reward_functions math \\
      --max_completion_length 1024 --max_length 2048 --train_steps 200 --learning_rate 1e-5
"""


@dataclass(kw_only=True)
class ProfilesOptions:
    """Compare RFT's profiles with plain training: time, memory and accuracy of each, and of each setting alone."""

    profiles: list[str] = option(list(NAMES), "names, or folders with train.yaml and sampling.yaml")
    baseline_dtype: Literal["fp32", "bf16"] = option("fp32", "dtype of plain")
    profile_dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        None, "dtype of every profile, in place of its own: fp32 where a device has no 16-bit matrix units"
    )
    no_settings: bool = option(False, "do not measure single settings")
    also: list[str] = option(
        [
            "rollout_engine=continuous_batching+prompts_per_batch=128",
            "packing=true",
            "compile=true",
            "dataloader_num_workers=1",
        ],
        "further settings to measure alone, KEY=VALUE; several of one setting with +",
    )
    model_name: str | None = option(None, "hub name or local folder; none is a small model for arithmetic")
    dataset: str | None = option(None, "prompts with answers to train on; required with model_name")
    test_dataset: str | None = option(None, "prompts with answers to test on; required with model_name")
    reward_functions: list[str] = option([], "verifiers; by default exact_match for arithmetic, else math")
    answers: Literal["plain", "think"] = option(
        "plain", "completions for arithmetic: '42', or with the calculation, 20 tokens in place of 3"
    )
    hidden_size: int = option(128, "width of the model for arithmetic, which has 13 x n_layers x hidden_size^2 weights")
    n_layers: int = option(2, "layers of the model for arithmetic", at_least=1)
    start_steps: int = option(600, "steps of SFT that make the start for arithmetic", at_least=1)
    start_learning_rate: float = option(1e-3, "peak learning rate of these steps", above=0)
    n_prompts: int = option(256, "prompts to sample completions of", at_least=1)
    n_generations: int = option(8, "completions per prompt", at_least=1)
    temperature: float = option(1.0, "temperature of these completions", above=0)
    max_completion_length: int | None = option(
        None, "tokens per completion; none is what arithmetic needs: 8, with the calculation 32", at_least=1
    )
    train_steps: int = option(100, "steps of 32 examples", at_least=1)
    learning_rate: float = option(1e-3, "peak learning rate of every configuration", above=0)
    max_length: int = option(64, "tokens of a training example, and of a packed row", at_least=2)
    n_test: int = option(300, "prompts to test on", at_least=1)
    test_generations: int = option(4, "completions per test prompt: greedy if 1, else at temperature 1", at_least=1)
    repeats: int = option(3, "runs of every configuration, each with another seed", at_least=1)
    sigmas: float = option(3.0, "standard errors that the accuracy may fall", above=0)
    strict: bool = option(False, "end with 1 if a profile misses its target, too")
    seed: int = option(0, "seed of the first repeat, and of the arithmetic")
    device: str = option("auto", "torch device; auto is cuda if there is one, else cpu")
    work_dir: Path | None = option(None, "existing folder for the files of the runs; none is a temporary one")
    output: Path | None = option(None, "JSON file; none is bench/results/profiles_DEVICE.json")
    json: bool = option(False, "print the JSON on stdout instead of tables")

    def __post_init__(self) -> None:
        require_number_ranges(self)
        if len({Path(profile).name for profile in self.profiles}) < len(self.profiles):
            raise ConfigError(f"option 'profiles' is {','.join(self.profiles)}: expected different names")
        if len({self.model_name is None, self.dataset is None, self.test_dataset is None}) > 1:
            raise ConfigError("expected all of --model_name, --dataset and --test_dataset, or none for arithmetic")
        known = {key for values in plain_values(self.baseline_dtype).values() for key in values}
        for setting in (part for word in self.also for part in word.split("+")):
            key, _, value = setting.partition("=")
            if key not in known or not value:
                names = ", ".join(sorted(known))
                raise ConfigError(f"option 'also' is {setting}: expected KEY=VALUE with a key of {names}")
        if self.model_name is not None and self.max_completion_length is None:
            raise ConfigError("expected --max_completion_length with --model_name")
        self.max_completion_length = self.max_completion_length or {"plain": 8, "think": 32}[self.answers]
        self.device = str(resolve_device(self.device))
        self.reward_functions = self.reward_functions or ["exact_match" if self.model_name is None else "math"]
        if self.work_dir is not None and not self.work_dir.is_dir():
            raise ConfigError(f"option 'work_dir': no such folder: {self.work_dir}")
        self.output = self.output or Path(f"bench/results/profiles_{self.device.partition(':')[0]}.json")
        if problem := why_unwritable(self.output):
            raise ConfigError(problem)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every configuration ran and the accuracy of every profile holds, else 1.

    With --strict also 1 if a profile misses its target.

    Raises:
        ConfigError: an option or a profile is not valid.
        SparseOptError: model or data cannot be used.
    """
    parser = add_options(CommandParser(prog="sparse-opt bench profiles"), ProfilesOptions)
    parser.description, parser.epilog = __doc__, _EPILOG
    args = ProfilesOptions(**vars(parser.parse_words(sys.argv[1:] if argv is None else argv)))
    assert args.output is not None
    profiles = {Path(profile).name: profile_values(profile) for profile in args.profiles}
    if args.profile_dtype is not None:
        for options in (options for stages in profiles.values() for options in stages.values()):
            options["dtype"] = args.profile_dtype
    also = [] if args.no_settings else [parse_settings(word) for word in args.also]
    configurations = make_configurations(profiles, args.baseline_dtype, settings=not args.no_settings, also=also)
    with tempfile.TemporaryDirectory(prefix="sparse_opt_profiles_", dir=args.work_dir) as name:
        folder = Path(name).resolve()
        shared = _shared_options(folder, args)
        start = _run(_start_job(folder, args, shared))
        results: list[dict[str, Any]] = []

        def report_so_far() -> dict[str, Any]:
            return {
                "benchmark": "profiles",
                "environment": environment("cuda" if args.device.startswith("cuda") else "cpu"),
                "settings": {k: v for k, v in vars(args).items() if k not in ("json", "output", "work_dir")},
                "profiles": profiles,
                "start": relative_to(folder, start),
                **summarized(configurations, [relative_to(folder, one) for one in results], args.sigmas),
            }

        if start is not None:
            if start["checkpoint"] is not None:
                for stage in ("datagen", "train"):
                    shared[stage]["checkpoint"] = start["checkpoint"]
            start |= {name: start["stages"]["test"][name] for name in ("accuracy", "answer_rate")}
            for repeat, i in order_of_runs(configurations, args.repeats):
                place = folder / f"{repeat}_{i}"
                result = _run(_job(place, configurations[i], shared, args.seed, args.seed + repeat))
                if result is not None:
                    results.append(result)
                    write_json(args.output, report_so_far())  # what was measured outlasts an interruption
        report = report_so_far()
    verdicts = judge(report)
    report["targets"] = [verdict.as_dict() for verdict in verdicts]
    write_json(args.output, report)
    print(json.dumps(report, indent=2) if args.json else f"\n{text(report)}\n\nresults: {args.output}")
    wrong = failures(report, args.repeats)
    for line in wrong:
        print(f"WRONG RESULT: {line}", file=sys.stderr)
    missed = [verdict for verdict in verdicts if args.strict and not verdict.met]
    for verdict in missed:
        print(f"MISSED: {verdict.text}", file=sys.stderr)
    return 1 if wrong or missed else 0


def order_of_runs(configurations: Sequence[Configuration], n_repeats: int) -> Iterator[tuple[int, int]]:
    """Yield (repeat, index) of each run: all repeats of plain and the profiles, and then those of single settings.

    The order is rotated from repeat to repeat, so that a load on the machine affects all configurations, and none is
    always the first process, which reads the kernels from the disk.
    """
    settings = [i for i, configuration in enumerate(configurations) if configuration.kind == "setting"]
    for group in [i for i in range(len(configurations)) if i not in settings], settings:
        for repeat in range(n_repeats):
            first = repeat % max(1, len(group))
            yield from ((repeat, i) for i in [*group[first:], *group[:first]])


def profile_values(name: str) -> dict[str, dict[str, Any]]:
    """Return the options of a profile by stage."""
    parts = {part: {key: value for key, value, _ in profile_settings(name, part)} for part in ("train", "sampling")}
    return {stage: dict(parts.get(stage, parts["sampling"])) for stage in STAGES}


def make_configurations(
    profiles: Mapping[str, dict[str, dict[str, Any]]],
    baseline_dtype: str,
    *,
    settings: bool,
    also: Sequence[Mapping[str, str]] = (),
) -> list[Configuration]:
    """Return plain, each profile, and with `settings` each setting alone that differs from plain, once.

    Args:
        profiles: name -> stage -> options.
        also: further settings, option -> value, for every stage that has the option.
    """
    plain = plain_values(baseline_dtype)
    found = [Configuration("plain", "plain", plain)]
    for name, values in profiles.items():
        found.append(Configuration(name, "profile", {stage: {**plain[stage], **values[stage]} for stage in STAGES}))
    alone: list[tuple[str, dict[str, dict[str, Any]]]] = []
    measured: set[tuple[str, Any]] = set()  # with the dependencies that the first profile gives it
    for values in profiles.values() if settings else ():
        flat = {key: value for stage in ("train", "datagen", "test") for key, value in values[stage].items()}
        for key in flat:
            if (key, flat[key]) in measured:
                continue
            measured.add((key, flat[key]))
            keys = [other for other in flat if other == key or other in _DEPENDS_ON.get(key, ())]
            changes = {stage: {k: v for k, v in values[stage].items() if k in keys} for stage in STAGES}
            alone.append((", ".join(f"{k}={_shown(flat[k])}" for k in keys), changes))
    for given in also:
        name = ", ".join(f"{key}={value}" for key, value in given.items())
        changes = {stage: {k: v for k, v in given.items() if k in plain[stage]} for stage in STAGES}
        alone.append((name, changes))
    seen = [plain]
    for name, changes in alone:
        values = {stage: {**plain[stage], **changes[stage]} for stage in STAGES}
        if values not in seen:
            seen.append(values)
            found.append(Configuration(name, "setting", values))
    return found


def parse_settings(word: str) -> dict[str, str]:
    """`a=1+b=2` as options and values."""
    return {key: value for key, _, value in (part.partition("=") for part in word.split("+"))}


def plain_values(dtype: str) -> dict[str, dict[str, Any]]:
    """Return the options of plain training and sampling by stage: each option that profiles set, unoptimized."""
    common = {"dtype": dtype, "float32_matmul_precision": "highest"}
    sampling = {
        **common,
        "rollout_engine": "generate",
        "prompts_per_batch": 1,
        "max_rows": None,
        "group_by_length": False,
        "share_prompts": False,
        "drop_ended": False,
    }
    train = {
        **common,
        "mode": "dense",
        "learning_rate_scale": 1.0,
        "master_weights": True,
        "gradient_checkpointing": False,
        "optim": "adamw_torch",
        "packing": False,
        "padding_free": False,
        "group_by_length": False,
        "dataloader_num_workers": 0,
        "batch_size": 32,
        "gradient_accumulation_steps": 1,
        "compile": False,
        "lr_schedule": "linear",
        "warmup_ratio": None,
    }
    return {"datagen": sampling, "train": train, "test": dict(sampling)}


def relative_to(folder: Path, found: Any) -> Any:
    """Replace the paths in the work folder by paths relative to it."""
    if isinstance(found, dict):
        return {key: relative_to(folder, value) for key, value in found.items()}
    if isinstance(found, list):
        return [relative_to(folder, value) for value in found]
    if isinstance(found, str) and Path(found).is_relative_to(folder):
        return str(Path(found).relative_to(folder))
    return found


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _shared_options(folder: Path, args: ProfilesOptions) -> dict[str, dict[str, Any]]:
    """Stage -> options of every configuration; makes the arithmetic where no model is given."""
    model, dataset, test_dataset = args.model_name, args.dataset, args.test_dataset
    if model is None:
        from sparse_opt.trainers.arithmetic import make_arithmetic

        world = make_arithmetic(
            folder / "arithmetic",
            **ARITHMETIC,
            answers=args.answers,
            n_test=args.n_test,
            hidden_size=args.hidden_size,
            n_layers=args.n_layers,
            seed=args.seed,
        )
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


def _start_job(folder: Path, args: ProfilesOptions, shared: dict[str, dict[str, Any]]) -> Job:
    values = {"test": {**shared["test"], "dtype": args.baseline_dtype, "seed": args.seed}}
    if args.model_name is None:
        sft = {
            "policy_name": shared["train"]["policy_name"],
            "dataset": str(folder / "arithmetic/data/demonstrations.jsonl"),
            "device": args.device,
            "dtype": "fp32",
            "n_steps": args.start_steps,
            "batch_size": 64,
            "learning_rate": args.start_learning_rate,
            "lr_schedule": "cosine",
            "warmup_steps": 20,
            "sample_steps": None,
            "seed": args.seed,
        }
        values = {"sft": sft, **values}
    return Job(name="start", folder=str(folder / "start"), values=values)


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


def _run(job: Job) -> dict[str, Any] | None:
    """Run a job in its own process, so that peaks are its own; None, with its error printed, if it failed."""
    folder = Path(job.folder)
    folder.mkdir()
    return run_in_process("sparse_opt.bench.training.profiles.run", job.name, asdict(job), folder)


if __name__ == "__main__":
    from sparse_opt.cli.main import main as command_line

    sys.exit(command_line(["bench", "profiles", *sys.argv[1:]]))
