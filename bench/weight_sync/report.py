"""Report of `bench weight_sync`: the rows, the table, and the measured values next to their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..common.harness import Report
from ..common.report import Columns, machine_line, render

Row = Mapping[str, Any]
PATTERNS = ("element", "tile64")


@dataclass(frozen=True)
class Variant:
    """A row of the table; without a pattern all weights are broadcast."""

    pattern: str | None = None  # of the mask
    encoding: Literal["values", "changed"] | None = None
    transport: Literal["broadcast", "ipc"] = "broadcast"

    @property
    def name(self) -> str:
        if self.pattern is None:
            return "weights"
        return f"{self.pattern}_{self.encoding}" + ("_ipc" if self.transport == "ipc" else "")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(),
        *(
            Variant(pattern, encoding, transport)
            for pattern in PATTERNS
            for transport in ("broadcast", "ipc")
            for encoding in ("values", "changed")
        ),
    )
}


def find(report: Report, network: str, variant: str) -> Row | None:
    """The timed row, or None."""
    for row in timed(report):
        if (row["network"], row["variant"]) == (network, variant):
            return row
    return None


def timed(report: Report) -> list[Row]:
    """The timed rows by network and variant."""
    names = list(VARIANTS)
    rows = [row for row in report["rows"] if row["ms"] is not None]
    return sorted(rows, key=lambda row: (row["network"], names.index(row["variant"])))


def columns(report: Report) -> Columns:
    """Columns of the table; a ratio is to the row of all weights on the same network."""

    def faster(row: Row) -> str:
        whole = find(report, row["network"], "weights")
        return "" if whole is None or row["pattern"] is None else f"{whole['ms'] / row['ms']:.1f}"

    def if_sparse(cell: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: cell(row) if row["pattern"] is not None else ""

    return {
        "network": "{network}",
        "update": _shown,
        "by": lambda row: "CUDA IPC" if row["transport"] == "ipc" else "broadcast",
        "ms": "{ms:.2f}",
        "p20 - p80": "{p20_ms:.2f} - {p80_ms:.2f}",
        "x faster": faster,
        "MB": lambda row: f"{row['message_bytes'] / 1e6:.2f}",
        "bytes / nnz": if_sparse(lambda row: f"{row['message_bytes'] / row['nnz']:.4f}"),
        "changed": lambda row: f"{share_changed(row):.2%}" if row["encoding"] == "changed" else "",
        "receiver's bytes / nnz": if_sparse(lambda row: f"{held_bytes(row) / row['nnz']:.3f}"),
        "stream ms": lambda row: "" if row.get("stream_ms") is None else f"{row['stream_ms']:.2f}",
    }


def _shown(row: Row) -> str:
    sent = {None: "all weights", "values": "all values", "changed": "changed values"}[row["encoding"]]
    return sent if row["pattern"] is None else f"{row['pattern']}, {sent}"


def share_changed(row: Row) -> float:
    """Share of the active elements that the last update changed, of a row that sends the changed values."""
    share: float = row["sent_values"] / row["nnz"]
    return share


def held_bytes(row: Row) -> int:
    """Bytes that the receiver holds between updates."""
    return sum(row["receiver_bytes"].values())


def heading(report: Report) -> str:
    """What is measured, in one line."""
    settings = report["settings"]
    optimizer = f"SparseAdamW{' with compact_weights' if settings.get('compact_weights') else ''}"
    fetches = settings.get("l2_fetch_granularity")
    return (
        f"Llama of the shape {settings['shape']}, random bf16 weights, {settings['density']:.1%} of the matrices' "
        f"elements active; an update after each step of {optimizer} at lr {settings['learning_rate']:g}, from one GPU "
        "to another" + (f"; fetches of {fetches} bytes into the L2" if fetches else "")
    )


def text(report: Report, *, markdown: bool = False) -> str:
    """The report for a terminal, or in Markdown."""
    rows = report["rows"]
    n_right = sum(row["right"] for row in rows)
    parts = [
        f"{heading(report)}." if markdown else f"{heading(report)}\n{machine_line(report)}",
        render(columns(report), timed(report), n_words=3, markdown=markdown),
        f"All weights of both GPUs have the same bits after the first and the last update in {n_right} of {len(rows)} "
        "rows.",
    ]
    if found := targets(report):
        parts.append(render(TARGET_COLUMNS, found, n_words=3, n_last_words=1, markdown=markdown))
    return "\n\n".join(parts)


def wrong_lines(report: Report) -> list[str]:
    """An error for each row with a wrong result."""
    return [
        f"{row['network']}, {row['variant']}: WRONG RESULT: weights differ between the ranks"
        for row in report["rows"]
        if not row["right"]
    ]


TARGET_COLUMNS: Columns = {
    "row": "{variant}",
    "network": "{network}",
    "what": "{what}",
    "measured": "{value:.4g}",
    "target": lambda found: f"{'<=' if found['upper'] else '>='} {found['bound']:.4g}",
    "verdict": lambda found: "met" if (found["value"] <= found["bound"]) == found["upper"] else "missed",
}


def targets(report: Report) -> list[dict[str, Any]]:
    """The measured values that have a target. The bounds of times are of the 3B shape on GPUs."""
    found: list[dict[str, Any]] = []
    on_gpu = report["settings"]["shape"] == "3b" and report["settings"]["device"] == "cuda"
    for row in timed(report):
        if row["pattern"] is None:
            continue

        def add(what: str, value: float, bound: float, row: Row = row, *, upper: bool = True) -> None:
            found.append({**row, "what": what, "value": value, "bound": bound, "upper": upper})

        whole = find(report, row["network"], "weights")
        default, values = row["network"] == "default", row["encoding"] == "values"
        if on_gpu and default:
            add("ms", row["ms"], 4.0)
        if on_gpu and whole is not None and not default:
            add("times faster than all weights", whole["ms"] / row["ms"], 30.0, upper=False)
        if default and row["transport"] == "broadcast":
            share = share_changed(row)
            bound = 2.01 if values else 0.125 + 2.1 * share
            add("bytes per active element", row["message_bytes"] / row["nnz"], bound)
            if row["pattern"] == "tile64":
                add("receiver's index bytes per active element", held_bytes(row) / row["nnz"], 0.01)
            else:
                add("receiver's bytes per active element", held_bytes(row) / row["nnz"], 3.0)
    return found
