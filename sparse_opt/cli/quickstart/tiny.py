"""The quickstart on a tiny model: dense DPO, a mask from its delta log, sparse DPO under the mask."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import add_options, option, require_number_ranges
from ...option_parser import CommandParser
from ...tables import format_bytes, table
from ..output import print_json
from .folder import RESULTS_FILE, is_earlier, prepare, say, write_results

if TYPE_CHECKING:
    import torch

DELTA_LOG = "delta_logs_quickstart"
# The files of a run in its folder. A rerun removes only these.
CONTENTS = ("data", "cache", "model", "sft", "dense", DELTA_LOG, "masks", "sparse", "timing", "rebuilt")
SPARSITY_PERCENT = 90.0
HIDDEN_SIZE, N_LAYERS = 128, 4  # 0.9 million weights

_EPILOG = """It writes to the folder, in this order:
  data/                   demonstrations, preference pairs and held-out pairs of a generated task (JSONL, TRL's formats)
  cache/                  the cache of `datasets`
  model/, sft/final       the model with random weights, and after SFT; both DPO runs start from the latter
  dense/, delta_logs_quickstart/   dense DPO, and the delta log of its weights
  masks/                  the mask of the 10 % of the weights that dense DPO moved most
  sparse/                 DPO under the mask
  timing/                 short runs in turns, for their step times; removed
  rebuilt/                the dense model, rebuilt from the log
  quickstart.json         the measurements

With --model the experiment is GRPO on a pretrained model, dense and under a mask of tiles. Its options:
sparse-opt quickstart --model smollm2 --help

examples:
  sparse-opt quickstart
  sparse-opt quickstart --output_dir /tmp/quickstart --seed 1 --device cuda --json
"""


@dataclass(kw_only=True)
class QuickstartOptions:
    """A whole experiment on a tiny model: SFT, dense DPO, a mask, sparse DPO, and dense DPO rebuilt bit for bit."""

    output_dir: Path = option(
        Path("quickstart"), "new or empty folder, or that of an earlier quickstart, whose files are deleted"
    )
    seed: int = option(0, "random seed")
    device: str = option("auto", "torch device; auto is cuda if there is one, else cpu")
    sft_steps: int = option(200, "steps of SFT", at_least=1, at_most=10**6)
    dpo_steps: int = option(100, "steps of each DPO run", at_least=1, at_most=10**6)
    n_questions: int = option(3000, "questions; one in six is held out", at_least=12, at_most=4005)
    json: bool = option(False, "print JSON on stdout instead of text")

    def __post_init__(self) -> None:
        require_number_ranges(self)


def run(argv: Sequence[str]) -> int:
    """Run the experiment, check it, and print its table or JSON."""
    options = QuickstartOptions(**vars(parser().parse_words(argv)))
    results = experiment(options)
    if options.json:
        print_json(results)
    else:
        print(_text(results))
    return 0


def parser() -> CommandParser:
    """The options of the command."""
    made = add_options(CommandParser(prog="sparse-opt quickstart"), QuickstartOptions)
    made.epilog = _EPILOG
    return made


def experiment(args: QuickstartOptions) -> dict[str, Any]:
    """Run all stages in order and return the results, which are also written to quickstart.json in the folder.

    Raises:
        ConfigError: the folder holds other files or cannot be created, or another quickstart is writing to it.
        SparseOptError: a check failed: the first loss of a DPO run is not ln 2, the sparse run changed a weight outside
            its mask, or the rebuilt model differs from the dense one.
    """
    from sparse_opt.trainers.policy.models import resolve_device
    from sparse_opt.trainers.run.lock import RunLock

    from ... import backends

    device = resolve_device(args.device)
    backends.functions(device)  # raises if a backend cannot run, before anything is written
    is_earlier(args.output_dir)
    with RunLock(args.output_dir):
        return _experiment(args, device)


def _experiment(args: QuickstartOptions, device: torch.device) -> dict[str, Any]:
    import datasets

    from sparse_opt.trainers import dpo, sft

    from ...delta.log import DeltaLog
    from ...mask_finding.find import find_from_log, mask_file_name
    from ...progress import hide_progress_bars
    from ..delta import reconstruct
    from . import checks
    from .timing import step_times

    folder: Path = args.output_dir
    prepare(folder, CONTENTS)
    hide_progress_bars(always=True)
    # Write nothing to the user's home directory.
    datasets.config.HF_DATASETS_CACHE = folder / "cache"

    say("1/7 model, tokenizer and questions")
    n_held_out = _make_inputs(folder, args.n_questions, args.seed)
    shared: dict[str, Any] = {
        "device": str(device),
        "dtype": "fp32",
        "seed": args.seed,
        "max_length": 64,
        "batch_size": 32,
    }

    say("2/7 SFT: the form of an answer, right or wrong")
    start = sft.train(
        sft.SFTConfig(
            policy_name=str(folder / "model"),
            dataset=str(folder / "data" / "demonstrations.jsonl"),
            output_dir=folder / "sft",
            n_steps=args.sft_steps,
            learning_rate=1e-3,
            **shared,
        )
    )
    dpo_options: dict[str, Any] = {
        "policy_name": start["checkpoint"],
        "dataset": str(folder / "data" / "preferences.jsonl"),
        "n_steps": args.dpo_steps,
        "learning_rate": 3e-4,
        **shared,
    }

    say("3/7 dense DPO: which answer is right; with a delta log of the weights")
    dense = dpo.train(
        dpo.DPOConfig(
            output_dir=folder / "dense",
            delta_log_dir=folder / DELTA_LOG,
            delta_log_steps=f"every:{max(1, args.dpo_steps // 5)},last",
            **dpo_options,
        )
    )

    say(f"4/7 mask: the {100 - SPARSITY_PERCENT:g} % of the weights that moved most")
    log = DeltaLog.open(folder / DELTA_LOG)
    mask = find_from_log(log, sparsity=SPARSITY_PERCENT).mask
    mask_file = mask.save(folder / "masks" / mask_file_name(SPARSITY_PERCENT, "magnitude", log.steps[-1]))

    say("5/7 sparse DPO from the same start")
    sparse_options = {**dpo_options, "mask": mask_file}
    sparse = dpo.train(dpo.DPOConfig(output_dir=folder / "sparse", **sparse_options))

    say("6/7 step times, dense and sparse in turns")
    times = step_times(folder / "timing", {"dense": dpo_options, "sparse": sparse_options})

    say("7/7 checks, and the held-out questions")
    checks.first_loss_is_ln2(dense)
    checks.first_loss_is_ln2(sparse)
    summaries = {"start": start, "dense": dense, "sparse": sparse}
    ends = {name: Path(summary["checkpoint"]) for name, summary in summaries.items()}
    checks.changed_inside_only(mask, ends["start"], ends["sparse"])
    reconstruct(folder / DELTA_LOG, log.steps[-1], str(ends["start"]), folder / "rebuilt")
    n_weights = checks.same_bits(folder / "rebuilt", ends["dense"])
    held_out = folder / "data" / "held_out.jsonl"
    accuracy = {name: checks.preference_accuracy(checkpoint, held_out, device) for name, checkpoint in ends.items()}

    runs = {
        name: _statistics(summary, n_weights)
        | times[name]
        | {
            "accuracy_before": accuracy["start"],
            "accuracy_after": accuracy[name],
            "trained_weights": n_weights if name == "dense" else mask.nnz,
            "changed_weights": checks.n_changed(ends["start"], ends[name]),
        }
        for name, summary in (("dense", dense), ("sparse", sparse))
    }
    results = {
        "finished": True,
        "device": str(device),
        "seed": args.seed,
        "sft_steps": args.sft_steps,
        "dpo_steps": args.dpo_steps,
        "n_weights": n_weights,
        "n_held_out": n_held_out,
        "sparsity_percent": SPARSITY_PERCENT,
        "rebuilt": {"step": log.steps[-1], "elements_compared": n_weights, "elements_different": 0},
        "runs": runs,
        "files": {
            "dense": str(ends["dense"]),
            "sparse": str(ends["sparse"]),
            "mask": str(mask_file),
            "delta_log": str(folder / DELTA_LOG),
            "rebuilt": str(folder / "rebuilt"),
            "results": str(folder / RESULTS_FILE),
        },
    }
    write_results(folder, results)
    return results


def _make_inputs(folder: Path, n_questions: int, seed: int) -> int:
    """Write data/ and model/; return the number of held-out questions."""
    from sparse_opt.trainers.arithmetic import make_model, make_tokenizer
    from sparse_opt.trainers.run.outputs import save_checkpoint, write_text

    from . import data

    generator = random.Random(seed)
    rows = data.preferences(n_questions, generator)
    n_held_out = n_questions // 6
    held_out, training = rows[:n_held_out], rows[n_held_out:]
    (folder / "data").mkdir()
    for name, content in (
        ("demonstrations", data.demonstrations(training, generator)),
        ("preferences", training),
        ("held_out", held_out),
    ):
        write_text(folder / "data" / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in content))
    tokenizer = make_tokenizer()
    save_checkpoint(make_model(tokenizer, HIDDEN_SIZE, N_LAYERS, seed), tokenizer, folder / "model")
    return n_held_out


def _statistics(summary: dict[str, Any], n_weights: int) -> dict[str, Any]:
    """The statistics of a run for the table."""
    nbytes = summary["optimizer_bytes"]
    return {
        "loss_first": summary["first"]["loss"],
        "optimizer_state_bytes": nbytes["state"] + nbytes["master"] + nbytes["indices"],
        "gradient_bytes": nbytes["grad"],
        # The dense run keeps a second model of fp32 weights, the sparse one the initial values of its active elements.
        "reference_bytes": 4 * n_weights if summary["mode"] == "dense" else nbytes["base"],
    }


def _text(results: dict[str, Any]) -> str:
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "preference accuracy, before": ("accuracy_before", "{:.1%}".format),
        "preference accuracy, after": ("accuracy_after", "{:.1%}".format),
        "step time (in turns)": ("step_time_s", _milliseconds),
        "  optimizer": ("optimizer_time_s", _milliseconds),
        "optimizer state, with indices": ("optimizer_state_bytes", format_bytes),
        "gradients": ("gradient_bytes", format_bytes),
        "reference weights": ("reference_bytes", format_bytes),
        "weights trained": ("trained_weights", "{:,}".format),
        "weights changed": ("changed_weights", "{:,}".format),
    }
    rows = []
    for label, (key, show) in shown.items():
        dense, sparse = (results["runs"][mode][key] for mode in ("dense", "sparse"))
        ratio = f"{dense / sparse:.1f} x" if key.endswith(("_bytes", "_time_s")) and sparse else ""
        rows.append((label, show(dense), show(sparse), ratio))
    rebuilt = results["rebuilt"]
    files = "\n".join(f"  {name:<11}{path}" for name, path in results["files"].items())
    return (
        f"DPO on {results['device']}, {results['dpo_steps']} steps; a model of {results['n_weights']:,} fp32 weights; "
        f"accuracy on {results['n_held_out']} held-out pairs\n\n"
        f"{table(('', 'dense', 'sparse', 'dense / sparse'), rows)}\n\n"
        "a step is mostly forward and backward passes, which a model of this size does in full under any mask; the\n"
        "optimizer, memory and the reference are what a mask saves, and what grows with the model\n\n"
        "checked: both first losses are ln 2; sparse DPO changed no weight outside the mask; the weights of step "
        f"{rebuilt['step']},\nrebuilt from the delta log, are the dense checkpoint's, bit for bit\n\n"
        f"files:\n{files}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
