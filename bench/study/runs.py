"""The runs of the study: masks, training, and what is measured of a run."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from sparse_opt.analysis.ranks import is_weight_matrix
from sparse_opt.errors import ConfigError
from sparse_opt.mask_finding.model_scores import ModelMethod
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers.policy.pretrained import load_causal_lm, parameter_shapes
from sparse_opt.trainers.run.outputs import ADAPTER_FOLDER
from sparse_opt.trainers.run.reporting.update_log import FILE as UPDATES_FILE

from ..common.training import accuracy, finish, metrics
from .forgetting import make_texts, perplexity
from .measures import changed_weights, closeness, measure_update
from .overlaps import sample_file
from .plan import ADAPTERS, EARLY, FINDING_SEED, OF_DENSE, TUNING_SEED, Run, Trained
from .results import Results
from .world import DATA, TEXTS_FILE, World, make_answers

# Source of a mask -> how the start's weights are scored.
METHODS: dict[str, ModelMethod] = {"magnitude": "weight_magnitude", "fisher": "fisher_gradient", "snip": "snip"}
# Algorithm -> module of its loop, and its config class.
LOOPS = {
    "grpo": ("sparse_opt.trainers.grpo", "GRPOConfig"),
    "dpo": ("sparse_opt.trainers.dpo", "DPOConfig"),
    "rft": ("sparse_opt.trainers.rft.train", "RFTConfig"),
    "sft": ("sparse_opt.trainers.sft", "SFTConfig"),
}


@dataclass(frozen=True)
class Chore:
    """Work that runs need beforehand: the start's answers, its accuracy, texts that it wrote (`forgetting`), or the log
    of a dense run to find masks in."""

    kind: Literal["answers", "before", "log", "texts"]
    task: str
    algorithm: str = "grpo"

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.kind} of {self.task}" + (f" by {self.algorithm}" if self.kind == "log" else "")


def needed_by(world: World, run: Run) -> Run | Chore | None:
    """What must be done before a run can be; None if it can begin."""
    trained = Trained.parse(run.trained)
    if trained.source in OF_DENSE and not world.final(dense_run(run)).is_file():
        return dense_run(run)
    chores = [Chore("texts", "all")]
    has_mask = trained.is_mask and mask_path(world, run).is_file()  # it may come from another machine
    # The digest of the answers is kept with the result.
    if run.algorithm != "grpo" or trained.source in ("fisher", "snip"):
        chores.append(Chore("answers", run.task))
    if trained.needs_finding_run and not has_mask:
        chores.append(Chore("log", run.task, run.algorithm))
    return next((chore for chore in chores if not is_done(world, chore)), None)


def is_done(world: World, chore: Chore) -> bool:
    """Whether the files of a chore exist; those of `before` are the study's."""
    if chore.kind == "answers":
        return world.data(chore.task, "pairs").is_file()
    if chore.kind == "texts":
        return (world.folder / TEXTS_FILE).is_file()
    return (world.folder / "runs" / finding_run(world, chore.algorithm, chore.task).name / "summary.json").is_file()


def dense_run(run: Run) -> Run:
    """The dense run of the same settings."""
    return replace(run, trained="dense")


def random_run(run: Run) -> Run:
    """The run whose mask a lean run has."""
    return replace(run, trained=str(replace(Trained.parse(run.trained), source="random")))


def require_samples(world: World, results: Results) -> None:
    """Check that the changed weights of the finished dense runs are here, which later ones are compared with.

    Raises:
        ConfigError: a file is missing; names it.
    """
    for row in results.rows.values():
        if row["trained"] == "dense" and row["seed"] != TUNING_SEED:
            run = Run(row["algorithm"], row["task"], row["trained"], row["learning_rate"], row["seed"])
            if not (file := sample_file(world.changed, run.name)).is_file():
                raise ConfigError(
                    f"{file}: missing, expected the sample of a finished run, which claim 2 compares others with: copy "
                    "changed/ from the machine that did it, or leave claim 2 out with --claims"
                )


def do_chore(world: World, chore: Chore) -> dict[str, Any] | None:
    """Do a chore unless it is done; return the scores of `before`."""
    if chore.kind == "before":
        return before(world, chore.task)
    if chore.kind == "answers":
        make_answers(world, chore.task)
    elif chore.kind == "texts":
        make_texts(world)
    else:
        finding_log(world, chore.algorithm, chore.task)
    return None


def before(world: World, task: str) -> dict[str, Any]:
    """The scores of the start, and inputs, the digests of the files that they depend on."""
    found = scores(world, task, world.start, world.folder / f"before_{task}", seed=0)
    return {**found, "inputs": world.inputs(task)}


