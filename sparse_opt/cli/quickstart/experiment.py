"""The stages of the quickstart, from the folder and the model to the table."""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from sparse_opt.trainers.arithmetic import make_model, make_tokenizer

from ... import backends
from ...delta.log import DeltaLog
from ...errors import ConfigError, SparseOptError
from ...files import write_text
from ...integrations import DeltaLogCallback, SparseArguments, sparse_trainer
from ...integrations.rates import rate_factor
from ...integrations.run_folder import LAST, LOCK, RunFolder
from ...integrations.trl.console import ProgressLines
from ...masks.mask_set import MaskSet
from ...tables import format_bytes, table
from ...tensors import as_bits, resolve_device
from ...weight_sync import WeightSender
from . import data, smollm2
from .engine import Engine, all_weights, load_checkpoint, margins

RESULTS = "quickstart.json"
# A rerun removes these, and nothing else.
CONTENTS = ("data", "model", "start", "dense", "dense_log", "mask.safetensors", "sparse", "sparse_log")
DENSITY, PATTERN, BETA = 0.025, "tile64", 0.5
HIDDEN_SIZE, N_LAYERS = 128, 4  # of the tiny model: 0.9 million weights
SFT_RATE, TINY_RATE, PRETRAINED_RATE = 1e-3, 1e-3, 3e-5  # for all weights
# Under the mask, of the start for tuning. The tiny model's accuracy was 97.8 % at 1, 98.4 % at 2 and 98.8 % at 3 times
# that rate; docs/study.md trains SmolLM2 at about twice it, too.
SPARSE_RATE_FACTOR = 2.0
LOG_STEPS = "every:30,last"
N_DENSE_UPDATES = 5  # of the engine, at most: all weights of SmolLM2 take seconds
LN2_TOLERANCE = 5e-6  # rounding of fp32 log-probabilities, times beta


def run(args: Namespace) -> dict[str, Any]:
    """Run all stages and return the results, which are also written to quickstart.json in the folder.

    Raises:
        ConfigError: device or model is not there; the folder holds other files, cannot be written, or another
            quickstart is writing to it.
        SparseOptError: a check failed.
    """
    _set_defaults(args)
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated")  # of TRL's own options
    with _folder(args.output_dir):
        results = _experiment(args)
        _write(args.output_dir, results)
    return results


def _set_defaults(args: Namespace) -> None:
    """Choose device and model, and the options that depend on them."""
    args.device = str(resolve_device(args.device))
    backends.functions(torch.device(args.device))  # raises if the selected backend cannot run
    if args.model == "auto":
        args.model = "smollm2" if smollm2.is_installed() else "tiny"
    if args.model == "smollm2":
        smollm2.require_installed()
    elif args.model != "tiny" and not Path(args.model, "config.json").is_file():
        raise ConfigError(f"--model is {args.model}, expected tiny, smollm2, or a folder with config.json")
    is_tiny = args.model == "tiny"
    args.is_fast = is_tiny or args.device == "cuda"
    args.dense_rate = TINY_RATE if is_tiny else PRETRAINED_RATE
    if args.sft_steps is None:
        args.sft_steps = 200 if is_tiny else 0
    args.dpo_steps = args.dpo_steps or (150 if args.is_fast else 8)
    args.n_questions = args.n_questions or (3000 if args.is_fast else 300)


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Lock the folder, remove the files of an earlier quickstart, and mark it as one; refuse other files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output_dir is {folder}, which is not a folder")
    is_earlier = (folder / RESULTS).is_file()
    if not is_earlier and folder.is_dir() and any(path.name not in (LOCK, LAST) for path in folder.iterdir()):
        raise ConfigError(f"--output_dir is {folder}, which holds other files: choose a new or empty folder")
    lock = RunFolder(str(folder))
    lock.begin(None, newest=False, saves=True)
    try:
        if is_earlier:
            _say(f"{folder} holds an earlier quickstart, which is replaced")
        for path in (folder / name for name in CONTENTS):
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        _write(folder, {"finished": False})
        yield
    finally:
        lock.end()


