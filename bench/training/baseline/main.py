"""A training step end to end: full fine-tuning, sparse training and adapters. Time by section, and peak memory.

`sparse-opt bench baseline dpo` and `... grpo` run each mode in a process of its own, on the same model, data, order
and seed. Mode dense is full fine-tuning with fused AdamW, adamw8bit the same with bitsandbytes' 8-bit AdamW, and galore
with GaLore's AdamW; lora, qlora and shira are peft's adapters; tiles is mode sparse under a random mask of whole tiles.
Of mixtures of experts, mode attention trains tiles of the attention matrices alone, and mode experts also some experts
of each layer. `... trl` is DPO in TRL's trainer, with its own optimizer and with SparseAdamW (modes dense, sparse and
tiles). Modes of other packages need `pip install 'sparse-opt[bench,peers]'`. By default the model has the shape of
Llama-3.2-3B and random weights, and the mask is random. A mode whose memory ran out has a lower bound of what it needs.

With --delta_log, blocks of steps without a delta log and with one of every step alternate, and the rows are what the
log adds.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch

from sparse_opt import MaskSet, backends
from sparse_opt.cli.common import add_tensor_choice
from sparse_opt.errors import ConfigError, MaskError
from sparse_opt.masks import union
from sparse_opt.masks.parameters import select_names
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.options import CommandParser

from ...harness import ALLOCATOR, Benchmark, comma_separated, not_between, one_of_each, run_in_process
from ...models import make_checkpoint, preference_pairs, without_weights, write_pairs
from ...rows import Case, Run
from ...shapes import SHAPES
from . import delta_log
from .modes import GALORE_RANK, SPARSE_MODES, Job, Mode, config_of, missing_package
from .results import first_loss_atol, result_rows, wrong_results

MODES: tuple[str, ...] = get_args(Mode)
DEFAULT_MODES = ("dense", "sparse", "lora", "shira")
TRL_MODES = ("dense", "sparse", "tiles")
TILE_PATTERNS = tuple(name for name in PATTERNS if name.startswith("tile"))
N_PAIRS = 64
_STEPS_BEFORE_REPLAYS = 4  # three ordinary ones and the capture
# Options that the cases of all modes have, and of one algorithm.
_SETTINGS = (
    *("batch_size", "sequence_length", "learning_rate", "gradient_checkpointing", "compile"),
    *("precomputed_reference", "prompt_share", "cuda_graphs", "seed", "dataset", "limit_gib"),
    *("include", "exclude", "mlp_only"),
)
_OF_GRPO = ("n_generations", "max_new_tokens")

_EPILOG = """examples:
  sparse-opt bench baseline dpo --modes dense,adamw8bit,galore,lora,qlora,sparse,tiles
  sparse-opt bench baseline dpo --modes dense,sparse,tiles             # and --batch_size 4 --sequence_length 1024
  sparse-opt bench baseline dpo --modes sparse,tiles --compile --cuda_graphs --share_prompts
  sparse-opt bench baseline dpo --share_prompts --prompt_share 0.75 --batch_size 4
  sparse-opt bench baseline grpo --n_generations 8 --max_new_tokens 128
  sparse-opt bench baseline dpo --delta_log --modes dense,sparse --n_steps 10
  sparse-opt bench baseline dpo --shape qwen3_30b_a3b --modes attention,tiles,experts --lean --gradient_checkpointing
  sparse-opt bench baseline trl --gradient_checkpointing --n_steps 6 --n_warmup 1
  sparse-opt bench baseline dpo --model_name M --dataset pairs.jsonl --batch_size 4
  sparse-opt bench baseline dpo --small --n_steps 6 --n_warmup 2       # a tiny model, on the CPU
