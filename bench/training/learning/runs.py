"""The runs of `bench learning`: questions, initial models of reinforcement, masks, training and its results."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml

from sparse_opt.errors import ConfigError
from sparse_opt.masks.patterns import PATTERNS

from ...common.training import accuracy as rft_accuracy
from ...common.training import config_of, finish, metrics

TUNING_SEED = 1000
FINDING_SEED = 2000
_WHOLE = ("dense", "lora")
_SPARSE = ("random", "found")


@dataclass(frozen=True)
class Trained:
    """Which weights a run trains: `dense`, `lora`, `random:10`, `found:2.5:tile64`."""

    source: str
    percent: float | None = None  # of the weights, under a mask
    pattern: str | None = None

    @classmethod
    def parse(cls, word: str) -> Trained:
        """Read a word of the command line; the pattern element may be left out.

        Raises:
            ConfigError: the word is not valid.
        """
        source, *rest = word.split(":")
        if source in _WHOLE and not rest:
            return cls(source)
        if source not in _SPARSE or len(rest) not in (1, 2):
            raise ConfigError(
                f"--trained {word}: expected {', '.join(_WHOLE)}, or random or found with a percentage (random:10) and "
                "optionally a pattern (found:2.5:tile64)"
            )
        try:
            percent = float(rest[0])
        except ValueError:
            percent = math.nan
        if not 0 < percent < 100:
            raise ConfigError(f"--trained {word}: {rest[0]} percent, expected a number above 0 and below 100")
        pattern = rest[1] if len(rest) == 2 else "element"
        if pattern not in PATTERNS:
            raise ConfigError(f"--trained {word}: pattern {pattern}, expected one of {', '.join(PATTERNS)}")
        return cls(source, percent, pattern)

    def __str__(self) -> str:
        if self.percent is None:
            return self.source
        return f"{self.source}:{self.percent:g}" + ("" if self.pattern == "element" else f":{self.pattern}")


@dataclass(frozen=True)
class Run:
    """One training run."""

    algorithm: str
    trained: str  # a `Trained` as a word
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder and of its entry in the results."""
        return f"{self.algorithm}_{self.trained.replace(':', '_')}_lr{self.learning_rate:g}_seed{self.seed}"


@dataclass(frozen=True)
class World:
    """The folder, settings and device that all runs of a size share."""

    folder: Path
    settings: dict[str, Any]
    device: str

    def data(self, algorithm: str, name: str) -> Path:
        """A file of the questions that an algorithm trains or is tested on."""
        return self.folder / _questions(algorithm) / "data" / f"{name}.jsonl"

    def start(self, algorithm: str) -> Path:
        """The folder of the initial weights of an algorithm's runs."""
        return self.folder / ("teacher" if algorithm == "rlt" else "sft") / "final"

    def start_digest(self, algorithm: str) -> str:
        """xxh3_64 of the file of these weights, as hex digits."""
        return xxhash.xxh3_64_hexdigest((self.start(algorithm) / "model.safetensors").read_bytes())

    def finding_log(self, algorithm: str) -> Path:
        """The delta log of the dense run that masks are found from."""
        return self.folder / f"delta_logs_{algorithm}"

    def mask_file(self, run: Run) -> Path:
        """The mask file of a run; random masks differ between seeds."""
        name = f"{run.algorithm}_{run.trained.replace(':', '_')}"
        if run.trained.startswith("random"):
            name += f"_seed{run.seed}"
        return self.folder / "masks" / f"{name}.safetensors"

    def options(self, algorithm: str) -> dict[str, Any]:
        """Options of the algorithm's config except mode, learning rate, seed and folders."""
        options = {**self.settings["shared"], **self.settings[algorithm]["options"], "device": self.device}
        if algorithm == "rlt":
            options |= {**self.settings["templates"], "student_model": self.folder / "student" / "final"}
        return options


def _questions(algorithm: str) -> str:
    return "think" if algorithm == "rlt" else "plain"


def make_world(world: World, algorithms: Iterable[str]) -> None:
    """Make the questions and the initial models of reinforcement that do not exist yet."""
    from sparse_opt.trainers import sft
    from sparse_opt.trainers.arithmetic import make_arithmetic
    from sparse_opt.trainers.data import teacher_data

    for kind in sorted({_questions(algorithm) for algorithm in algorithms}):
        if not (world.folder / kind).is_dir():
            make_arithmetic(world.folder / kind, **world.settings[kind])
        model = {**world.settings["shared"], "device": world.device, "policy_name": world.folder / kind / "model"}
        name = "student" if kind == "think" else "sft"
        demonstrations = world.folder / kind / "data" / "demonstrations.jsonl"
        finish(sft, "SFTConfig", {**model, **world.settings[name]}, demonstrations, world.folder / name)
        if kind == "plain":
            continue
        rows, templates = world.folder / "teacher.jsonl", world.folder / "templates.yaml"
        if not rows.is_file():
            templates.write_text(yaml.safe_dump(world.settings["templates"]), encoding="utf-8")
            explanations = world.folder / kind / "data" / "explanations.jsonl"
            words = {"dataset": explanations, "tokenizer": model["policy_name"], "templates": templates, "output": rows}
            if teacher_data.main([f"{key}={value}" for key, value in words.items()]):
                raise RuntimeError(f"{explanations} could not be made into a teacher's demonstrations")
        model |= {"checkpoint": world.folder / "student" / "final"}
        finish(sft, "SFTConfig", {**model, **world.settings["teacher"]}, rows, world.folder / "teacher")


