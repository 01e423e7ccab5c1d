"""Keeping the progress bars of other libraries out of logs."""

from __future__ import annotations

import sys


def hide_progress_bars(*, always: bool = False) -> None:
    """Turn off the progress bars of transformers and datasets, which they draw into files and pipes too.

    Args:
        always: on a terminal as well.
    """
    import datasets
    from transformers.utils import logging

    if always or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
