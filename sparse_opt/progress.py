"""Progress bars of long work, on stderr if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def progress_bar(items: Iterable[Any] | None = None, *, what: str, unit: str, total: int | None = None) -> Any:
    """Return a tqdm bar over `items`, or one of `total` units for `update()`; it disappears when the work is done."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=what, unit=unit, disable=None, leave=False)


def hide_progress_bars(*, always: bool = False) -> None:
    """Disable the progress bars of transformers and datasets, which would also be written to files and pipes.

    Args:
        always: disable them on a terminal as well.
    """
    import datasets
    from transformers.utils import logging

    if always or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
