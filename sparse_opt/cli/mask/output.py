"""Output of the mask commands: mask files and their descriptions."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...tables import table
from ..common import add_json_flag, format_percent, print_json

if TYPE_CHECKING:
    from ...masks.mask_set import MaskSet, MaskStats

# Copies of the names in masks.patterns, which cannot be imported without torch.
PATTERNS = ("element", "run16", "run32", "tile64", "tile128")


def add_routers(parser: ArgumentParser) -> None:
    """Add `--routers`."""
    parser.add_argument(
        "--routers", action="store_true", help="also train the routers of experts, which are frozen otherwise"
    )


def add_output_file(parser: ArgumentParser) -> None:
    """Add `--output`, a file (`require_mask_file`), and `--json`."""
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="mask file to write, .safetensors")
    add_json_flag(parser)


def output_file(output: Path, name: str) -> Path:
    """The file for --output: the path itself, or the file `name` if the path is a folder."""
    if output.suffix == ".safetensors" and not output.is_dir():
        return output
    if output.is_file():
        raise ConfigError(f"option 'output': {output} is a file that does not end in .safetensors")
    if output.suffix and not output.is_dir():
        raise ConfigError(
            f"option 'output': {output} ends in {output.suffix}: expected .safetensors (a file) or no suffix (a folder)"
        )
    return output / name


def require_mask_file(output: Path) -> None:
    """Raise ConfigError unless --output is a file that a mask can be written to."""
    if output.suffix != ".safetensors" or output.is_dir():
        found = "a folder" if output.is_dir() else output.suffix or "no suffix"
        raise ConfigError(f"option 'output': {output}: expected a file that ends in .safetensors, found {found}")


def save_mask(mask: MaskSet, path: Path, *, as_json: bool) -> None:
    """Write the mask, and print a summary."""
    mask.save(path)
    if as_json:
        print_json({"file": path, **summary(mask)})
    else:
        print(f"{path}\n{headline(mask)}")


def summary(mask: MaskSet) -> dict[str, Any]:
    """The description of a mask for JSON."""
    return {
        "nnz": mask.nnz,
        "numel": mask.numel,
        "density": mask.density,
        "pattern": mask.pattern,
        "digest": mask.digest,
        "metadata": dict(sorted(mask.metadata.items())),
    }


def headline(mask: MaskSet) -> str:
    """The description of a mask in one line of text."""
    return (
        f"{mask.nnz:,} of {mask.numel:,} elements active in {len(mask)} tensors: "
        f"density {format_percent(mask.density)}, sparsity {format_percent(mask.sparsity)}, pattern {mask.pattern}"
    )


def density_table(of: str, stats: Mapping[str, MaskStats]) -> str:
    """A table with one line per part of a mask; `of` is the header of the column of names."""
    rows = [(name, f"{f.nnz:,}", f"{f.numel:,}", format_percent(f.density)) for name, f in stats.items()]
    return table((of, "active", "elements", "density"), rows)