def find(world: World, algorithm: str, learning_rate: float) -> None:
    """Do the dense run that masks are found from, with a delta log of its start and end, unless it exists."""
    options = {**world.options(algorithm), "seed": FINDING_SEED, "learning_rate": learning_rate}
    options |= {"delta_log_dir": world.finding_log(algorithm), "delta_log_steps": "last"}
    folder = world.folder / "runs" / f"{algorithm}_finding"
    if algorithm == "rft":
        _rft(world, Run("rft", "dense", learning_rate, FINDING_SEED), options, folder)
        return
    options["policy_name"] = world.start(algorithm)
    module = importlib.import_module(f"sparse_opt.trainers.{algorithm}")
    train = world.data(algorithm, world.settings[algorithm]["data"][0])
    finish(module, f"{algorithm.upper()}Config", options, train, folder)


def make_mask(world: World, run: Run) -> None:
    """Write the mask of a run unless it exists: random, or the weights that changed most in the run of `find`."""
    import torch

    from sparse_opt.delta.log import DeltaLog
    from sparse_opt.mask_finding.find import find_from_log
    from sparse_opt.masks.mask_set import MaskSet

    torch.set_num_threads(1)
    file, trained = world.mask_file(run), Trained.parse(run.trained)
    if file.is_file():
        return
    assert trained.percent is not None and trained.pattern is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    if trained.source == "random":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(world.start(run.algorithm))
        mask = MaskSet.random(model, density=trained.percent / 100, pattern=trained.pattern, seed=run.seed)
    else:
        log = DeltaLog.open(world.finding_log(run.algorithm))
        options = world.settings.get("found_masks", {})
        mask = find_from_log(log, sparsity=100 - trained.percent, pattern=trained.pattern, **options).mask
    mask.save(file)


def do(world: World, run: Run) -> dict[str, Any]:
    """Train and measure, then remove the weights of the run.

    Returns:
        The run's fields; `after`, the held-out result; `curve`, the reward of each step (for RFT the negative loss);
        `seconds`; `start`, the digest of the initial weights; under a mask `active`, its share of the weights.
    """
    import torch

    from sparse_opt.masks.mask_set import MaskSet

    torch.set_num_threads(1)
    folder = world.folder / "runs" / run.name
    options = {**world.options(run.algorithm), "seed": run.seed, "learning_rate": run.learning_rate}
    measured: dict[str, Any] = {"start": world.start_digest(run.algorithm)}
    if run.trained in _WHOLE:
        options["mode"] = run.trained
    else:
        options |= {"mode": "sparse", "mask": world.mask_file(run)}
        # Found and random masks list every weight.
        measured["active"] = MaskSet.load(world.mask_file(run)).density
    began = time.perf_counter()
    if run.algorithm == "rft":
        curve, after = _rft(world, run, options, folder)
    else:
        module = importlib.import_module(f"sparse_opt.trainers.{run.algorithm}")
        options["policy_name"] = world.start(run.algorithm)
        train, test = (world.data(run.algorithm, name) for name in world.settings[run.algorithm]["data"])
        options["eval_dataset"] = test
        summary = finish(module, f"{run.algorithm.upper()}Config", options, train, folder)
        curve = [row["reward"] for row in metrics(summary)]
        if run.algorithm == "rlt":
            after = summary["last_evaluation"]["eval_reward"]
        else:
            after = accuracy(world, folder / "final", folder / "test", run.seed)
    measured |= {"after": after, "curve": curve, "seconds": time.perf_counter() - began}
    final = (folder / "train" if run.algorithm == "rft" else folder) / "final"
    if final.is_dir():
        shutil.rmtree(final)
    return {**asdict(run), **measured}


def _rft(world: World, run: Run, options: dict[str, Any], folder: Path) -> tuple[list[float], float]:
    """One round of sampling, verifying and SFT."""
    from sparse_opt.trainers.rft import train as rft

    start = world.start("rft")
    datagen = {**world.settings["rft"]["datagen"], "device": world.device, "seed": run.seed, "policy_name": start}
    kept = folder / "datagen"
    if not (kept / "report.json").is_file():
        datagen |= {"dataset": world.data("rft", "train"), "output_dir": kept, "resume": True}
        rft.datagen(config_of(rft, "DatagenConfig", datagen))
    summary = finish(rft, "RFTConfig", {**options, "policy_name": start}, kept / "kept.jsonl", folder / "train")
    return [-row["loss"] for row in metrics(summary)], accuracy(
        world, folder / "train" / "final", folder / "test", run.seed
    )


def accuracy(world: World, model: Path, folder: Path, seed: int) -> float:
    """The share of right sampled answers of a model to held-out questions."""
    options = {**world.settings["test"], "policy_name": model, "dataset": world.data("grpo", "test"), "seed": seed}
    return float(rft_accuracy({**options, "device": world.device}, folder)["accuracy"])


def before(world: World, algorithms: Iterable[str]) -> dict[str, float]:
    """The held-out result of each algorithm's initial weights; of rlt only if it has a run."""
    found = {}
    for algorithm in algorithms:
        if algorithm == "rlt":
            for run in itertools.islice((world.folder / "runs").glob("rlt_*/evaluations.jsonl"), 1):
                found[algorithm] = json.loads(run.read_text(encoding="utf-8").splitlines()[0])["eval_reward"]
        else:
            found[algorithm] = accuracy(world, world.start(algorithm), world.folder / "test_start", 0)
    return found


ALGORITHMS = ("grpo", "ppo", "rft", "rlt")


TRAINED = ("dense", "lora", "random:10", "random:2.5", "found:10", "found:2.5")