"""


def baseline_options(parser: CommandParser) -> None:
    parser.add_argument("algorithm", choices=("dpo", "grpo", "trl"), help="of the step; trl: DPO in TRL's trainer")
    options(parser)


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--modes",
        type=comma_separated,
        help=f"of {','.join(MODES)}, in this order ({','.join(DEFAULT_MODES)}; trl: dense,sparse)",
    )
    what.add_argument("--model_name", help="hub name or local folder; default: random weights in a shape")
    what.add_argument(
        *("--shape", "--shapes"),
        dest="shapes",
        type=comma_separated,
        help=f"of random weights, of {','.join(SHAPES)} (3b, Llama-3.2-3B's)",
    )
    what.add_argument(
        "--base",
        choices=("bf16", "nf4"),
        default="bf16",
        help="the decoder layers' matrices: bf16, or NF4 with double quantization; then lora is QLoRA (%(default)s)",
    )
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--tile_pattern", choices=TILE_PATTERNS, default="tile64", help="of mode tiles (%(default)s)")
    what.add_argument("--experts", type=int, default=8, help="of each layer, in mode experts (%(default)s)")
    what.add_argument("--lean", action="store_true", help="under a mask: bf16 moments, and base weights in host memory")
    add_tensor_choice(parser.add_argument_group("tensors of the random masks"))
    what.add_argument("--lora_rank", type=int, default=16, help="of modes lora and qlora (%(default)s)")
    what.add_argument("--gradient_checkpointing", action="store_true", help="in every mode")
    what.add_argument("--precomputed_reference", action="store_true", help="dpo: before the first step, in every mode")
    what.add_argument("--share_prompts", action="store_true", help="every mode twice, also with prompts computed once")
    what.add_argument("--compile", action="store_true", help="torch.compile the model's layers, in every mode")
    what.add_argument("--cuda_graphs", action="store_true", help="dpo, modes sparse and tiles: replay steps, on a GPU")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="in every mode (%(default)s)")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", help="preference data as `train` reads it; default: random words of exact length")
    data.add_argument("--subset_size", type=int, help=f"so many examples (default: all; {N_PAIRS} of random words)")
    data.add_argument("--batch_size", type=int, default=1, help="pairs or prompts a step (%(default)s)")
    data.add_argument("--sequence_length", type=int, default=512, help="tokens, prompt and completion (%(default)s)")
    data.add_argument("--prompt_share", type=float, help="dpo: of the tokens of random words (default: an eighth)")
    data.add_argument("--n_generations", type=int, default=8, help="grpo: completions of a prompt (%(default)s)")
    data.add_argument("--max_new_tokens", type=int, default=128, help="grpo: tokens of every completion (%(default)s)")
    run = parser.add_argument_group("how")
    run.add_argument("--n_steps", type=int, default=20, help="of each mode (%(default)s)")
    run.add_argument("--n_warmup", type=int, default=5, help="steps left out of the medians (%(default)s)")
    run.add_argument("--limit_gib", type=float, help="GiB that torch's allocator may use (default: all of the GPU)")
    run.add_argument("--seed", type=int, default=0, help="of weights, mask, data and their order (%(default)s)")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")
    run.add_argument("--kernel_time", action="store_true", help="profile one more step: the GPU's time without gaps")
    run.add_argument("--delta_log", action="store_true", help="dpo: what a log of every step adds, --n_steps at a time")
    run.add_argument("--work_dir", type=Path, help="where masks, data and logs are written (default: the system's)")


def allowed_shapes(small: bool) -> list[str]:
    return [name for name in SHAPES if name.startswith("tiny") or not small]


def baseline_problem(args: Namespace) -> str:
    """The error in the arguments; empty if they are valid."""
    args.modes = args.modes or [mode for mode in DEFAULT_MODES if args.algorithm != "trl" or mode in TRL_MODES]
    if {*SPARSE_MODES}.isdisjoint(args.modes) and args.lean:
        return f"--lean is of {', '.join(SPARSE_MODES)}; --modes {','.join(args.modes)} has none of them"
    if {"sparse", "tiles"}.isdisjoint(args.modes) and (args.include or args.exclude or args.mlp_only):
        return f"--include, --exclude and --mlp_only choose for random masks; --modes {','.join(args.modes)} draws none"
    return problem(args)


def problem(args: Namespace) -> str:
    """The error in the arguments, of `scale` too; empty if they are valid."""
    device, allowed = args.device, TRL_MODES if args.algorithm == "trl" else MODES
    shortest = args.max_new_tokens + 1 if args.algorithm == "grpo" else 8
    if error := (
        one_of_each("modes", args.modes, allowed)
        or not_between(args, "n_generations", at_least=2)  # a group of one has no advantage
        or not_between(args, "sequence_length", at_least=shortest)
    ):
        return error
    if args.precomputed_reference and args.algorithm == "grpo":
        return "--precomputed_reference is of dpo: the completions of grpo are sampled in each step"
    for name in ("share_prompts", "compile", "kernel_time", "dataset", "lean", "delta_log", "limit_gib"):
        if args.algorithm == "trl" and getattr(args, name):
            return f"--{name} is not valid with trl"
    if args.cuda_graphs and args.n_warmup < _STEPS_BEFORE_REPLAYS:
        return f"--n_warmup is {args.n_warmup}, expected at least {_STEPS_BEFORE_REPLAYS} with --cuda_graphs"
    if args.cuda_graphs and not (args.algorithm == "dpo" and set(args.modes) <= {"sparse", "tiles"}):
        return "--cuda_graphs is of dpo, and needs --modes of sparse,tiles"
    if error := _prompt_problem(args):
        return error
    if args.model_name is not None and (args.small or args.shapes):
        return "--small and --shape make a model: leave out --model_name"
    args.shapes = args.shapes or ["tiny" if args.small else "3b"]
    if error := one_of_each("shapes", args.shapes, allowed_shapes(args.small)):
        return error
    if args.base == "nf4" and (args.algorithm == "trl" or not set(args.modes) <= {"lora", "sparse", "tiles"}):
        return "--base nf4 is not valid with trl, and needs --modes of lora,sparse,tiles"
    if args.delta_log:
        cause = backends.why_unavailable(torch.device(device).type, device)
        if error := one_of_each("modes", args.modes, delta_log.MODES) or (
            f"patches cannot be coded natively on {device}: {cause}" if cause else ""
        ):
            return f"--delta_log: {error}"
        if args.algorithm == "grpo" or args.cuda_graphs or args.share_prompts:
            return "--delta_log is of dpo, without --cuda_graphs and --share_prompts"
        args.output = args.output or Path(f"bench/results/delta_logging_{'cpu' if device == 'cpu' else 'gpu'}.json")
    if args.dataset is not None and args.model_name is None:
        return f"--dataset {args.dataset} needs a model that reads text: --model_name"
    file = Path(args.dataset or "")
    if file.suffix in (".json", ".jsonl", ".csv", ".parquet") and not file.exists():
        return f"--dataset {args.dataset}: no such file"
    args.shira_rank = 1 if args.small else 46  # 46 trains 2.2 % of the weights
    if args.kernel_time and device == "cpu":
        return f"--kernel_time needs a GPU, and the device is {device}"
    if "qlora" in args.modes and args.algorithm == "grpo" and device == "cpu":
        return "mode qlora of grpo needs a GPU: on a CPU bitsandbytes repacks its weights when completions are sampled"
    return missing_package([*args.modes, args.algorithm, *(["qlora"] if args.base == "nf4" else [])])


def _prompt_problem(args: Namespace) -> str:
    """Return the error in the options for prompts; empty if they are valid."""
    if args.prompt_share is None:
        return ""
    if args.algorithm == "grpo" or args.dataset is not None:
        return "--prompt_share is of dpo on random words: leave out --dataset"
    n_prompt = round(args.prompt_share * args.sequence_length)
    longest = args.sequence_length - 2  # before a word and EOS
    if not 1 <= n_prompt <= longest:
        return (
            f"--prompt_share {args.prompt_share:g} of {args.sequence_length} tokens is a prompt of {n_prompt}, "
            f"expected 1 to {longest}"
        )
    return ""


def measure(args: Namespace, run: Run) -> None:
    """Run every mode of every shape in a process of its own, so that its peaks are its own."""
    module = f"{__package__}.{'trl' if args.algorithm == 'trl' else 'run'}"
    variables = {} if args.cuda_graphs else ALLOCATOR
    for shape in args.shapes:
        where = f"{shape}: " if len(args.shapes) > 1 else ""
        with tempfile.TemporaryDirectory(prefix="sparse_opt_baseline_", dir=args.work_dir) as folder:
            jobs, common = _prepare(Path(folder), Namespace(**vars(args), shape=shape))
            results = []
            for job in jobs:
                result = run_in_process(module, where + job.name, asdict(job), Path(folder), variables)
                if result is None:
                    run.miss(f"{where}mode {job.name}, whose run failed")
                    continue
                results.append(result)
                run.add(*result_rows(result, common | _case(job, args), args.n_warmup))
                run.save()
        run.wrong += [where + line for line in wrong_results(args.algorithm, results, first_loss_atol(jobs[0]))]


def _case(job: Job, args: Namespace) -> Case:
    """What the case of a mode has."""
    case: Case = {"mode": job.mode, "share_prompts": job.share_prompts, "lean": job.lean}
    ranks = {"lora": "lora_rank", "qlora": "lora_rank", "shira": "shira_rank", "galore": "galore_rank"}
    if job.mode in ranks:
        name = ranks[job.mode]
        return case | {name: GALORE_RANK if job.mode == "galore" else getattr(args, name)}
    if job.mode in SPARSE_MODES:
        case |= {"pattern": "element" if job.mode == "sparse" else args.tile_pattern, "density": args.density}
    return case | ({"experts": args.experts} if job.mode == "experts" else {})


def _prepare(folder: Path, args: Namespace) -> tuple[list[Job], Case]:
    """Make the missing model, masks and data in the folder; return each mode's job, and what all cases have."""
    model_name = args.model_name
    config = config_of(model_name, args.shape, args.sequence_length)
    model = without_weights(config)
    masks = {mode: str(folder / f"{mode}.safetensors") for mode in args.modes if mode in SPARSE_MODES}
    for mode, path in masks.items():
        try:
            _mask(mode, model, args).save(path)
        except MaskError as error:
            raise ConfigError(str(error)) from error
    if args.algorithm == "trl" and model_name is None:  # TRL loads the model, and once more for the reference
        model_name = str(folder / "model")
        print(f"making a checkpoint in {folder}", flush=True)
        make_checkpoint(folder / "model", config, seed=args.seed, device=torch.device(args.device))
    dataset = args.dataset
    if dataset is None:
        length, n_prompt = args.sequence_length, None
        if args.algorithm == "grpo":
            n_prompt = length - args.max_new_tokens
            length = n_prompt + 2  # a rollout takes the prompts alone; as data they come with a word and EOS
        elif args.prompt_share is not None:
            n_prompt = round(args.prompt_share * length)
        dataset = str(folder / "pairs.jsonl")
        write_pairs(Path(dataset), preference_pairs(args.subset_size or N_PAIRS, length, args.seed, n_prompt))
    names = (*_SETTINGS, *(_OF_GRPO if args.algorithm == "grpo" else ()))
    case = {
        "algorithm": args.algorithm,
        "model": args.model_name or "random weights",
        "shape": None if args.model_name else args.shape,
        "numel": sum(parameter.numel() for parameter in model.parameters()),
        "base": None if args.base == "bf16" else args.base,
        **{name: getattr(args, name) for name in names},
    }
    shared = {field.name: getattr(args, field.name) for field in fields(Job) if hasattr(args, field.name)} | {
        "model_name": model_name,
        "dataset": dataset,
        "delta_log": None,
        "subset_size": args.subset_size if args.dataset is not None else None,
    }
    jobs = [Job(**(shared | {"mode": mode, "mask": masks.get(mode), "share_prompts": False})) for mode in args.modes]
    jobs = [replace(job, lean=job.lean and job.mode in SPARSE_MODES) for job in jobs]
    if args.delta_log:
        jobs = [replace(job, delta_log=str(folder / f"log_{job.mode}")) for job in jobs]
    if args.share_prompts:
        jobs = [job for separate in jobs for job in (separate, replace(separate, share_prompts=True))]
    return jobs, case


def _mask(mode: Mode, model: Any, args: Namespace) -> MaskSet:
    """The mask of a mode: random, and in mode experts the first experts of each layer too."""
    parameters = dict(model.named_parameters())
    if mode in ("sparse", "tiles"):
        names = select_names(parameters, include=args.include, exclude=args.exclude, mlp_only=args.mlp_only)
        if not names:
            raise ConfigError("no tensor of the model is chosen by include, exclude and mlp_only")
    else:
        names = [name for name, parameter in parameters.items() if ".self_attn." in name and parameter.ndim > 1]
    pattern = "element" if mode == "sparse" else args.tile_pattern
    chosen = {name: parameters[name] for name in names}
    random = MaskSet.random(chosen, density=args.density, pattern=pattern, seed=args.seed)
    if mode != "experts":
        return random
    layers = range(model.config.num_hidden_layers)
    return union([random, MaskSet.experts(model, dict.fromkeys(layers, range(args.experts)))])


main = Benchmark(
    name="baseline",
    doc=__doc__,
    epilog=_EPILOG,
    options=baseline_options,
    problem=baseline_problem,
    measure=measure,
    output="bench/results/baseline_{algorithm}.json",
    device="cuda",
).main
