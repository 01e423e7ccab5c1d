"""What several commands share: options, and how results are printed."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any


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


def print_json(data: Any) -> None:
    """Print `json_text`."""
    print(json_text(data))


def json_text(data: Any) -> str:
    """`data` as indented, valid JSON: NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_plain(data), indent=2, allow_nan=False)


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data if data is None or isinstance(data, bool | int | str) else str(data)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error means out of memory, on a GPU or on the host (Python, numpy or torch's CPU allocator)."""
    import torch

    gpu_or_python = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return gpu_or_python or "DefaultCPUAllocator: can't allocate memory" in str(error)


def format_percent(share: float) -> str:
    """0.01234 -> '1.234 %'."""
    return f"{100 * share:.3f} %"
