"""The runs of the study: the model and the questions, masks, training, and what is measured of a run."""

from __future__ import annotations

import importlib
import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_opt.trainers.run.outputs import ADAPTER_FOLDER

from ..common.training import accuracy, config_of, finish
from .plan import FINDING_SEED, TUNING_SEED, Run, Trained
from .preferences import write_pairs

ALGORITHMS = ("grpo", "dpo", "rft", "sft")
# Algorithm -> module of its loop, and its config class.
_LOOPS = {
    "grpo": ("sparse_opt.trainers.grpo", "GRPOConfig"),
    "dpo": ("sparse_opt.trainers.dpo", "DPOConfig"),
    "rft": ("sparse_opt.trainers.rft.train", "RFTConfig"),
    "sft": ("sparse_opt.trainers.sft", "SFTConfig"),
}


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

    def data(self, task: str, name: str) -> Path:
        """A file of a task: train, tune, test, and made from train: demonstrations (sft), kept (rft), pairs (dpo)."""
        return self.folder / "questions" / task / f"{name}.jsonl"

    def options(self, run: Run) -> dict[str, Any]:
        """Options of the loop's config, without data, folders and mask."""
        shared = {**self.settings["shared"], **self.settings[run.algorithm], "device": self.device}
        shared |= {"policy_name": self.start, "learning_rate": run.learning_rate, "seed": run.seed}
        if run.algorithm == "grpo":
            shared["reward_functions"] = self.settings["reward_functions"]
        return shared

    def asking(self, kind: str, model: Path, file: Path, seed: int) -> dict[str, Any]:
        """Options of `rft test` for the answers of a model to a file's questions; kind is test or answers."""
        options = {**self.settings[kind], "reward_functions": self.settings["reward_functions"], "seed": seed}
        return options | {
            "policy_name": model,
            "dataset": file,
            "device": self.device,
            "dtype": self.settings["shared"]["dtype"],
        }


def make_world(world: World, tasks: Iterable[str]) -> None:
    """Make the model and the files of the tasks that do not exist yet."""
    settings = world.settings
    if settings["model"] == "smollm2":
        from .model import make_model
        from .tasks import make_questions

        if not world.start.is_dir():
            make_model(world.folder / "model", ["fp32"])
        for task in tasks:
            if not world.data(task, "train").parent.is_dir():
                make_questions(world.data(task, "train").parent, task, **settings["questions"])
    else:
        _make_arithmetic(world, tasks)
    for task in tasks:
        _make_data(world, task)


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


def _make_data(world: World, task: str) -> None:
    """The training data of sft, rft and dpo: the right answers, and the start's own answers to the same questions."""
    if not world.data(task, "demonstrations").is_file():
        lines = []
        for line in world.data(task, "train").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            is_text = isinstance(row["prompt"], str)
            completion = row["answer"] if is_text else [{"role": "assistant", "content": row["answer"]}]
            lines.append(json.dumps({"prompt": row["prompt"], "completion": completion}) + "\n")
        world.data(task, "demonstrations").write_text("".join(lines), encoding="utf-8")
    answers = world.folder / "answers" / task
    asked = world.asking("answers", world.start, world.data(task, "train"), seed=0)
    if not world.data(task, "kept").is_file():
        from sparse_opt.trainers.rft import train as rft

        if not (answers / "datagen" / "report.json").is_file():
            options = {**asked, "output_dir": answers / "datagen", "resume": True}
            rft.datagen(config_of(rft, "DatagenConfig", options))
        shutil.copyfile(answers / "datagen" / "kept.jsonl", world.data(task, "kept"))
    if not world.data(task, "pairs").is_file():
        summary = accuracy({**asked, "dataset": world.data(task, "train")}, answers / "test")
        write_pairs(Path(summary["results_file"]), world.data(task, "pairs"))


def before(world: World, task: str) -> dict[str, float]:
    """The accuracy of the start on the questions for tuning and on the held-out ones."""
    return {
        name: accuracy(
            world.asking("test", world.start, world.data(task, name), seed=0), world.folder / f"before_{task}_{name}"
        )["accuracy"]
        for name in ("tune", "test")
    }


def do(world: World, run: Run) -> dict[str, Any]:
    """Train and measure, then remove the weights of the run.

    Returns:
        accuracy on the questions for tuning if the seed is `TUNING_SEED`, else on the held-out ones; seconds of the
        run, of its steps and of its optimizer (median); peak_memory_bytes on a GPU; optimizer_bytes; n_trained, the
        number of trained values of a mask or of adapters; and the shares of all weights that differ from the start:
        changed in the dtype of the run, changed_bf16 rounded to bf16.
    """
    began = time.perf_counter()
    folder = world.folder / "runs" / run.name
    options, trained = world.options(run), Trained.parse(run.trained)
    if trained.source == "lora":
        assert trained.amount is not None
        options |= {"mode": "lora", "lora_rank": int(trained.amount)}
    elif trained.is_mask:
        options |= {"mode": "sparse", "mask": mask_file(world, run)}
    else:
        options["mode"] = "dense"
    module, config = _LOOPS[run.algorithm]
    data = world.data(
        run.task, {"grpo": "train", "dpo": "pairs", "rft": "kept", "sft": "demonstrations"}[run.algorithm]
    )
    summary = finish(importlib.import_module(module), config, options, data, folder)
    questions = world.data(run.task, "tune" if run.seed == TUNING_SEED else "test")
    final = Path(summary["checkpoint"])
    asked = accuracy(world.asking("test", final, questions, run.seed), folder / "test")
    measured = {
        "accuracy": asked["accuracy"],
        "accuracy_stderr": asked["accuracy_stderr"],
        "step_time_s": summary["median"]["step_time_s"],
        "optimizer_time_s": summary["median"]["optimizer_time_s"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "optimizer_bytes": sum(summary["optimizer_bytes"].values()),
        **_changes(world.start, final, world.settings["shared"]["dtype"]),
    }
    if trained.is_mask:
        from sparse_opt.masks.mask_set import MaskSet

        measured["n_trained"] = MaskSet.load(mask_file(world, run)).nnz
    elif trained.source == "lora":
        measured["n_trained"] = _numel(folder / ADAPTER_FOLDER / "adapter_model.safetensors")
    shutil.rmtree(final)
    return {**measured, "seconds": time.perf_counter() - began}


def _numel(file: Path) -> int:
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(file).values())


