"""`sparse-opt quickstart`: an experiment from start to end, on a tiny model or, with `--model`, a pretrained one."""

from __future__ import annotations

from collections.abc import Sequence

from ...option_parser import CommandParser
from . import tiny


def run(argv: Sequence[str]) -> int:
    """Run the experiment that the words select, check it, and print its table or JSON."""
    if any(word == "--model" or word.startswith(("--model=", "model=")) for word in argv):
        from . import pretrained

        return pretrained.run(argv)
    return tiny.run(argv)


def _parser() -> CommandParser:
    return tiny.parser()
