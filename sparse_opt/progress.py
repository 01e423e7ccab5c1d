"""Progress bars of long work, on stderr if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

SECONDS_BETWEEN_LINES = 30.0
Batch = TypeVar("Batch", bound=Sequence[Any])


def progress_bar(items: Iterable[Any] | None = None, *, what: str, unit: str, total: int | None = None) -> Any:
    """Return a tqdm bar over `items`, or one of `total` units for `update()`; it disappears when the work is done."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=what, unit=unit, disable=None, leave=False)


def with_time_left(batches: Sequence[Batch], *, what: str, unit: str, n_before: int = 0) -> Iterator[Batch]:
    """Yield batches of units of work, after `n_before` that were done earlier, and show the time left.

    That is a bar on a terminal, else a line on stderr at most every 30 s.
    """
    n_done, n_total = n_before, n_before + sum(map(len, batches))
    started = said = time.monotonic()
    with progress_bar(what=what, unit=unit, total=n_total) as bar:
        bar.update(n_before)
        for batch in batches:
            yield batch
            bar.update(len(batch))
            n_done, now = n_done + len(batch), time.monotonic()
            if not sys.stderr.isatty() and now - said > SECONDS_BETWEEN_LINES:
                said, left = now, duration((now - started) / (n_done - n_before) * (n_total - n_done))
                print(f"{what}: {n_done} of {n_total} {unit}, {left} left", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`1 h 5 min`, `3 min 20 s` or `7 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


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
