"""Performance targets of the kernels on an H200, and their comparison with measured rows.

Rows have the format of the results' JSON, so that stored files can be judged again. Rows of older files have no
`scattered_bytes`: their bounds take scattered writes for as fast as a copy. Targets that the hardware does not allow
are withdrawn; docs/dev/notebook.md lists them with the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import peers
from .recorder import FAST_BACKENDS

Row = Mapping[str, Any]

STEP_DENSE, STEP_COMPACT = "SparseAdamW.step, dense gradients", "SparseAdamW.step, compact gradients"
BF16 = ", bf16 moments"
SMALL = ", lr 1e-6"
WIDE = ", int32 indices"  # for comparison with the 2-byte indices of the optimizer
KNOWN = ", compact weights"  # which are not read from the model
FINE = ", 32-byte fetches"  # into the L2; the default of an H200 is 64 (set_l2_fetch_granularity)
CLIP = "SparseAdamW.clip_grad_norm_"
BASE_IN, BASE_OUT = "SparseAdamW.base_weights, in", "SparseAdamW.base_weights, out"
GATHER, SWAP, OP_COMPACT = "masked_grad_gather_", "indexed_swap_", "indexed_adamw_, compact gradients"
REPLACE = "indexed_replace_"
BACKWARD_HOOKS, BACKWARD_PLAIN = "backward, gathering in its hooks", "backward, dense gradients kept"
ENCODE, APPLY, TORCH_ENCODE = "delta_encode", "delta_apply_", "ne, nonzero, index"
TILE_GRADIENT, DENSE_GRADIENT = "tile_weight_grad_, ", "torch.mm, "
A_CALL_AN_INPUT, A_CALL_A_MATRIX = ", a call an input", ", a call a matrix"  # without a suffix: a call for each layer
# Largest allowed time ratio of two backends. Triton's delta_encode is exempt, because it reads its inputs twice.
BACKENDS_APART = 1.15
NOT_COMPARED = ((ENCODE, "triton"),)
# Largest allowed (time ratio / byte ratio) and (time ratio / bound ratio).
BYTES_TOLERANCE = 1.05


class Verdict(NamedTuple):
    """One target of one row, and the measured value."""

    work: str
    backend: str
    density: float | None
    unit: str  # unit of the values: "x bound", "ms host"
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
    """The name of the rows of `tile_gradients`, with a call for each layer."""
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


def x_bound(row: Row, rows: Sequence[Row] = ()) -> float | None:
    """Measured time over the bandwidth bound."""
    return None if not row["floor_ms"] else row["ms"] / row["floor_ms"]


def _x_bound(row: Row, rows: Sequence[Row]) -> float | None:
    """`x_bound`, except of a row with scattered writes whose rate was not measured: its bound is too low."""
    is_too_low = row.get("scattered_bytes") and not row["write_gb_per_s"]
    return None if is_too_low else x_bound(row)


def _x_write_bound(row: Row, rows: Sequence[Row]) -> float | None:
    """`x_bound` of a row whose bound has the measured rate of its scattered writes."""
    return x_bound(row) if row.get("write_gb_per_s") else None


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


def _time_over_bytes(row: Row, wide: Row) -> float | None:
    """Time ratio / byte ratio: 1 if the time is proportional to the bytes; None if some are written more slowly."""
    return None if row.get("scattered_bytes") else (row["ms"] / wide["ms"]) / (row["bytes"] / wide["bytes"])


def _time_over_bound(row: Row, wide: Row) -> float | None:
    """The same of bounds instead of bytes, for rows whose bounds have the measured rate of scattered writes."""
    return (row["ms"] / wide["ms"]) / (row["floor_ms"] / wide["floor_ms"]) if row.get("write_gb_per_s") else None


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


def _at_most_bound(work: str, limit: float, density: float | None = None) -> Target:
    return Target(work, "x bound", _x_bound, limit, density=density)


def _at_most_write_bound(work: str, limit: float, density: float) -> Target:
    """A target that only bounds with measured rates of scattered writes allow."""
    return Target(work, "x bound", _x_write_bound, limit, density=density)


def _at_most_ms(work: str, limit: float, key: str = "ms", unit: str = "ms", density: float | None = None) -> Target:
    return Target(work, unit, _value(key), limit, density=density)


def _faster_than_fused(work: str, times: float) -> Target:
    measure = _times_as_fast(peers.FUSED)
    return Target(work, "times as fast as fused AdamW", measure, times, at_most=False, density=0.025)


def _in_proportion_to_bytes(work: str, wide_work: str) -> Iterator[Target]:
    """The work must save as much time as its bytes or, with scattered writes, its bound say."""

    def to_wide(ratio: Callable[[Row, Row], float | None]) -> Measure:
        def measure(row: Row, rows: Sequence[Row]) -> float | None:
            wide = _row(rows, wide_work, row["density"], row["backend"])
            return None if wide is None else ratio(row, wide)

        return measure

    yield Target(work, "time ratio / byte ratio", to_wide(_time_over_bytes), BYTES_TOLERANCE)
    yield Target(work, "time ratio / bound ratio", to_wide(_time_over_bound), BYTES_TOLERANCE)


def _of_fetches(fetches: str) -> Iterator[Target]:
    """The targets with the default granularity of fetches, and with 32 bytes."""
    yield _at_most_bound(STEP_DENSE + fetches, 1.10, density=0.025)
    yield _at_most_bound(STEP_DENSE + fetches, 1.05, density=0.1)
    yield _faster_than_fused(STEP_DENSE + fetches, 5.0)
    yield _at_most_bound(STEP_COMPACT + fetches, 1.10, density=0.1)
    for step in (STEP_DENSE, STEP_COMPACT):
        yield _at_most_bound(step + SMALL + fetches, 1.10)
    yield _at_most_bound(GATHER + fetches, 1.10)
    for swap in (BASE_IN, BASE_OUT):
        yield _at_most_bound(swap + fetches, 1.15, density=0.1)
        yield _at_most_write_bound(swap + fetches, 1.15, density=0.025)
    # Writing 2 bytes of a sector takes longer than writing all of it, and this step has little else to do.
    yield _at_most_write_bound(STEP_COMPACT + fetches, 1.20, density=0.025)


def _targets() -> Iterator[Target]:
    yield from _of_fetches("")
    yield from _of_fetches(FINE)
    for step in (STEP_DENSE, STEP_COMPACT):
        yield _at_most_ms(step, 0.1, "host_ms", "ms host")
    for wide in (STEP_DENSE, STEP_COMPACT):
        yield from _in_proportion_to_bytes(wide + BF16, wide)
    for op in (OP_COMPACT, GATHER, SWAP):
        yield from _in_proportion_to_bytes(op, op + WIDE)
    yield _at_most_bound(f"{STEP_DENSE}, tile64", 1.25)
    for pattern in ("run16", "run32"):
        yield _at_most_write_bound(f"{STEP_DENSE}, {pattern}", 1.15, density=0.025)
    for pattern in ("run32", "tile64"):
        yield _faster_than_fused(f"{STEP_DENSE}, {pattern}", 20.0)
    yield _at_most_ms(STEP_COMPACT + SMALL + KNOWN, 0.6, density=0.025)
    for swap in (BASE_IN, BASE_OUT):
        yield _at_most_ms(swap + SMALL + KNOWN, 0.25, density=0.025)
    yield _at_most_ms(CLIP, 0.1)
    yield _at_most_ms(CLIP, 0.05, "host_ms", "ms host")
    for key, where in (("ms", "GPU"), ("wall_ms", "wall")):
        yield Target(BACKWARD_HOOKS, f"x the plain backward, {where}", _times_as_long(BACKWARD_PLAIN, key), 1.03)
    yield _at_most_bound(SWAP, 1.15)
    as_fast = _times_as_fast(TORCH_ENCODE, same_density=True)
    for density, share in ((0.01, 0.95), (0.025, 0.95), (0.1, 0.85)):
        yield Target(ENCODE, "of the copy rate", _value("share_of_floor"), share, at_most=False, density=density)
        yield Target(ENCODE, "times as fast as torch", as_fast, 3.5, at_most=False, density=density)
    for density in (0.025, 0.1):
        yield _at_most_bound(APPLY, 1.15, density=density)
    yield _at_most_write_bound(APPLY, 1.15, density=0.01)
    for tokens, tile64_ms, tile128_ms in ((8192, 8.0, 5.0), (1024, 1.6, 1.2)):
        yield _at_most_ms(tile_gradient("tile64", tokens), tile64_ms, density=0.025)
        yield _at_most_ms(tile_gradient("tile128", tokens), tile128_ms, density=0.025)


TARGETS = tuple(_targets())
