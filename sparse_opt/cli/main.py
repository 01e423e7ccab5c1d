"""`sparse-opt COMMAND ...`: run a command and turn errors into one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted.

A command is a module or package in this folder with `run(argv) -> int`. It is imported only when it is called, and
imports torch inside `run`, so that `--help` is fast.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..errors import ConfigError, SparseOptError
from ..options import nearest
from .common import is_out_of_memory

COMMANDS = {
    "quickstart": "dense and sparse DPO of a small model side by side, in minutes: score, memory, bytes that are sent",
    "train": "train a model: sft, dpo and grpo by TRL, all weights or a mask's; recipes ppo, rlt, rft, minimal_dpo",
    "mask": "find masks, or draw them at random; describe, compare, combine and convert them",
    "delta": "work with the steps of a delta log; share what training changed as a delta, and apply it",
    "analyze": "measure what training changed: sparsity, coverage, ranks, in tables, plots and one page",
    "bench": "run a benchmark",
    "build": "compile the native collection of gradients, whose source a wheel has, for the installed torch",
    "doctor": "show what is installed, which backends can run, and why the others cannot",
}

# Optional packages, and how to install them.
_INSTALL = {
    "torch": "pip install torch",
    "triton": "pip install triton",
    "setuptools": "pip install setuptools",
    "transformers": "pip install 'sparse-opt[train]'",
    "datasets": "pip install 'sparse-opt[train]'",
    "jinja2": "pip install jinja2",
    "trl": "pip install 'sparse-opt[train]'",
    "accelerate": "pip install 'sparse-opt[train]'",
}

_HELP = """usage: sparse-opt COMMAND [arguments]

Sparse fine-tuning: training whose memory and time scale with the active elements of a mask.

commands:
{commands}

options:
  -h, --help  show this help; 'sparse-opt COMMAND --help' explains a command, with examples
  --version   show the version

a first run:
  sparse-opt doctor        # which backends run on this machine
  sparse-opt quickstart    # dense and sparse DPO side by side, no downloads

dense -> mask -> sparse on a model of your own:
  sparse-opt train dpo --model_name_or_path M --dataset_name pairs.jsonl --delta_log_dir log --output_dir dense
  sparse-opt mask find --delta_log_dir log --sparsity_percent 90 --output masks/
  sparse-opt train dpo --model_name_or_path M --dataset_name pairs.jsonl --mask masks/FILE --output_dir sparse

options come from flags, key=value words, and YAML files (--config FILE); later ones win, and files are read first:
  sparse-opt train dpo --config runs/dense/options.yaml output_dir=runs/dense_2 --seed 2

exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted (Ctrl-C).
SPARSE_OPT_DEBUG=1 shows the traceback of a failure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _exit_code(words)


def _exit_code(words: list[str]) -> int:
    if os.environ.get("SPARSE_OPT_DEBUG") == "1":
        return _dispatch(words)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _fail(f"error: {error}", 2)
    except BrokenPipeError:
        # The reader (such as `| head`) closed the pipe: report nothing, and let Python write nothing more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SparseOptError, OSError) as error:
        return _fail(f"error: {error or type(error).__name__}", 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALL:
            raise
        return _fail(f"error: this needs the package {package}, which is not installed: {_INSTALL[package]}", 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(f"error: out of memory: {error or type(error).__name__}", 1)
    except KeyboardInterrupt as interrupt:
        return _fail(str(interrupt) or "interrupted", 130)


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help_text(), file=sys.stderr)
        return 2
    command, *arguments = words
    if command in ("-h", "--help"):
        print(_help_text())
        return 0
    if command == "--version":
        print(f"sparse-opt {__version__}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(f"unknown command '{command}'{nearest(command, COMMANDS)}")
    module = importlib.import_module(f".{command}", __package__)
    try:
        return module.run(arguments)
    except SystemExit as exit_request:  # argparse, after --help
        return exit_request.code if isinstance(exit_request.code, int) else 0


def _help_text() -> str:
    return _HELP.format(commands="\n".join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items()))


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"sparse-opt: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _fail(message: str, code: int) -> int:
    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    print(f"sparse-opt: {rank}{' '.join(message.split())}", file=sys.stderr)
    return code
