"""Do the loops learn, and how do sparse runs learn beside dense and LoRA ones? On generated arithmetic, over seeds.

A small Llama is trained from scratch by SFT on demonstrations that are right in part (`trainers.arithmetic`), which
leaves the rest to reinforcement. From there GRPO, PPO, RFT and RLT train with the reward of a verifier or a student:

| trained | |
|---|---|
| dense | all weights |
| lora | adapters of rank 16 on all linear layers |
| random:2.5 | a random mask of 2.5 % of the weights, drawn anew for every seed |
| found:2.5 | the 2.5 % that moved most in a dense run of the same algorithm, with a seed of its own |

The learning rate of each is the best of a few by a seed of its own (`--tune`), as the ones that suit a tenth or a
fortieth of the weights are higher than those that suit all. Figures are of held-out questions: for GRPO, PPO and RFT
the share of sampled answers that are right, for RLT the teacher's reward.

Runs go on side by side, a process each; what is done is kept in the results file, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from tqdm import tqdm

from .environment import environment
from .report import table, why_unwritable, write_json

SETTINGS = Path(__file__).with_name("learning.yaml")
ALGORITHMS = ("grpo", "ppo", "rft", "rlt")
TRAINED = ("dense", "lora", "random:10", "random:2.5", "found:10", "found:2.5")
TUNING_SEED = 1000
FINDING_SEED = 2000
HEADERS = ("algorithm", "trained", "learning rate", "before", "after", "of the seeds", "gained", "s a run")


@dataclass(frozen=True)
class Run:
    """One training run, named by what it is."""

    algorithm: str
    trained: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and its entry in the results."""
        return f"{self.algorithm}_{self.trained.replace(':', '_')}_lr{self.learning_rate:g}_seed{self.seed}"


@dataclass(frozen=True)
class World:
    """What all runs of a size share: the folder, its settings, and where they run."""

    folder: Path
    settings: dict[str, Any]
    device: str

    def data(self, algorithm: str, name: str) -> Path:
        """A file of the questions that an algorithm trains or is tested on."""
        return self.folder / _questions(algorithm) / "data" / f"{name}.jsonl"

    def start(self, algorithm: str) -> Path:
        """The weights that an algorithm's runs begin with."""
        return self.folder / ("teacher" if algorithm == "rlt" else "sft") / "final"

    def options(self, algorithm: str) -> dict[str, Any]:
        """Of the algorithm's config, but for mode, learning rate, seed and folders."""
        options = {**self.settings["shared"], **self.settings[algorithm]["options"], "device": self.device}
        if algorithm == "rlt":
            options |= {**self.settings["templates"], "student_model": self.folder / "student" / "final"}
        return options


def _questions(algorithm: str) -> str:
    return "think" if algorithm == "rlt" else "plain"


def make_world(world: World, algorithms: Iterable[str]) -> None:
    """The questions, and the models that reinforcement begins with; what is there stays as it is."""
    from sparse_opt.trainers import sft, teacher_data
    from sparse_opt.trainers.arithmetic import make_arithmetic

    for kind in sorted({_questions(algorithm) for algorithm in algorithms}):
        if not (world.folder / kind).is_dir():
            make_arithmetic(world.folder / kind, **world.settings[kind])
        model = {**world.settings["shared"], "device": world.device, "policy_name": world.folder / kind / "model"}
        name = "student" if kind == "think" else "sft"
        demonstrations = world.folder / kind / "data" / "demonstrations.jsonl"
        _finish(sft, "SFTConfig", {**model, **world.settings[name]}, demonstrations, world.folder / name)
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
        _finish(sft, "SFTConfig", {**model, **world.settings["teacher"]}, rows, world.folder / "teacher")


def _finish(module: Any, config: str, options: dict[str, Any], dataset: Path, folder: Path) -> dict[str, Any]:
    """The summary of a run in this folder: of the one that is there, or of one that is done now."""
    if (folder / "summary.json").is_file():
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return module.train(_config(module, config, {**options, "dataset": dataset, "output_dir": folder, "resume": True}))


def _config(module: Any, name: str, options: dict[str, Any]) -> Any:
    """A config with these options, checked as the command line's are."""
    from sparse_opt.trainers.config import parse_config

    words = [f"{key}={','.join(value) if isinstance(value, list) else value}" for key, value in options.items()]
    return parse_config(getattr(module, name), words)