def _write(folder: Path, results: dict[str, Any]) -> None:
    write_text(folder / RESULTS, json.dumps(results, indent=2) + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # stdout is for the results


def _experiment(args: Namespace) -> dict[str, Any]:
    folder: Path = args.output_dir
    _say(f"1/5 model ({args.model}) and questions")
    rows = _make_rows(args)
    start = _make_model(args)
    _say(f"2/5 SFT, {args.sft_steps} steps: the form of an answer, right or wrong")
    if args.sft_steps:
        options = _arguments(SFTConfig, args, "start", args.sft_steps, SFT_RATE)
        _train(SFTTrainer(str(start), args=options, train_dataset=Dataset.from_list(rows["demonstrations"])))
        start = folder / "start"
    model, _ = load_checkpoint(start)
    mask = MaskSet.random(model, density=DENSITY, pattern=PATTERN, seed=args.seed, pool="global")
    if not mask.nnz:
        raise ConfigError(f"--model is {args.model}: {DENSITY:.1%} of its weights are less than a tile of 64 x 64")
    mask.save(folder / "mask.safetensors")
    with Engine(start, args.device) as engine:
        before = _accuracy(engine.call("margins", rows["held_out"]))
        every = _dense_update_steps(args)
        often = "at every step" if every == 1 else f"every {every} steps"
        _say(f"3/5 dense DPO, {args.dpo_steps} steps: which answer is right; an engine gets all weights {often}")
        dense = _dpo("dense", args, start, rows, engine, None)
        engine.call("set_weights", all_weights(model))
        _say(f"4/5 sparse DPO from the same start: {mask.density:.2%} of the weights; the engine follows every step")
        sparse = _dpo("sparse", args, start, rows, engine, mask)
    _say("5/5 checks of the weights, bit for bit")
    check_weights(folder, start)
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    return {
        "finished": True,
        **{name: getattr(args, name) for name in ("device", "model", "seed", "sft_steps", "dpo_steps")},
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if args.device == "cuda" else None,
        "n_weights": n_weights,
        "n_held_out": len(rows["held_out"]),
        "runs": {
            "dense": {"trained_weights": n_weights, "accuracy_before": before, **dense},
            "sparse": {"trained_weights": mask.nnz, "accuracy_before": before, **sparse},
        },
    }


def _make_rows(args: Namespace) -> dict[str, list[data.Row]]:
    """Write the rows to data/, and return them by the names of their files."""
    generator = random.Random(args.seed)
    pairs = data.preferences(args.n_questions, generator)
    n_held_out = args.n_questions // 6
    rows = {"held_out": pairs[:n_held_out], "preferences": pairs[n_held_out:]}
    rows["demonstrations"] = data.demonstrations(rows["preferences"], generator)
    for name, content in rows.items():
        Dataset.from_list(content).to_json(args.output_dir / "data" / f"{name}.jsonl")
    return rows


def _make_model(args: Namespace) -> Path:
    if args.model == "smollm2":
        model, tokenizer = smollm2.load()
    elif args.model == "tiny":
        tokenizer = make_tokenizer()
        model = make_model(tokenizer, HIDDEN_SIZE, N_LAYERS, args.seed)
    else:
        return Path(args.model)
    model.save_pretrained(args.output_dir / "model")
    tokenizer.save_pretrained(args.output_dir / "model")
    return args.output_dir / "model"


def _arguments(kind: Callable[..., Any], args: Namespace, name: str, steps: int, rate: float, **options: Any) -> Any:
    return kind(
        output_dir=str(args.output_dir / name),
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=32 if args.is_fast else 8,
        max_length=64,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=args.device == "cpu",
        seed=args.seed,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        **options,
    )


def _train(trainer: Any) -> None:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressLines())
    trainer.train()
    trainer.save_model()


