"""The progress bar of long work, on stderr if that is a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def progress_bar(items: Iterable[Any] | None = None, *, what: str, unit: str, total: int | None = None) -> Any:
    """Return a tqdm bar over `items`, or one of `total` units for `update()`; it disappears when the work is done."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=what, unit=unit, disable=None, leave=False)