def do(world: World, run: Run) -> dict[str, Any]:
    """Train and return the held-out figures before and after, the curve of rewards, and the seconds it took."""
    import importlib

    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    folder = world.folder / "runs" / run.name
    options = {
        **world.options(run.algorithm),
        **_mode(world, run),
        "seed": run.seed,
        "learning_rate": run.learning_rate,
    }
    if run.algorithm == "rft":
        curve, after = _rft(world, run, options, folder)
    else:
        module = importlib.import_module(f"sparse_opt.trainers.{run.algorithm}")
        options["policy_name"] = world.start(run.algorithm)
        train, test = (world.data(run.algorithm, name) for name in world.settings[run.algorithm]["data"])
        options["eval_dataset"] = test
        summary = _finish(module, f"{run.algorithm.upper()}Config", options, train, folder)
        rows = [json.loads(line) for line in Path(summary["metrics_file"]).read_text(encoding="utf-8").splitlines()]
        curve = [row["reward"] for row in rows]
        if run.algorithm == "rlt":
            after = summary["last_evaluation"]["eval_reward"]
        else:
            after = accuracy(world, folder / "final", folder / "test", run.seed)
    return {**asdict(run), "after": after, "curve": curve, "seconds": time.perf_counter() - began}


def _mode(world: World, run: Run) -> dict[str, Any]:
    """Options of what is trained; masks are made in the folder of the run."""
    kind, _, percent = run.trained.partition(":")
    if kind in ("dense", "lora"):
        return {"mode": kind}
    mask_file = world.folder / "masks" / f"{run.algorithm}_{kind}_{percent}_{run.seed}.safetensors"
    if not mask_file.is_file():
        from sparse_opt.delta_log import DeltaLog
        from sparse_opt.mask_finding import find_magnitude
        from sparse_opt.masks import MaskSet

        mask_file.parent.mkdir(parents=True, exist_ok=True)
        if kind == "random":
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(world.start(run.algorithm))
            mask = MaskSet.random(model, density=float(percent) / 100, seed=run.seed)
        else:
            log = DeltaLog.open(finding_log(world, run.algorithm))
            mask = find_magnitude(log, sparsity=100 - float(percent))
        mask.save(mask_file)
    return {"mode": "sparse", "mask": mask_file}


def finding_log(world: World, algorithm: str) -> Path:
    """The delta log of the dense run that masks are found from."""
    return world.folder / f"delta_logs_{algorithm}"


def find(world: World, algorithm: str, learning_rate: float) -> None:
    """The dense run that masks are found from, with a delta log of its start and its end."""
    import importlib

    options = {**world.options(algorithm), "seed": FINDING_SEED, "learning_rate": learning_rate}
    options |= {"delta_log_dir": finding_log(world, algorithm), "delta_log_steps": "last"}
    folder = world.folder / "runs" / f"{algorithm}_finding"
    if algorithm == "rft":
        _rft(world, Run("rft", "dense", learning_rate, FINDING_SEED), options, folder)
        return
    options["policy_name"] = world.start(algorithm)
    module = importlib.import_module(f"sparse_opt.trainers.{algorithm}")
    train = world.data(algorithm, world.settings[algorithm]["data"][0])
    _finish(module, f"{algorithm.upper()}Config", options, train, folder)


def _rft(world: World, run: Run, options: dict[str, Any], folder: Path) -> tuple[list[float], float]:
    """One round of sampling, verifying and SFT; the held-out accuracy every so many steps would be another stage."""
    from sparse_opt.trainers import rft

    start = world.start("rft")
    datagen = {**world.settings["rft"]["datagen"], "device": world.device, "seed": run.seed, "policy_name": start}
    kept = folder / "datagen"
    if not (kept / "report.json").is_file():
        rft.datagen(
            _config(rft, "DatagenConfig", {**datagen, "dataset": world.data("rft", "train"), "output_dir": kept})
        )
    summary = _finish(rft, "RFTConfig", {**options, "policy_name": start}, kept / "kept.jsonl", folder / "train")
    rows = [json.loads(line) for line in Path(summary["metrics_file"]).read_text(encoding="utf-8").splitlines()]
    return [-row["loss"] for row in rows], accuracy(world, folder / "train" / "final", folder / "test", run.seed)


def accuracy(world: World, model: Path, folder: Path, seed: int) -> float:
    """The share of a model's sampled answers to held-out questions that are right."""
    from sparse_opt.trainers import rft

    if not (folder / "summary.json").is_file():
        options = {**world.settings["test"], "policy_name": model, "dataset": world.data("grpo", "test"), "seed": seed}
        rft.test(_config(rft, "TestConfig", {**options, "output_dir": folder, "device": world.device}))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["accuracy"])