def _dense_update_steps(args: Namespace) -> int:
    """Steps of the dense run between two updates of the engine."""
    return -(-int(args.dpo_steps) // N_DENSE_UPDATES)


class _Follow(TrainerCallback):
    """Brings the engine up to date at the last step, and every so many steps before it."""

    def __init__(self, message: Callable[[], bytes], deliver: Callable[[bytes], object], every: int) -> None:
        self._message, self._deliver, self._every = message, deliver, every
        self.nbytes: list[int] = []
        self.seconds: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (state.max_steps - state.global_step) % self._every:
            return
        began = time.perf_counter()
        message = self._message()
        self._deliver(message)
        self.seconds.append(time.perf_counter() - began)
        self.nbytes.append(len(message))


def _dpo(
    name: str, args: Namespace, start: Path, rows: dict[str, list[data.Row]], engine: Engine, mask: MaskSet | None
) -> dict[str, Any]:
    """Train all weights or those of a mask; return what the table shows of the run.

    Raises:
        SparseOptError: the first loss is not ln 2, or the engine answers otherwise than the saved model.
    """
    log = args.output_dir / f"{name}_log"
    rate = args.dense_rate * (1.0 if mask is None else SPARSE_RATE_FACTOR * rate_factor(mask.density))
    options = _arguments(DPOConfig, args, name, args.dpo_steps, rate, beta=BETA)
    pairs = Dataset.from_list(rows["preferences"])
    if mask is None:
        trainer = DPOTrainer(str(start), args=options, train_dataset=pairs)
        trainer.add_callback(DeltaLogCallback(log, LOG_STEPS))
        message = functools.partial(all_weights, trainer.model)
        follow = _Follow(message, functools.partial(engine.call, "set_weights"), _dense_update_steps(args))
    else:
        sparse = SparseArguments(delta_log_dir=log, delta_log_steps=LOG_STEPS)
        trainer = sparse_trainer(DPOTrainer)(str(start), args=options, train_dataset=pairs, mask=mask, sparse=sparse)
        trainer.create_optimizer()
        sender = WeightSender(trainer.sparse_optimizer)
        engine.call("receive", sender.mask_message().to_bytes())
        follow = _Follow(lambda: sender.update().to_bytes(), functools.partial(engine.call, "receive"), every=1)
    trainer.add_callback(follow)
    _train(trainer)
    loss = trainer.state.log_history[0]["loss"]
    if not abs(loss - math.log(2)) <= LN2_TOLERANCE:
        raise SparseOptError(f"{name} DPO: the first loss is {loss:.8f}, expected ln 2 = {math.log(2):.8f}")
    answers = engine.call("margins", rows["held_out"])
    if answers != margins(*load_checkpoint(args.output_dir / name, args.device), rows["held_out"]):
        raise SparseOptError(f"{name} DPO: the engine's probabilities of answers differ from those of the checkpoint")
    return {
        "learning_rate": rate,
        "loss_first": loss,
        "accuracy_after": _accuracy(answers),
        **_memory(trainer, mask),
        "log_step_bytes": DeltaLog.open(log).info()[-1].bytes,
        "update_bytes": round(median(follow.nbytes)),
        "update_ms": 1000 * median(follow.seconds),
    }


def _memory(trainer: Any, mask: MaskSet | None) -> dict[str, int]:
    if mask is not None:
        nbytes = trainer.sparse_optimizer.nbytes()
        state, gradient, reference = nbytes["state"] + nbytes["indices"], nbytes["grad"], nbytes["base"]
    else:
        state = sum(tensor.nbytes for entry in trainer.optimizer.state.values() for tensor in entry.values())
        gradient = sum(parameter.nbytes for parameter in trainer.model.parameters() if parameter.requires_grad)
        reference = sum(parameter.nbytes for parameter in trainer.ref_model.parameters())
    return {"optimizer_state_bytes": state, "gradient_bytes": gradient, "reference_bytes": reference}


def _accuracy(answers: Sequence[float]) -> float:
    """The share of pairs whose right answer is the more probable one."""
    return sum(margin > 0 for margin in answers) / len(answers)


def check_weights(folder: Path, start: Path) -> None:
    """Check that the delta logs lead to the saved models, and that sparse DPO changed nothing outside the mask.

    Raises:
        SparseOptError: an element differs; the message names its tensor.
    """
    mask, before = MaskSet.load(folder / "mask.safetensors"), dict(load_checkpoint(start)[0].named_parameters())
    for run in ("dense", "sparse"):
        log = DeltaLog.open(folder / f"{run}_log")
        rebuilt = log.load(log.steps[-1])
        for name, tensor in load_checkpoint(folder / run)[0].named_parameters():
            if not torch.equal(as_bits(tensor), as_bits(rebuilt[name])):
                raise SparseOptError(f"{name} of {folder / run} differs from step {log.steps[-1]} of its delta log")
            changed = (as_bits(tensor) != as_bits(before[name])).flatten()
            if name in mask:
                changed[mask[name].long()] = False
            if run == "sparse" and changed.any():
                raise SparseOptError(f"{name}: sparse DPO changed {int(changed.sum())} elements outside the mask")


def text(results: dict[str, Any]) -> str:
    """The table of the results, and what was checked."""
    runs = results["runs"].values()
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "held-out accuracy, before": ("accuracy_before", "{:.1%}".format),
        "held-out accuracy, after": ("accuracy_after", "{:.1%}".format),
        "learning rate": ("learning_rate", "{:.2g}".format),
        "weights trained": ("trained_weights", "{:,}".format),
        "optimizer state": ("optimizer_state_bytes", format_bytes),
        "gradients": ("gradient_bytes", format_bytes),
        "reference model": ("reference_bytes", format_bytes),
        "a step in the delta log": ("log_step_bytes", format_bytes),
        "an update of the engine": ("update_bytes", format_bytes),
        "  its time": ("update_ms", "{:.1f} ms".format),
    }
    rows = []
    for label, (key, show) in shown.items():
        dense, sparse = (run[key] for run in runs)
        ratio = f"{dense / sparse:.1f} x" if key.endswith("_bytes") else ""
        rows.append((label, show(dense), show(sparse), ratio))
    n_weights, gpu = results["n_weights"], results["gpu_memory_bytes"]
    lines = [
        f"DPO on {results['device']}, {results['dpo_steps']} steps; {n_weights:,} fp32 weights ({results['model']}); "
        f"accuracy on {results['n_held_out']} held-out pairs\n",
        f"{table(('', 'dense', 'sparse', 'dense / sparse'), rows)}\n",
        "checked: both first losses are ln 2; sparse DPO changed no weight outside its mask; both checkpoints are the",
        "last steps of their delta logs, bit for bit; after the last update the engine answers as the checkpoint does",
        "not shown: the time of a step, which a mask shortens in larger models on a GPU (docs/performance.md)",
    ]
    if gpu:
        extra = (run["optimizer_state_bytes"] + run["gradient_bytes"] + run["reference_bytes"] for run in runs)
        dense, sparse = (gpu / (4 + nbytes / n_weights) / 1e9 for nbytes in extra)
        lines.append(
            f"this GPU ({format_bytes(gpu)}) fits, without activations, {dense:.1f} and {sparse:.1f} billion weights"
        )
    return "\n".join(lines)
