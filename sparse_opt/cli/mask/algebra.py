"""`sparse-opt mask convert|invert|union|intersect`: make masks from other masks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .output import add_output_file, require_mask_file, save_mask

_CONVERT_EPILOG = """The suffixes select the formats: .safetensors contains the positions of active elements; .pt, .pth
and .bin contain a dictionary of bool tensors, one byte per element, as other tools read and write it. Such a file is
read plain or under the key 'masks', with weights_only=True. It is written with the keys 'masks' and 'metadata', or
plain with --plain.

examples:
  sparse-opt mask convert masks.pt --output masks.safetensors
  sparse-opt mask convert masks.safetensors --output masks.pt --plain
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


def add_parsers(actions: Any) -> None:
    """Add the actions to those of `sparse-opt mask`."""
    convert = actions.add_parser(
        "convert", help="convert to and from .pt dictionaries of bool tensors", epilog=_CONVERT_EPILOG
    )
    _add_file(convert)
    add_output_file(convert)
    convert.add_argument("--plain", action="store_true", help="write .pt without the key 'masks' and without metadata")

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


def _add_file(parser: Any) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="mask file, .safetensors or .pt")


def _convert(args: Namespace) -> None:
    from ...masks.mask_set import MaskSet

    require_mask_file(args.output)
    if args.plain and args.output.suffix == ".safetensors":
        raise ConfigError(f"option 'plain' is for .pt files, but option 'output' is {args.output}")
    save_mask(MaskSet.load(args.file), args.output, as_json=args.json, plain=args.plain)


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


RUNS: dict[str, Callable[[Namespace], None]] = {
    "convert": _convert,
    "invert": _invert,
    "union": _combine,
    "intersect": _combine,
}
