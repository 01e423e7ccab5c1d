"""`sparse-opt quickstart`: an experiment from start to end, on a tiny model or, with `--model`, a pretrained one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ...option_parser import CommandParser
from . import tiny


def run(argv: Sequence[str]) -> int:
    """Run the experiment that the words select, check it, and print its table or JSON."""
    # OpenMP reads it when torch is loaded. A step of a small model has many short parallel regions, and threads
    # that spin between them take the cores from the others on a busy machine (docs/notebook.md, "A busy machine").
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if any(word == "--model" or word.startswith(("--model=", "model=")) for word in argv):
        from . import pretrained

        return pretrained.run(argv)
    return tiny.run(argv)


def _parser() -> CommandParser:
    return tiny.parser()
