"""The variants of `bench weight_sync`, and their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..rows import Case, Row

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
WHOLE: Case = {"pattern": None, "sent": "all weights", "by": "broadcast"}


def result_rows(result: Mapping[str, Any], variant: Variant, network: str, settings: Mapping[str, Any]) -> list[Row]:
    """The rows of a variant: time of an update, and bytes for each active element."""
    case: Case = {
        "network": network,
        "pattern": variant.pattern,
        "sent": variant.encoding or "all weights",
        "by": "CUDA IPC" if variant.transport == "ipc" else "broadcast",
        **settings,
    }
    shared: dict[str, Any] = {"suite": "weight_sync", "case": case}
    peers: dict[str, float | Case] = {} if variant.pattern is None else {"all weights": dict(WHOLE)}
    spread = {"p20": result["p20_ms"], "p80": result["p80_ms"], "n": result["n_rounds"]}
    rows = [Row(**shared, metric="time", unit="ms", value=result["ms"], peers=peers, **spread)]
    rows.append(Row(**shared, metric="message", unit="MB", value=result["message_bytes"] / 1e6))
    if variant.pattern is None:
        return rows
    nnz = result["nnz"]
    each = {"message": result["message_bytes"] / nnz, "receiver's memory": sum(result["receiver_bytes"].values()) / nnz}
    bitmap: dict[str, float | Case] = {}
    if variant.encoding == "changed":
        share = result["sent_values"] / nnz
        rows.append(Row(**shared, metric="changed", unit="share", value=share))
        bitmap = {"bitmap and values": 0.125 + 2.1 * share}
    for name, value in each.items():
        peers = bitmap if name == "message" else {}
        rows.append(Row(**shared, metric=f"{name} an element", unit="bytes/nnz", value=value, peers=peers))
    if result.get("stream_ms") is not None:
        rows.append(Row(**shared, metric="stream", unit="ms", value=result["stream_ms"]))
    return rows
