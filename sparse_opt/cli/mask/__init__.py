"""`sparse-opt mask ACTION`: find a mask, draw one at random, describe, compare, combine and convert them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from ...errors import ConfigError
from ..parser import CommandParser, add_tensor_choice
from . import algebra as mask_algebra
from . import compare as mask_compare
from . import find as mask_find
from . import info as mask_info
from .output import PATTERNS, add_output, output_file, save_mask

_EPILOG = """examples:
  sparse-opt mask find --delta_log_dir delta_logs_M --sparsity_percent 90 --output masks/
  sparse-opt mask random --model_name M --density 0.1 --seed 1 --output masks/
  sparse-opt mask info masks/sparsity_90.0pct_magnitude_step100.safetensors --png density.png
  sparse-opt mask compare masks/*.safetensors --png overlap.png --csv overlap.csv
  sparse-opt mask intersect masks/A.safetensors masks/B.safetensors --output masks/both.safetensors
  sparse-opt mask convert masks.pt --output masks.safetensors

'sparse-opt mask ACTION --help' explains an action.
"""
_RANDOM_EPILOG = """Only the model's configuration is read, no weights. The same seed gives the same mask on every
machine.

--output is a file that ends in .safetensors, or a folder, where the file is named after sparsity and seed.

examples:
  sparse-opt mask random --model_name M --density 0.025 --output masks/
  sparse-opt mask random --model_name M --density 0.1 --pattern run32 --seed 7 --output run32.safetensors
"""


def run(argv: Sequence[str]) -> int:
    """Run one of the actions."""
    actions: dict[str, Callable[[Namespace], None]] = {
        "find": mask_find.run,
        "random": _random,
        "info": mask_info.run,
        "compare": mask_compare.run,
        **mask_algebra.RUNS,
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
    add_tensor_choice(random)
    add_output(random)
    mask_info.add_parser(actions)
    mask_compare.add_parser(actions)
    mask_algebra.add_parsers(actions)
    return parser


def _random(args: Namespace) -> None:
    from ...masks.mask_set import MaskSet
    from ...progress import hide_progress_bars
    from .from_model import chosen_shapes

    if not 0.0 < args.density <= 1.0:
        raise ConfigError(f"option 'density' is {args.density}: expected more than 0, at most 1")
    sparsity = round(100 * (1 - args.density), 8)
    path = output_file(args.output, f"sparsity_{sparsity}pct_random_seed{args.seed}.safetensors")
    hide_progress_bars()
    mask = MaskSet.random(chosen_shapes(args), density=args.density, pattern=args.pattern, seed=args.seed)
    mask.metadata["model"] = args.model_name
    save_mask(mask, path, as_json=args.json)
