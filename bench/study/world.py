"""What all runs of the study share: the model, the questions and the training data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from sparse_opt.errors import ConfigError

from ..common.training import accuracy, config_of, finish
from .plan import Run
from .preferences import write_pairs

ALGORITHMS = ("grpo", "dpo", "rft", "sft")
# Held-out questions of each other task that a run is asked.
OF_OTHERS = 100
# Algorithm -> the file of a task that it trains on.
DATA = {"grpo": "train", "dpo": "pairs", "rft": "kept", "sft": "demonstrations"}
TEXTS_FILE = "texts.jsonl"
# Files that the start samples, which may differ if they are made again on another machine.
_SAMPLED = (TEXTS_FILE, "kept.jsonl", "pairs.jsonl")


@dataclass(frozen=True)
class World:
    """The folder, settings and device that all runs share."""

    folder: Path
    settings: dict[str, Any]
    device: str

    @property
    def start(self) -> Path:
        """The folder of the weights that every run starts from."""
        return self.folder / ("model/fp32" if self.settings["model"] == "smollm2" else "start/final")

    @property
    def changed(self) -> Path:
        """The folder of samples of the weights that dense runs of seeds changed; see `overlaps`."""
        return self.folder / "changed"

    def data(self, task: str, name: str) -> Path:
        """A file of a task: train, tune, test, and made from train: demonstrations (sft), kept (rft), pairs (dpo)."""
        return self.folder / "questions" / task / f"{name}.jsonl"

    def asked(self, task: str) -> dict[tuple[str, str], slice]:
        """Where the questions of (task, file) are in the file `asked`: those of the task, and some of each other's."""
        lines = {name: self.data(task, name).read_text(encoding="utf-8").count("\n") for name in ("tune", "test")}
        places = {(task, "tune"): slice(0, lines["tune"]), (task, "test"): slice(lines["tune"], sum(lines.values()))}
        end = sum(lines.values())
        for other in self.settings["tasks"]:
            if other != task:
                n = min(OF_OTHERS, self.data(other, "test").read_text(encoding="utf-8").count("\n"))
                places[other, "test"] = slice(end, end + n)
                end += n
        return places

    def inputs(self, task: str, *data: str) -> dict[str, str]:
        """Path in the folder -> digest, of what scores on a task depend on, and of the data files named."""
        files = [self.folder / TEXTS_FILE, *(self.data(task, name) for name in ("asked", *data))]
        return {str(file.relative_to(self.folder)): digest_of(file) for file in files}

    def final(self, run: Run) -> Path:
        """The weights of a dense run of a seed, which are kept."""
        return self.folder / "finals" / f"{run.name}.safetensors"

    def options(self, run: Run) -> dict[str, Any]:
        """Options of the loop's config, without data, folders and mask."""
        shared = {**self.settings["shared"], **self.settings[run.algorithm], "device": self.device}
        shared |= {"policy_name": self.start, "learning_rate": run.learning_rate, "seed": run.seed}
        if run.n_steps is not None:
            shared["n_steps"] = run.n_steps
        if run.algorithm == "grpo":
            shared["reward_functions"] = self.settings["reward_functions"]
        return shared

    def asking(self, kind: str, model: Path, file: Path, seed: int) -> dict[str, Any]:
        """Options of `rft test` for the answers of a model to a file's questions; kind is test or answers."""
        options = {**self.settings[kind], "reward_functions": self.settings["reward_functions"], "seed": seed}
        return options | {
            "share_prompts": True,
            "policy_name": model,
            "dataset": file,
            "device": self.device,
            "dtype": self.settings["shared"]["dtype"],
        }


def digest_of(file: Path) -> str:
    """The digest of a file."""
    return xxhash.xxh3_64_hexdigest(file.read_bytes())


