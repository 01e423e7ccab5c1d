"""Plot of the end-to-end benchmark: a bar for each mode with stacked sections, labelled with its peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_opt.analysis.output_files import new_figure, save_png

# The Okabe-Ito palette, which is safe for colour-blind readers; grey is time outside all sections.
_COLOURS = {
    "rollout": "#CC79A7",
    "reference": "#56B4E9",
    "forward": "#009E73",
    "backward": "#E69F00",
    "clip": "#F0E442",
    "step": "#D55E00",
    "outside": "#BBBBBB",
}


def plot(report: dict[str, Any], path: Path, title: str) -> None:
    """Write a PNG: milliseconds a step by mode and section (medians), whole step and peak memory above each bar."""
    rows = report["rows"]
    sections = list(rows[0]["section_s"])
    heights = {name: [1e3 * row["section_s"][name] for row in rows] for name in sections}
    wholes = [1e3 * row["step_s"] for row in rows]
    covered = [sum(heights[name][i] for name in sections) for i in range(len(rows))]
    heights["outside"] = [max(0.0, whole - part) for whole, part in zip(wholes, covered, strict=True)]

    figure = new_figure(2.4 + 1.9 * len(rows), 6)
    axes = figure.subplots()
    positions = range(len(rows))
    bottoms = [0.0] * len(rows)
    tallest = max(wholes)
    for name, values in heights.items():
        label = {"step": "optimizer step", "outside": "outside the sections"}.get(name, name)
        axes.bar(positions, values, width=0.6, bottom=bottoms, color=_COLOURS[name], label=label, edgecolor="white")
        for x, (bottom, value) in enumerate(zip(bottoms, values, strict=True)):
            if value > 0.04 * tallest:  # a thinner section is too small for a number
                axes.text(x, bottom + value / 2, f"{value:.1f}", ha="center", va="center", fontsize=9)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    for x, (row, top) in enumerate(zip(rows, bottoms, strict=True)):
        lines = [f"{1e3 * row['step_s']:.1f} ms"]
        if row["peak_memory_bytes"] is not None:
            lines.append(f"peak {row['peak_memory_bytes'] / 2**30:.1f} GiB")
        axes.text(x, top + 0.01 * tallest, "\n".join(lines), ha="center", va="bottom", fontsize=10)
    axes.set_xticks(list(positions), [row["mode"] for row in rows], fontsize=11)
    axes.set_ylim(0, 1.15 * max(bottoms))
    axes.set_ylabel("ms a step, median")
    axes.set_title(f"{report['algorithm'].upper()} step by section", fontsize=12)
    figure.supxlabel(title, fontsize=8, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)
    save_png(figure, path)
