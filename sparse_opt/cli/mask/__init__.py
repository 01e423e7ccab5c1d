"""`sparse-opt mask ACTION`: find a mask, draw one at random, describe, compare, combine and convert them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, listed
from ...options import CommandParser
from ...tables import table
from ..common import add_json_flag, add_tensor_choice, print_json
from . import compare as mask_compare
from . import find as mask_find
from .output import (
    PATTERNS,
    add_output_file,
    add_routers,
    density_table,
    headline,
    output_file,
    require_mask_file,
    save_mask,
    summary,
)

if TYPE_CHECKING:
    from ...masks.mask_set import MaskStats

_EPILOG = """examples:
  sparse-opt mask find --delta_log_dir delta_logs_M --sparsity_percent 90 --output masks/
  sparse-opt mask random --model_name M --density 0.1 --seed 1 --output masks/
  sparse-opt mask compare masks/*.safetensors --png overlap.png --csv overlap.csv

'sparse-opt mask ACTION --help' explains an action.
"""
_RANDOM_EPILOG = """Only the model's configuration is read, no weights. The same seed gives the same mask on every
machine.

--output is a file that ends in .safetensors, or a folder, where the file is named after sparsity and seed.

examples:
  sparse-opt mask random --model_name M --density 0.025 --output masks/
  sparse-opt mask random --model_name M --density 0.1 --pattern run32 --seed 7 --output run32.safetensors
"""
_INFO_EPILOG = """Prints the density by part of the model (attention q, k, v, o, MLP gate, up, down, embeddings, norms,
lm_head) and by layer; the part 'other' has parameters of no known part, the layer 'none' those outside of layers.
--png draws a heat map of layers by parts, --experts_png one of layers by experts.

examples:
  sparse-opt mask info masks.pt --per_tensor
  sparse-opt mask info masks.safetensors --png density.png --json
"""
_CONVERT_EPILOG = """A .pt, .pth or .bin file contains a dictionary of bool tensors, plain or under the key 'masks'. It
is read with weights_only=True.

examples:
  sparse-opt mask convert masks.pt --output masks.safetensors
"""
_INVERT_EPILOG = """Swaps active and inactive elements in the tensors that the mask lists. The result takes 4 bytes per
active element.

examples:
  sparse-opt mask invert mask.safetensors --output inverted.safetensors
"""
_UNION_EPILOG = """Elements active in any of the masks. The result lists every tensor that one of them lists.

examples:
  sparse-opt mask union seed0.safetensors seed1.safetensors seed2.safetensors --output any.safetensors
"""
_INTERSECT_EPILOG = """Elements active in all of the masks. The result lists the tensors that all of them list.

examples:
  sparse-opt mask intersect seed0.safetensors seed1.safetensors --output both.safetensors
"""


def run(argv: Sequence[str]) -> int:
    """Run one of the actions."""
    actions: dict[str, Callable[[Namespace], None]] = {
        "find": mask_find.run,
        "random": _random,
        "info": _info,
        "compare": mask_compare.run,
        "convert": _convert,
        "invert": _invert,
        "union": _combine,
        "intersect": _combine,
    }
    args = _parser().parse_words(argv)
    actions[args.action](args)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sparse-opt mask",
        description="Work with masks, which say which elements of a model's weights may change.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    mask_find.add_parser(actions)
    random = actions.add_parser("random", help="draw a mask at random", epilog=_RANDOM_EPILOG)
    random.add_argument("--model_name", required=True, metavar="M", help="hub name or local folder")
    random.add_argument("--density", type=float, required=True, metavar="D", help="share of active elements, 0 to 1")
    random.add_argument("--pattern", choices=PATTERNS, default="element", help="unit to draw (%(default)s)")
    random.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    random.add_argument(
        "--pool",
        choices=("tensor", "global"),
        default="tensor",
        help="whether each tensor gets its own share, or units are drawn from all tensors together (%(default)s)",
    )
    add_tensor_choice(random)
    add_routers(random)
    random.add_argument("--output", type=Path, required=True, metavar="PATH", help=".safetensors file, or folder")
    add_json_flag(random)

    info = actions.add_parser("info", help="describe a mask", epilog=_INFO_EPILOG)
    _add_file(info)
    info.add_argument("--per_tensor", action="store_true", help="list every tensor, not only every part and layer")
    info.add_argument("--png", type=Path, metavar="FILE", help="write a heat map of the density by layer and part")
    info.add_argument("--experts_png", type=Path, metavar="FILE", help="write a heat map by layer and expert")
    add_json_flag(info)

    mask_compare.add_parser(actions)

    convert = actions.add_parser("convert", help="convert a .pt dictionary of bool tensors", epilog=_CONVERT_EPILOG)
    _add_file(convert)
    add_output_file(convert)

    invert = actions.add_parser("invert", help="swap active and inactive elements", epilog=_INVERT_EPILOG)
    _add_file(invert)
    add_output_file(invert)
    for name, text, epilog in (
        ("union", "elements active in any of several masks", _UNION_EPILOG),
        ("intersect", "elements active in all of several masks", _INTERSECT_EPILOG),
    ):
        several = actions.add_parser(name, help=text, epilog=epilog)
        several.add_argument("files", type=Path, nargs="+", metavar="FILE", help="two or more mask files")
        add_output_file(several)
    return parser


def _add_file(parser: Any) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="mask file, .safetensors or .pt")


def _random(args: Namespace) -> None:
    from ...masks.mask_set import MaskSet
    from ...progress import hide_progress_bars
    from .from_model import chosen_shapes

    if not 0.0 < args.density <= 1.0:
        raise ConfigError(f"option 'density' is {args.density}: expected more than 0, at most 1")
    sparsity = round(100 * (1 - args.density), 8)
    path = output_file(args.output, f"sparsity_{sparsity}pct_random_seed{args.seed}.safetensors")
    hide_progress_bars()
    mask = MaskSet.random(
        chosen_shapes(args),
        density=args.density,
        pattern=args.pattern,
        seed=args.seed,
        pool=args.pool,
        routers=True,  # where they are not chosen, they are not among the shapes
    )
    mask.metadata["model"] = args.model_name
    save_mask(mask, path, as_json=args.json)


def _info(args: Namespace) -> None:
    from ...analysis import plots
    from ...masks.mask_set import MaskSet
    from ...masks.parameters import PART_LABELS, layer_label

    for option in ("png", "experts_png"):
        if getattr(args, option) is not None:
            plots.require_matplotlib(option)
    mask = MaskSet.load(args.file)
    experts = mask.per_expert()
    if args.experts_png is not None and not experts:
        raise ConfigError(f"option 'experts_png': {args.file} lists no tensor of experts")
    layers = {layer_label(layer): stats for layer, stats in mask.per_layer().items()}
    parts = mask.per_part()
    if args.png is not None:
        plots.save_png(plots.mask_figure(mask, args.file.name), args.png)
    if args.experts_png is not None:
        shares = {expert: stats.density for expert, stats in experts.items()}
        plots.save_png(plots.expert_figure(shares, args.file.name, "density, % of elements"), args.experts_png)
    if args.json:
        stats_by: dict[str, dict[Any, Any]] = {"layers": layers, "parts": dict(parts), "tensors": mask.per_tensor()}
        if experts:
            stats_by["experts"] = {f"{layer_label(layer)}.{e}": stats for (layer, e), stats in experts.items()}
        groups = {
            key: {name: {"nnz": of.nnz, "numel": of.numel, "density": of.density} for name, of in group.items()}
            for key, group in stats_by.items()
        }
        print_json({"file": args.file, **summary(mask), **groups})
        return
    lines = [str(args.file), headline(mask), f"digest {mask.digest}"]
    lines += [f"{key} {value}" for key, value in sorted(mask.metadata.items())]
    lines += ["", density_table("part", {PART_LABELS[part]: stats for part, stats in parts.items()})]
    lines += ["", density_table("layer", layers)]
    if experts:
        lines += ["", _expert_table(experts)]
    if args.per_tensor:
        lines += ["", density_table("tensor", mask.per_tensor())]
    lines += [f"picture {path}" for path in (args.png, args.experts_png) if path is not None]
    print("\n".join(lines))


def _expert_table(experts: Mapping[tuple[int | None, int], MaskStats]) -> str:
    """A line for each layer: how many of its experts have active elements, and the numbers of the densest."""
    from ...masks.parameters import layer_label

    layers: dict[int | None, dict[int, float]] = {}
    for (layer, number), stats in experts.items():
        layers.setdefault(layer, {})[number] = stats.density
    rows = []
    for layer, densities in layers.items():
        active = sorted((e for e, density in densities.items() if density), key=lambda e: -densities[e])
        numbers = listed([*map(str, active)], most=12)
        rows.append((layer_label(layer), f"{len(active)} of {len(densities)}", numbers))
    return table(("layer", "active experts", "densest first"), rows, n_last_words=1)


def _convert(args: Namespace) -> None:
    from ...masks.mask_set import MaskSet

    require_mask_file(args.output)
    save_mask(MaskSet.load(args.file), args.output, as_json=args.json)


def _invert(args: Namespace) -> None:
    from ...masks import algebra as mask_algebra
    from ...masks.mask_set import MaskSet

    require_mask_file(args.output)
    save_mask(mask_algebra.invert(MaskSet.load(args.file)), args.output, as_json=args.json)


def _combine(args: Namespace) -> None:
    from ...masks import algebra as mask_algebra
    from ...masks.mask_set import MaskSet

    require_mask_file(args.output)
    if len(args.files) < 2:
        raise ConfigError(f"found one mask file, {args.files[0]}: expected two or more")
    masks = [MaskSet.load(file) for file in args.files]
    combine = mask_algebra.union if args.action == "union" else mask_algebra.intersect
    save_mask(combine(masks), args.output, as_json=args.json)
