"""Progress of long work: bars on stderr if that is a terminal, else lines with the time left."""

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


class TimeLeft:
    """Says from time to time how long the rest of the work takes, at the pace since this object was made.

    Args:
        n_before: units that were done earlier.
        every: least number of seconds between two answers; None is 30.
    """

    def __init__(self, n_before: int = 0, every: float | None = None) -> None:
        self._n_before, self._every = n_before, SECONDS_BETWEEN_LINES if every is None else every
        self._began = self._said = time.monotonic()

    def after(self, n_done: int, n_total: int, *, always: bool = False) -> str | None:
        """`3 min 20 s left` after `n_done` units, those before included; None if the last answer is too recent."""
        now = time.monotonic()
        if not always and now - self._said < self._every:
            return None
        self._said = now
        return f"{duration((now - self._began) / (n_done - self._n_before) * (n_total - n_done))} left"


def with_time_left(batches: Sequence[Batch], *, what: str, unit: str, n_before: int = 0) -> Iterator[Batch]:
    """Yield batches of units of work, after `n_before` that were done earlier, and show the time left.

    That is a bar on a terminal, else a line on stderr at most every 30 s.
    """
    n_done, n_total, clock = n_before, n_before + sum(map(len, batches)), TimeLeft(n_before)
    with progress_bar(what=what, unit=unit, total=n_total) as bar:
        bar.update(n_before)
        for batch in batches:
            yield batch
            bar.update(len(batch))
            n_done += len(batch)
            if not sys.stderr.isatty() and (left := clock.after(n_done, n_total)):
                print(f"{what}: {n_done} of {n_total} {unit}, {left}", file=sys.stderr, flush=True)


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
