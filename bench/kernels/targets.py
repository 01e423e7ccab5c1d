"""Performance targets of the kernels on an H200, and their comparison with measured rows.

Rows have the format of the results' JSON, so that stored files can be judged again. Targets that the hardware does not
allow are withdrawn; docs/notebook.md lists them with the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import peers
from .recorder import FAST_BACKENDS

Row = Mapping[str, Any]

STEP_DENSE, STEP_COMPACT = "SparseAdamW.step, dense gradients", "SparseAdamW.step, compact gradients"
BF16 = ", bf16 moments"
SMALL = ", lr 1e-6"
WIDE = ", int32 indices"  # for comparison with the 2-byte indices of the optimizer
FINE = ", 32-byte fetches"  # into the L2; the default of an H200 is 64 (set_l2_fetch_granularity)
CLIP = "SparseAdamW.clip_grad_norm_"
BASE_IN, BASE_OUT = "SparseAdamW.base_weights, in", "SparseAdamW.base_weights, out"
GATHER, SWAP, OP_COMPACT = "masked_grad_gather_", "indexed_swap_", "indexed_adamw_, compact gradients"
BACKWARD_HOOKS, BACKWARD_PLAIN = "backward, gathering in its hooks", "backward, dense gradients kept"
ENCODE, APPLY, TORCH_ENCODE = "delta_encode", "delta_apply_", "ne, nonzero, index"
TILE_GRADIENT, DENSE_GRADIENT = "tile_weight_grad_, ", "torch.mm, "
A_CALL_AN_INPUT, A_CALL_A_MATRIX = ", a call an input", ", a call a matrix"  # without a suffix: a call for each layer
# Largest allowed time ratio of two backends. Triton's delta_encode is exempt, because it reads its inputs twice.
BACKENDS_APART = 1.15
NOT_COMPARED = ((ENCODE, "triton"),)
# Largest allowed (time ratio / byte ratio).
BYTES_TOLERANCE = 1.05


class Verdict(NamedTuple):
    """One target of one row, and the measured value."""

    work: str
    backend: str
    density: float | None
    unit: str  # unit of the values: "x floor", "ms host"
    found: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.found <= self.limit if self.at_most else self.found >= self.limit

    @property
    def target(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g} {self.unit}"

    @property
    def text(self) -> str:
        at = "" if self.density is None else f" at {self.density:.1%}"
        return f"{self.work}{at} ({self.backend}): {self.found:.3g} {self.unit}, expected {self.target}"

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "met": self.met}


def tile_gradient(pattern: str, tokens: int) -> str:
    """The name of the tile rows of `bench/kernels/tile_gradients.py`, with a call for each layer."""
    return f"{TILE_GRADIENT}{pattern}, {tokens} tokens"


def dense_gradient(tokens: int) -> str:
    """The name of their peer's rows: torch's dense products."""
    return f"{DENSE_GRADIENT}{tokens} tokens"


def gathered_gradient(tokens: int) -> str:
    """The name of the rows of dense products with a gather after each."""
    return f"{DENSE_GRADIENT}{GATHER}, {tokens} tokens"


def is_weight_gradient(row: Row) -> bool:
    """Whether the row measures weight gradients."""
    return bool(row["work"].startswith((TILE_GRADIENT, DENSE_GRADIENT)))


def tokens_of(row: Row) -> int:
    """The token count in the name of a weight gradient row."""
    found = re.search(r", (\d+) tokens", row["work"])
    assert found is not None, row["work"]
    return int(found[1])


Measure = Callable[[Row, Sequence[Row]], float | None]


class Target(NamedTuple):
    """A limit for the rows of one work, on the backend that `auto` selects."""

    work: str
    unit: str
    measure: Measure
    limit: float
    at_most: bool = True
    density: float | None = None  # None applies to all densities


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """The verdicts on all targets that can be computed from the rows."""
    found = []
    for row in rows:
        for target in TARGETS:
            if row["is_auto"] and target.work == row["work"] and target.density in (None, row["density"]):
                found += _verdict(row, target, rows)
        if row["backend"] in FAST_BACKENDS and (row["work"], row["backend"]) not in NOT_COMPARED:
            found += _verdict(row, Target(row["work"], "x the faster backend", _to_faster, BACKENDS_APART), rows)
    return found


def of_row(row: Row, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts on one row."""
    key = row["work"], row["backend"], row["density"]
    return [verdict for verdict in verdicts if verdict[:3] == key]


def _verdict(row: Row, target: Target, rows: Sequence[Row]) -> list[Verdict]:
    value = target.measure(row, rows)
    if value is None:
        return []
    where = row["work"], row["backend"], row["density"]
    return [Verdict(*where, target.unit, value, target.limit, target.at_most)]


def x_floor(row: Row) -> float | None:
    """Measured time over floor."""
    return None if not row["floor_ms"] else row["ms"] / row["floor_ms"]


def _x_floor(row: Row, rows: Sequence[Row]) -> float | None:
    return x_floor(row)


