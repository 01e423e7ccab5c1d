"""`sparse-opt mask find|random|info`: find a mask in a delta log, draw one at random, describe one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .output import format_percent, print_json, table
from .parser import CommandParser, add_json_flag, add_tensor_choice

if TYPE_CHECKING:
    from ..masks import MaskFigures, MaskSet

_EPILOG = """examples:
  sparse-opt mask find --delta_log_dir delta_logs_M --sparsity_percent 90 --output masks/
  sparse-opt mask random --model_name M --density 0.1 --seed 1 --output masks/
  sparse-opt mask info masks/sparsity_90.0pct_magnitude_step100.safetensors
"""
_FIND_EPILOG = """methods:
  magnitude  abs(W_t - W_0), in fp32, of the target step's weights W_t and the first logged ones W_0

--output is a file that ends in .safetensors, or a folder, where the file is named after sparsity, method and step.

examples:
  sparse-opt mask find --delta_log_dir delta_logs_M --sparsity_percent 97.5 --target_step 50 --output masks/
  sparse-opt mask find --delta_log_dir delta_logs_M --mlp_only --pool tensor --output mlp.safetensors
  sparse-opt mask find --delta_log_dir delta_logs_M --exclude '*embed*' '*norm*' --output masks/
"""
_RANDOM_EPILOG = """Only the model's configuration is read, no weights. The same seed gives the same mask on every
machine.

--output is a file that ends in .safetensors, or a folder, where the file is named after sparsity and seed.

examples:
  sparse-opt mask random --model_name M --density 0.025 --output masks/
  sparse-opt mask random --model_name M --density 0.1 --pattern run32 --seed 7 --output run32.safetensors
"""
_INFO_EPILOG = """examples:
  sparse-opt mask info masks/sparsity_90.0pct_magnitude_step100.safetensors
  sparse-opt mask info masks.pt --per_tensor
