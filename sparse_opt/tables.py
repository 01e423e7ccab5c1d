"""Renders tables as aligned text and as Markdown: the one renderer of the command line and the benchmarks.

The library rich was tried: in a pipe it cuts names to 80 columns, reads `[red]` in a name as markup unless markup is
switched off, writes no Markdown, and takes 0.17 s to import.
"""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, n_words: int = 1, n_last_words: int = 0) -> str:
    """Return aligned columns: the first `n_words` and last `n_last_words` aligned left, the others (numbers) right."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n_words <= i < len(headers) - n_last_words else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, n_words: int = 1) -> str:
    """Return the same as a Markdown table; the first `n_words` columns aligned left, the others right."""
    rule = ["---" if i < n_words else "---:" for i in range(len(headers))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(headers), rule, *map(list, rows)])


def format_bytes(size: int) -> str:
    """1536 -> '1.5 KiB'."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
