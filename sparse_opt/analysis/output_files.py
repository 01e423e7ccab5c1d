"""Writes text files and matplotlib figures atomically, creating missing folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import files
from ..errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8. Raises a SparseOptError that names the file if it cannot be written."""
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG with 150 dots per inch. Raises a SparseOptError that names the file on a failed write."""
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.written_aside(path) as aside:
            figure.savefig(aside, dpi=150, format="png")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, with a layout that fits its labels; needs matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def require_matplotlib(option: str) -> None:
    """Raise a ConfigError that names the option that needs matplotlib if it is not installed."""
    try:
        import matplotlib  # noqa: F401  # only whether it can be imported
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"option '{option}' needs the package matplotlib, which is not installed: pip install 'sparse-opt[plot]'"
        ) from error
