"""Progress of a run: a bar on a terminal, and occasional plain lines in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Shows each finished step on stderr, unless `hidden`; leaving `with` closes the bar."""

    def __init__(self, title: str, n_steps: int, n_done: int = 0, *, hidden: bool = False):
        self._title, self._n_steps, self._hidden = title, n_steps, hidden
        self._bar = tqdm(total=n_steps, initial=n_done, desc=title, unit="step", disable=hidden or None)
        self._said_at = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, step: int, metrics: Mapping[str, str]) -> None:
        """Mark `step` as done and show these metrics."""
        self._bar.set_postfix(metrics, refresh=False)
        self._bar.update()
        # tqdm disables itself if stderr is not a terminal.
        if self._bar.disable and not self._hidden and time.monotonic() - self._said_at >= SECONDS_BETWEEN_LINES:
            self._said_at = time.monotonic()
            listed = ", ".join(f"{name} {value}" for name, value in metrics.items())
            print(f"{self._title}: step {step} of {self._n_steps}, {listed}", file=sys.stderr, flush=True)