def _changes(start: Path, final: Path, dtype: str) -> dict[str, float]:
    """The shares of the weights that a run changed, in its own dtype and rounded to bf16."""
    import torch
    from safetensors.torch import load_file

    own = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    first, second = (load_file(folder / "model.safetensors") for folder in (start, final))
    numel = sum(tensor.numel() for tensor in second.values())
    counts = {
        name: sum(int((first[key].to(own).to(to) != tensor.to(own).to(to)).sum()) for key, tensor in second.items())
        for name, to in (("changed", own), ("changed_bf16", torch.bfloat16))
    }
    return {name: count / numel for name, count in counts.items()}


def mask_file(world: World, run: Run) -> Path:
    """The mask of a run, which is made unless it exists; random masks differ between seeds."""
    from sparse_opt.masks.mask_set import MaskSet
    from sparse_opt.trainers.policy.pretrained import load_causal_lm, parameter_shapes

    trained = Trained.parse(run.trained)
    assert trained.amount is not None and trained.pattern is not None
    name = run.trained.replace(":", "_")
    if trained.source == "random":
        name += f"_seed{run.seed}"
    elif trained.source != "magnitude":
        name = f"{run.algorithm}_{run.task}_{name}"
    file = world.folder / "masks" / f"{name}.safetensors"
    if file.is_file():
        return file
    if trained.source == "random":
        density = trained.amount / 100
        mask = MaskSet.random(parameter_shapes(world.start), density=density, pattern=trained.pattern, seed=run.seed)
        return mask.save(file)
    import torch

    from sparse_opt.mask_finding.find import find_from_log, find_from_model

    # Tiles are few in a small tensor: a share of each tensor kept would be most of a mask of 0.1 %.
    options: dict[str, Any] = {"sparsity": 100 - trained.amount, "pattern": trained.pattern, "min_tensor_keep": 0.0}
    if trained.needs_finding_run:
        log, step = _finding_log(world, run, trained.source)
        return find_from_log(log, target_step=step, **options).mask.save(file)
    model = load_causal_lm(world.start, torch.float32).to(world.device)
    method = {"magnitude": "weight_magnitude"}.get(trained.source, trained.source)
    sequences = [] if method == "weight_magnitude" else _first_batch(world, run)
    # `Trained.parse` has checked the source, which the type checker cannot see.
    return find_from_model(model, method=method, sequences=sequences, **options).mask.save(file)  # type: ignore[arg-type]


def _finding_log(world: World, run: Run, source: str) -> tuple[Any, int]:
    """The log of the dense run that masks are found from, and the step; the run is done now unless it exists."""
    from sparse_opt.delta.log import DeltaLog

    from .plan import EARLY

    n_steps = world.settings[run.algorithm]["n_steps"]
    early = {percent: max(1, round(percent * n_steps / 100)) for percent in EARLY}
    rate = float(world.settings["learning_rates"][run.algorithm])
    finding = Run(run.algorithm, run.task, "dense", rate, FINDING_SEED)
    folder = world.folder / "runs" / finding.name
    log_dir = world.folder / f"delta_logs_{run.algorithm}_{run.task}"
    steps = ",".join([*map(str, sorted(set(early.values()))), "last"])
    options = world.options(finding) | {"delta_log_dir": log_dir, "delta_log_steps": steps, "mode": "dense"}
    module, config = _LOOPS[run.algorithm]
    data = world.data(
        run.task, {"grpo": "train", "dpo": "pairs", "rft": "kept", "sft": "demonstrations"}[run.algorithm]
    )
    finish(importlib.import_module(module), config, options, data, folder)
    shutil.rmtree(folder / "final", ignore_errors=True)
    return DeltaLog.open(log_dir), early[int(source.removeprefix("early"))] if source != "found" else n_steps


def _first_batch(world: World, run: Run) -> list[Any]:
    """Sequences to score weights by: as many of the start's own right answers as a step of SFT has."""
    from sparse_opt.trainers.data.encoding import load_examples
    from sparse_opt.trainers.policy.pretrained import load_tokenizer_from

    examples, _ = load_examples(
        "demonstration",
        str(world.data(run.task, "kept")),
        "train",
        load_tokenizer_from(world.start),
        world.settings["rft"]["batch_size"],
        max_length=world.settings["rft"]["max_length"],
    )
    return [sequence for (sequence,) in examples]
