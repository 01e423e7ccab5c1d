"""Arguments that several commands share; `CommandParser` is the parser of all of them."""

from __future__ import annotations

import argparse

from ..options import CommandParser as CommandParser


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which all commands that produce data share."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout instead of text")


def add_tensor_choice(parser: argparse._ActionsContainer) -> None:
    """Add `--include`, `--exclude` and `--mlp_only`, the arguments of `masks.parameters.select_names`."""
    for flag, text in (
        ("--include", "only tensors whose name matches one of these"),
        ("--exclude", "no tensors that match one of these"),
    ):
        parser.add_argument(flag, nargs="+", action="extend", metavar="PATTERN", help=f"{text}, such as '*.layers.3.*'")
    parser.add_argument("--mlp_only", action="store_true", help="only weights of feed-forward blocks")