"""
# Those of mask_patterns, which cannot be imported without torch.
PATTERNS = ("element", "run16", "run32", "tile64", "tile128")


def run(argv: Sequence[str]) -> int:
    """Run one of the actions."""
    actions: dict[str, Callable[[Namespace], None]] = {"find": _find, "random": _random, "info": _info}
    args = _parser().parse_words(argv)
    actions[args.action](args)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sparse-opt mask", description="Masks: which elements of a model's weights may change.", epilog=_EPILOG
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{find,random,info}")

    find = actions.add_parser("find", help="find one in a delta log", epilog=_FIND_EPILOG)
    find.add_argument("--delta_log_dir", type=Path, required=True, metavar="DIR", help="delta log of a dense run")
    find.add_argument("--method", choices=("magnitude",), default="magnitude", help="score (%(default)s)")
    find.add_argument(
        "--sparsity_percent",
        type=float,
        default=90.0,
        metavar="P",
        help="percent of elements to leave out (%(default)s)",
    )
    find.add_argument("--target_step", type=int, metavar="N", help="logged step to score (the last)")
    find.add_argument(
        "--min_tensor_keep",
        type=float,
        default=0.0025,
        metavar="SHARE",
        help="keep at least this share of every tensor (%(default)s)",
    )
    find.add_argument(
        "--pool",
        choices=("global", "tensor"),
        default="global",
        help="whether elements compete over all tensors or each tensor gets its own share (%(default)s)",
    )
    add_tensor_choice(find)
    _add_output(find)

    random = actions.add_parser("random", help="draw one at random", epilog=_RANDOM_EPILOG)
    random.add_argument("--model_name", required=True, metavar="M", help="hub name or local folder")
    random.add_argument("--density", type=float, required=True, metavar="D", help="share of active elements, 0 to 1")
    random.add_argument("--pattern", choices=PATTERNS, default="element", help="unit that is drawn (%(default)s)")
    random.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    add_tensor_choice(random)
    _add_output(random)

    info = actions.add_parser("info", help="describe one", epilog=_INFO_EPILOG)
    info.add_argument("file", type=Path, metavar="FILE", help="mask file, .safetensors or .pt")
    info.add_argument("--per_tensor", action="store_true", help="list every tensor, not only every layer")
    add_json_flag(info)
    return parser


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help=".safetensors file, or folder")
    add_json_flag(parser)


def _find(args: Namespace) -> None:
    from ..delta_log import DeltaLog
    from ..mask_finding import find_magnitude, mask_file_name

    if not 0.0 < args.sparsity_percent < 100.0:
        raise ConfigError(f"option 'sparsity_percent' is {args.sparsity_percent}: wanted more than 0 and less than 100")
    if not 0.0 <= args.min_tensor_keep <= 1.0:
        raise ConfigError(f"option 'min_tensor_keep' is {args.min_tensor_keep}: wanted 0 to 1")
    log = DeltaLog.open(args.delta_log_dir)
    step = log.steps[-1] if args.target_step is None else args.target_step
    path = _output_file(args.output, mask_file_name(args.sparsity_percent, args.method, step))
    mask = find_magnitude(
        log,
        sparsity=args.sparsity_percent,
        target_step=step,
        min_tensor_keep=args.min_tensor_keep,
        pool=args.pool,
        include=args.include,
        exclude=args.exclude,
        mlp_only=args.mlp_only,
    )
    _save(mask, path, args.json)


def _random(args: Namespace) -> None:
    from ..mask_finding import select_names
    from ..masks import MaskSet
    from .models import parameter_shapes
    from .progress import hide_progress_bars

    if not 0.0 < args.density <= 1.0:
        raise ConfigError(f"option 'density' is {args.density}: wanted more than 0, at most 1")
    sparsity = round(100 * (1 - args.density), 8)
    path = _output_file(args.output, f"sparsity_{sparsity}pct_random_seed{args.seed}.safetensors")
    hide_progress_bars()
    shapes = parameter_shapes(args.model_name)
    names = select_names(shapes, include=args.include, exclude=args.exclude, mlp_only=args.mlp_only)
    if not names:
        raise ConfigError(f"no tensor of {args.model_name} is chosen by include, exclude and mlp_only")
    mask = MaskSet.random(
        {name: shapes[name] for name in names}, density=args.density, pattern=args.pattern, seed=args.seed
    )
    mask.metadata["model"] = args.model_name
    _save(mask, path, args.json)


def _output_file(output: Path, name: str) -> Path:
    """The file that --output means: itself, or one of this name in it."""
    if output.suffix == ".safetensors" and not output.is_dir():
        return output
    if output.is_file():
        raise ConfigError(f"option 'output': {output} is a file that does not end in .safetensors")
    if output.suffix and not output.is_dir():
        raise ConfigError(
            f"option 'output': {output} ends in {output.suffix}: wanted .safetensors for a file, no suffix for a folder"
        )
    return output / name


def _save(mask: MaskSet, path: Path, as_json: bool) -> None:
    mask.save(path)
    if as_json:
        print_json({"file": path, **_summary(mask)})
    else:
        print(f"{path}\n{_headline(mask)}")


def _info(args: Namespace) -> None:
    from ..masks import MaskSet

    mask = MaskSet.load(args.file)
    layers = {"other" if layer is None else str(layer): figures for layer, figures in mask.per_layer().items()}
    if args.json:
        figures_of = {"layers": layers, "tensors": mask.per_tensor()}
        print_json(
            {"file": args.file, **_summary(mask)}
            | {key: {name: _figures(f) for name, f in figures.items()} for key, figures in figures_of.items()}
        )
        return
    lines = [str(args.file), _headline(mask), f"digest {mask.digest}"]
    lines += [f"{key} {value}" for key, value in mask.metadata.items()]
    lines += ["", _density_table("layer", layers)]
    if args.per_tensor:
        lines += ["", _density_table("tensor", mask.per_tensor())]
    print("\n".join(lines))


def _summary(mask: MaskSet) -> dict[str, Any]:
    return {
        "nnz": mask.nnz,
        "numel": mask.numel,
        "density": mask.density,
        "pattern": mask.pattern,
        "digest": mask.digest,
        "metadata": mask.metadata,
    }


def _figures(figures: MaskFigures) -> dict[str, Any]:
    return {"nnz": figures.nnz, "numel": figures.numel, "density": figures.density}


def _headline(mask: MaskSet) -> str:
    return (
        f"{mask.nnz:,} of {mask.numel:,} elements active in {len(mask)} tensors: "
        f"density {format_percent(mask.density)}, sparsity {format_percent(mask.sparsity)}, pattern {mask.pattern}"
    )


def _density_table(of: str, figures: Mapping[str, MaskFigures]) -> str:
    rows = [(name, f"{f.nnz:,}", f"{f.numel:,}", format_percent(f.density)) for name, f in figures.items()]
    return table((of, "active", "elements", "density"), rows)