def _value(key: str) -> Measure:
    return lambda row, rows: row[key]


def _row(rows: Sequence[Row], work: str, density: float | None, backend: str | None = None) -> Row | None:
    for row in rows:
        if row["work"] == work and row["density"] == density and backend in (None, row["backend"]):
            return row
    return None


def _times_as_fast(peer: str, *, same_density: bool = False) -> Measure:
    def measure(row: Row, rows: Sequence[Row]) -> float | None:
        other = _row(rows, peer, row["density"] if same_density else None)
        return None if other is None else other["ms"] / row["ms"]

    return measure


def _times_as_long(other_work: str, key: str) -> Measure:
    def measure(row: Row, rows: Sequence[Row]) -> float | None:
        other = _row(rows, other_work, row["density"])
        return None if other is None else row[key] / other[key]

    return measure


def _time_over_bytes(wide_work: str) -> Measure:
    """Time ratio / byte ratio to the wide variant: 1 if the time is proportional to the bytes."""

    def measure(row: Row, rows: Sequence[Row]) -> float | None:
        wide = _row(rows, wide_work, row["density"], row["backend"])
        return None if wide is None else (row["ms"] / wide["ms"]) / (row["bytes"] / wide["bytes"])

    return measure


def _to_faster(row: Row, rows: Sequence[Row]) -> float | None:
    """The time ratio of the slower to the faster backend; None for the faster one, and without another backend."""
    others = [
        other["ms"]
        for other in rows
        if (other["work"], other["density"]) == (row["work"], row["density"])
        and other["backend"] in FAST_BACKENDS
        and other["backend"] != row["backend"]
    ]
    return row["ms"] / min(others) if others and row["ms"] > min(others) else None


TARGETS: tuple[Target, ...] = (
    *(
        target
        for fetches in ("", FINE)
        for target in (
            Target(STEP_DENSE + fetches, "x floor", _x_floor, 1.10, density=0.025),
            Target(STEP_DENSE + fetches, "x floor", _x_floor, 1.05, density=0.1),
            Target(
                STEP_DENSE + fetches,
                "times as fast as fused AdamW",
                _times_as_fast(peers.FUSED),
                5.0,
                at_most=False,
                density=0.025,
            ),
            Target(STEP_COMPACT + fetches, "x floor", _x_floor, 1.10, density=0.1),
            *(Target(name + SMALL + fetches, "x floor", _x_floor, 1.10) for name in (STEP_DENSE, STEP_COMPACT)),
            Target(GATHER + fetches, "x floor", _x_floor, 1.10),
            *(Target(name + fetches, "x floor", _x_floor, 1.15, density=0.1) for name in (BASE_IN, BASE_OUT)),
        )
    ),
    *(Target(name, "ms host", _value("host_ms"), 0.1) for name in (STEP_DENSE, STEP_COMPACT)),
    *(
        Target(wide + BF16, "time ratio / byte ratio", _time_over_bytes(wide), BYTES_TOLERANCE)
        for wide in (STEP_DENSE, STEP_COMPACT)
    ),
    *(
        Target(name, "time ratio / byte ratio", _time_over_bytes(name + WIDE), BYTES_TOLERANCE)
        for name in (OP_COMPACT, GATHER, SWAP)
    ),
    Target(f"{STEP_DENSE}, tile64", "x floor", _x_floor, 1.25),
    *(
        Target(
            f"{STEP_DENSE}, {pattern}",
            "times as fast as fused AdamW",
            _times_as_fast(peers.FUSED),
            20.0,
            at_most=False,
            density=0.025,
        )
        for pattern in ("run32", "tile64")
    ),
    Target(CLIP, "ms", _value("ms"), 0.1),
    Target(CLIP, "ms host", _value("host_ms"), 0.1),
    Target(BACKWARD_HOOKS, "x the plain backward, GPU", _times_as_long(BACKWARD_PLAIN, "ms"), 1.03),
    Target(BACKWARD_HOOKS, "x the plain backward, wall", _times_as_long(BACKWARD_PLAIN, "wall_ms"), 1.03),
    Target(SWAP, "x floor", _x_floor, 1.15),
    *(
        target
        for density, share in ((0.01, 0.95), (0.025, 0.95), (0.1, 0.85))
        for target in (
            Target(ENCODE, "of the copy rate", _value("share_of_floor"), share, at_most=False, density=density),
            Target(
                ENCODE,
                "times as fast as torch",
                _times_as_fast(TORCH_ENCODE, same_density=True),
                3.5,
                at_most=False,
                density=density,
            ),
        )
    ),
    *(Target(APPLY, "x floor", _x_floor, 1.15, density=density) for density in (0.025, 0.1)),
    *(
        Target(tile_gradient(pattern, tokens), "ms", _value("ms"), ms, density=0.025)
        for pattern, tokens, ms in (
            ("tile64", 8192, 8.0),
            ("tile128", 8192, 5.0),
            ("tile64", 1024, 1.6),
            ("tile128", 1024, 1.2),
        )
    ),
)