def before(world: World, algorithms: Iterable[str]) -> dict[str, float]:
    """The held-out figure of each algorithm's start."""
    figures = {}
    for algorithm in algorithms:
        if algorithm == "rlt":
            run = next((world.folder / "runs").glob("rlt_*/evaluations.jsonl"))
            figures[algorithm] = json.loads(run.read_text(encoding="utf-8").splitlines()[0])["eval_reward"]
        else:
            figures[algorithm] = accuracy(world, world.start(algorithm), world.folder / "test_start", 0)
    return figures


class Results:
    """The runs that are done, by name, in a JSON file that grows with each."""

    def __init__(self, path: Path, header: dict[str, Any]):
        self.path = path
        self.data: dict[str, Any] = {**header, "runs": {}, "before": {}}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8"))

    def add(self, run: Run, figures: dict[str, Any]) -> None:
        """Keep a run's figures."""
        self.data["runs"][run.name] = figures
        write_json(self.path, self.data)

    def of(self, algorithm: str, trained: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The runs of these seeds."""
        return [
            run
            for run in self.data["runs"].values()
            if (run["algorithm"], run["trained"]) == (algorithm, trained) and run["seed"] in seeds
        ]


def do_all(world: World, runs: Sequence[Run], results: Results, n_processes: int) -> None:
    """Do the runs that the results lack, so many at once."""
    left = [run for run in runs if run.name not in results.data["runs"]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_processes, mp_context=context) as pool:
        futures = {pool.submit(do, world, run): run for run in left}
        for future in tqdm(as_completed(futures), total=len(left), unit="run", disable=None):
            results.add(futures[future], future.result())


def text(results: Results, algorithms: Sequence[str], trained: Sequence[str], seeds: Sequence[int]) -> str:
    """The table: means over the seeds, and each seed's figure."""
    rows = []
    for algorithm in algorithms:
        for what in trained:
            runs = results.of(algorithm, what, seeds)
            if not runs:
                continue
            start, ends = results.data["before"][algorithm], [run["after"] for run in runs]
            rows.append(
                (
                    algorithm,
                    what,
                    f"{runs[0]['learning_rate']:g}",
                    f"{start:.3f}",
                    f"{mean(ends):.3f}",
                    " ".join(f"{end:.3f}" for end in ends),
                    f"{mean(ends) - start:+.3f}",
                    f"{mean(run['seconds'] for run in runs):.0f}",
                )
            )
    return table(HEADERS, rows, n_words=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, keep the figures, print the table, draw the curves."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_opt.bench.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=("small", "large"), default="small", help="settings of learning.yaml")
    parser.add_argument("--output_dir", type=Path, default=Path("learning"), help="models, data and runs (%(default)s)")
    parser.add_argument("--results", type=Path, default=None, help="JSON file of the figures (OUTPUT_DIR/results.json)")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--trained", nargs="+", default=list(TRAINED), metavar="WHAT", help="see above (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tune", nargs="+", type=float, default=None, metavar="FACTOR",
                        help="try these multiples of each learning rate of learning.yaml first")  # fmt: skip
    parser.add_argument("--n_processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plot", type=Path, default=None, help="draw the curves of rewards to this PNG")
    args = parser.parse_args(argv)
    path = args.results or args.output_dir / "results.json"
    if why := why_unwritable(path):
        print(f"error: {why}", file=sys.stderr)
        return 2
    from sparse_opt.trainers.models import resolve_device

    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))[args.size]
    device = resolve_device(args.device)
    world = World(args.output_dir.resolve(), settings, str(device))
    results = Results(path, {"environment": environment(device), "size": args.size, "settings": settings})
    make_world(world, args.algorithms)
    rates = {
        (algorithm, what): float(settings[algorithm]["learning_rates"][what.partition(":")[0]])
        for algorithm in args.algorithms
        for what in args.trained
    }
    found = any(what.startswith("found") for what in args.trained)
    for algorithm in args.algorithms if found else []:
        if not finding_log(world, algorithm).is_dir():
            find(world, algorithm, float(settings[algorithm]["learning_rates"]["dense"]))
    if args.tune:
        trials = [Run(*key, rate * factor, TUNING_SEED) for key, rate in rates.items() for factor in args.tune]
        do_all(world, trials, results, args.n_processes)
        for key in rates:
            best = max(results.of(*key, [TUNING_SEED]), key=lambda run: run["after"])
            rates[key] = best["learning_rate"]
    do_all(
        world, [Run(*key, rate, seed) for key, rate in rates.items() for seed in args.seeds], results, args.n_processes
    )
    results.data["before"] |= before(world, args.algorithms)
    write_json(path, results.data)
    print(text(results, args.algorithms, args.trained, args.seeds))
    if args.plot is not None:
        from .learning_plot import plot

        plot(results.data, args.seeds, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