def scores(world: World, task: str, model: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Scores of a model.

    Returns:
        tune_accuracy on the questions for tuning, accuracy on the held-out ones, and the standard errors of both;
        right, a digit for each held-out question, how many of its n_generations answers are right; others, the accuracy
        on held-out questions of each other task; and perplexity, of texts that the start wrote, None if not finite.
    """
    summary = accuracy(world.asking("test", model, world.data(task, "asked"), seed), folder)
    with open(summary["results_file"], encoding="utf-8") as lines:
        answers = [json.loads(line)["right"] for line in lines]
    right = [mean(of_question) for of_question in answers]
    places = world.asked(task)
    tune, test = right[places[task, "tune"]], right[places[task, "test"]]
    others = {other: mean(right[of]) for (other, _), of in places.items() if other != task}
    of_texts = perplexity(world, model)
    return {
        "tune_accuracy": mean(tune),
        "tune_stderr": _stderr(tune),
        "accuracy": mean(test),
        "accuracy_stderr": _stderr(test),
        "right": "".join(str(sum(of_question)) for of_question in answers[places[task, "test"]]),
        "n_generations": len(answers[0]),
        "others": others,
        "perplexity": of_texts if math.isfinite(of_texts) else None,
    }


def _stderr(shares: Sequence[float]) -> float:
    """The standard error of the mean of questions that are answered right or not."""
    share = mean(shares)
    return math.sqrt(share * (1 - share) / len(shares))


def options_of(world: World, run: Run) -> dict[str, Any]:
    """Options of the loop's config for a run, without data and folders. A mask is made unless it exists."""
    options, trained = world.options(run), Trained.parse(run.trained)
    if trained.source in ADAPTERS:
        assert trained.amount is not None
        return options | {"mode": "lora", "adapter": trained.source, "lora_rank": int(trained.amount)}
    if trained.is_mask or trained.source == "subnetwork":
        file = mask_file(world, run)
        options |= {"mode": "sparse", "mask": file}
        if trained.source == "lean":
            return options | {"lean": True}
        mask = MaskSet.load(file)
        shapes = {name: mask.shapes[name] for name in mask.names if mask[name].numel()}
        return options | _statistics(options, shapes)
    options |= {"mode": "dense"} | _statistics(options, parameter_shapes(world.start))
    return options | ({"optim": "sgd"} if trained.source == "sgd" else {})


def _statistics(options: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Options that measure the update when training ends, because the optimizer's fp32 copies are not saved.

    Ranks are measured by `measure_update`, so that the smallest matrix is enough here. Of a mask without any, nothing
    is measured.
    """
    matrices = [name for name, shape in shapes.items() if is_weight_matrix(name, len(shape))]
    if not matrices:
        return {}
    smallest = min(matrices, key=lambda name: math.prod(shapes[name]))
    return {"statistics_steps": options["n_steps"], "statistics_include": [smallest]}


def do(world: World, run: Run) -> dict[str, Any]:
    """Train and measure, then remove the weights of the run.

    Returns:
        `scores`; inputs, the digests of the files that the run depends on; seconds of the run, of its training, of its
        steps and of its optimizer (median); peak_memory_bytes on a GPU; optimizer_bytes; n_trained, the number of
        trained values of a mask or of adapters; changed_fp32, the share of all weights whose fp32 copy differs from the
        start's, not of adapters and lean runs; rewards, the mean reward of every fifth step (GRPO); what
        `measure_update` returns; and closeness, of runs that are compared with the dense run of their seed.
    """
    began = time.perf_counter()
    folder = world.folder / "runs" / run.name
    if not (folder / "final" / "model.safetensors").is_file():  # killed, or its result was not written
        shutil.rmtree(folder, ignore_errors=True)
    options, trained = options_of(world, run), Trained.parse(run.trained)
    module, config = LOOPS[run.algorithm]
    started = time.perf_counter()
    summary = finish(
        importlib.import_module(module), config, options, world.data(run.task, DATA[run.algorithm]), folder
    )
    trained_seconds = time.perf_counter() - started
    final = Path(summary["checkpoint"])
    measured = {
        **scores(world, run.task, final, folder / "test", run.seed),
        "inputs": world.inputs(run.task, *_data_of(run)),
        "train_seconds": trained_seconds,
        "step_time_s": summary["median"]["step_time_s"],
        "optimizer_time_s": summary["median"]["optimizer_time_s"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "optimizer_bytes": sum(summary["optimizer_bytes"].values()),
        **measure_update(world, run, final),
    }
    if run.algorithm == "grpo":
        rows = metrics(summary)
        measured["rewards"] = {row["step"]: round(row["reward"], 4) for row in rows if row["step"] % 5 == 0}
    if trained.source in OF_DENSE:
        measured["closeness"] = closeness(world.start, world.final(dense_run(run)), final, world.device)
    if "statistics_steps" in options:
        last = (folder / UPDATES_FILE).read_text(encoding="utf-8").splitlines()[-1]
        measured["changed_fp32"] = json.loads(last)["share_changed_fp32"]
    if options["mode"] == "sparse":
        measured["n_trained"] = MaskSet.load(mask_file(world, run)).nnz
    elif options["mode"] == "lora":
        measured["n_trained"] = _numel(folder / ADAPTER_FOLDER / "adapter_model.safetensors")
    if run.trained == "dense" and run.seed != TUNING_SEED:  # for the runs of OF_DENSE
        kept = world.final(run)
        kept.parent.mkdir(parents=True, exist_ok=True)
        (final / "model.safetensors").replace(kept)
    shutil.rmtree(final)
    return {**measured, "seconds": time.perf_counter() - began}


def _data_of(run: Run) -> list[str]:
    """The files of its task that a run is trained on, or that its mask is found with."""
    return [DATA[run.algorithm], *(["kept"] if Trained.parse(run.trained).source in ("fisher", "snip") else [])]


def _numel(file: Path) -> int:
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(file).values() if tensor.is_floating_point())


def mask_path(world: World, run: Run) -> Path:
    """The file of a run's mask, which may not exist yet; random masks differ between seeds."""
    trained = Trained.parse(run.trained)
    if trained.source == "lean":
        return mask_path(world, random_run(run))
    name = run.trained.replace(":", "_")
    if trained.source == "subnetwork":
        name = run.name
    elif trained.source == "random":
        name += f"_seed{run.seed}"
    elif trained.source != "magnitude":
        name = f"{run.algorithm}_{run.task}_{name}"
    return world.folder / "masks" / f"{name}.safetensors"


def mask_file(world: World, run: Run) -> Path:
    """The mask of a run, which is made unless it exists."""
    trained, file = Trained.parse(run.trained), mask_path(world, run)
    if file.is_file():
        return file
    if trained.source == "lean":
        return mask_file(world, random_run(run))
    if trained.source == "subnetwork":
        return MaskSet.from_bool(changed_weights(world.start, world.final(dense_run(run)))).save(file)
    assert trained.amount is not None and trained.pattern is not None
    if trained.source == "random":
        # From all tensors together, as masks are found: small matrices have no tile in a mask of 0.1 % of each tensor.
        return MaskSet.random(
            parameter_shapes(world.start),
            density=trained.amount / 100,
            pattern=trained.pattern,
            seed=run.seed,
            pool=world.settings["mask_pool"],
        ).save(file)
    import torch

    from sparse_opt.delta.log import DeltaLog
    from sparse_opt.mask_finding.find import find_from_log, find_from_model

    # Tiles are few in a small tensor: a share of each tensor kept would be most of a mask of 0.1 %.
    options: dict[str, Any] = {
        "sparsity": 100 - trained.amount,
        "pattern": trained.pattern,
        "pool": world.settings["mask_pool"],
        "min_tensor_keep": 0.0,
    }
    if trained.needs_finding_run:
        log_dir, steps = finding_log(world, run.algorithm, run.task)
        step = steps[100 if trained.source == "found" else int(trained.source.removeprefix("early"))]
        return find_from_log(DeltaLog.open(log_dir), target_step=step, **options).mask.save(file)
    model = load_causal_lm(world.start, torch.float32).to(world.device)
    method = METHODS[trained.source]
    sequences = [] if method == "weight_magnitude" else _first_batch(world, run)
    return find_from_model(model, method=method, sequences=sequences, **options).mask.save(file)


def finding_run(world: World, algorithm: str, task: str) -> Run:
    """The dense run that masks are found from: at the settings' rate, with a seed of its own."""
    return Run(algorithm, task, "dense", float(world.settings["learning_rates"][algorithm]), FINDING_SEED)


def finding_log(world: World, algorithm: str, task: str) -> tuple[Path, dict[int, int]]:
    """The delta log of `finding_run`, which is done now unless it exists, and percent of its steps -> step."""
    run = finding_run(world, algorithm, task)
    n_steps = world.settings[algorithm]["n_steps"]
    early = {percent: max(1, round(percent * n_steps / 100)) for percent in EARLY}
    folder = world.folder / "runs" / run.name
    log_dir = world.folder / f"delta_logs_{algorithm}_{task}"
    if not (folder / "summary.json").is_file():
        for unfinished in (folder, log_dir):
            shutil.rmtree(unfinished, ignore_errors=True)
    steps = ",".join([*map(str, sorted(set(early.values()))), "last"])
    options = world.options(run) | {"delta_log_dir": log_dir, "delta_log_steps": steps, "mode": "dense"}
    module, config = LOOPS[algorithm]
    finish(importlib.import_module(module), config, options, world.data(task, DATA[algorithm]), folder)
    shutil.rmtree(folder / "final", ignore_errors=True)
    return log_dir, {**early, 100: n_steps}


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