def require_inputs(world: World, inputs: Mapping[str, str]) -> None:
    """Check that the folder has the questions and texts of the finished runs, `Results.inputs`.

    Raises:
        ConfigError: a file differs, or one that the start sampled is missing; names it.
    """
    for name, digest in inputs.items():
        file = world.folder / name
        found = digest_of(file) if file.is_file() else "missing"
        if found != digest and (file.is_file() or file.name in _SAMPLED):
            raise ConfigError(
                f"{file}: {found}, expected digest {digest}, as in the finished runs: copy {TEXTS_FILE} and questions/ "
                "from the machine that did them, or name another --results"
            )


def make_world(world: World, tasks: Iterable[str]) -> None:
    """Make the model and the questions that do not exist yet; they may come from another machine."""
    settings = world.settings
    if settings["model"] == "smollm2":
        from .model import make_model
        from .tasks import make_questions

        if not world.start.is_dir():
            make_model(world.folder / "model", ["fp32"])
        for task in settings["tasks"]:
            if not world.data(task, "train").is_file():
                make_questions(world.data(task, "train").parent, task, **settings["questions"])
    else:
        _make_arithmetic(world, tasks)
    for task in tasks:
        lines = []
        for (of, name), place in world.asked(task).items():
            rows = world.data(of, name).read_text(encoding="utf-8").splitlines(keepends=True)
            lines += rows[: place.stop - place.start]
        world.data(task, "asked").write_text("".join(lines), encoding="utf-8")


def _make_arithmetic(world: World, tasks: Iterable[str]) -> None:
    """The small model after SFT, and sums to train on, to tune with, and held out."""
    from sparse_opt.trainers import sft
    from sparse_opt.trainers.arithmetic import make_arithmetic

    made = world.folder / "arithmetic"
    if not made.is_dir():
        make_arithmetic(made, **world.settings["world"])
    start = {
        **world.settings["shared"],
        **world.settings["start"],
        "device": world.device,
        "policy_name": made / "model",
    }
    finish(sft, "SFTConfig", start, made / "data" / "demonstrations.jsonl", world.start.parent)
    for task in tasks:
        folder = world.data(task, "train").parent
        folder.mkdir(parents=True, exist_ok=True)
        rows = (made / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        n_tune = world.settings["questions"]["n_tune"]
        (folder / "tune.jsonl").write_text("".join(rows[:n_tune]), encoding="utf-8")
        (folder / "train.jsonl").write_text("".join(rows[n_tune:]), encoding="utf-8")
        shutil.copyfile(made / "data" / "test.jsonl", folder / "test.jsonl")


def make_answers(world: World, task: str) -> None:
    """The training data of sft, rft and dpo: the right answers, and the start's own answers to the same questions.

    Own answers are sampled once. Of these, rft has the right ones, and dpo pairs of a right and a wrong one.
    """
    if not world.data(task, "demonstrations").is_file():
        lines = []
        for line in world.data(task, "train").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            is_text = isinstance(row["prompt"], str)
            completion = row["answer"] if is_text else [{"role": "assistant", "content": row["answer"]}]
            lines.append(json.dumps({"prompt": row["prompt"], "completion": completion}) + "\n")
        world.data(task, "demonstrations").write_text("".join(lines), encoding="utf-8")
    if not (world.data(task, "kept").is_file() and world.data(task, "pairs").is_file()):
        from sparse_opt.trainers.rft import train as rft
        from sparse_opt.trainers.rft.datagen import Selection, kept_rows
        from sparse_opt.trainers.rft.parts import write_lines

        folder = world.folder / "answers" / task
        asked = world.asking("answers", world.start, world.data(task, "train"), seed=0)
        answers = Path(accuracy(asked, folder)["results_file"])
        rows = (json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines())
        config = config_of(rft, "DatagenConfig", {**asked, "output_dir": folder})
        if not world.data(task, "kept").is_file():  # it may come from another machine, and runs may have used it
            write_lines(world.data(task, "kept"), kept_rows(rows, config, Selection()))
        write_pairs(answers, world.data(task, "pairs"))
