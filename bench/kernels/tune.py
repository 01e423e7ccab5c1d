"""`sparse-opt bench kernels --tune`: measures the launch sizes of `sparse_opt.tuning` on a GPU and chooses the fastest.

The entries are tuned one after the other, each with the values chosen before it. Every value must give the same bits.
A value replaces the package's only if it is faster by `MARGIN` and its p80 is below the other's p20, because medians
differ from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_opt import backends
from sparse_opt.ops import STEP_OPS
from sparse_opt.tuning import ALLOWED, MEANING, Tuning, builtin, files

from ..rows import Row as ResultRow
from ..rows import Run
from ..timing import Clock, Prepared, measure
from . import inputs
from .cases import Active, Case, check_bits
from .optimizers import SMALL_LR

MARGIN = 0.03
DENSITY = 0.025
ADAMW = "indexed_adamw_"
# Entries that are a number of bytes per active element: from it on, the kernel with few elements in flight is used.
THRESHOLDS = ("cuda_scattered_step_bytes", "cuda_scattered_swap_bytes")

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of the inputs: weights that exceed a GPU's L2 cache several times, and a layer's products."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {f"w{i}": (4096, 4096) for i in range(16)})
    layer: tuple[int, int] = (3072, 8192)
    tokens: int = 4096


@dataclass(frozen=True)
class Times:
    """Of one value, in ms: median and spread of the calls, summed over cases."""

    ms: float = 0.0
    p20_ms: float = 0.0
    p80_ms: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.ms + other.ms, self.p20_ms + other.p20_ms, self.p80_ms + other.p80_ms)

    def clearly_below(self, other: Times) -> bool:
        return self.ms < (1.0 - MARGIN) * other.ms and self.p80_ms < other.p20_ms


@dataclass
class Tuner:
    """Chooses the entries of one device's table.

    Args:
        device: a GPU with an index; or the CPU, with the backend triton, under Triton's interpreter.
        table: the table to start from; `run` replaces its entries.
        backends: the backends whose entries are tuned; the others keep their value.
        n_rounds: timed calls of each value.
        clock: times a call; by default the clock of the device.
    """

    device: torch.device
    table: Tuning
    backends: Sequence[str]
    generator: torch.Generator
    n_rounds: int = 15
    sizes: Sizes = field(default_factory=Sizes)
    clock: Clock | None = None
    on_row: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)

    def run(self) -> Tuning:
        """Tune all entries, leave the device with the chosen table, and return it.

        Raises:
            WrongResult: a value gives other bits than the table that the run started from.
        """
        for entry in ALLOWED:
            backend = entry.partition("_")[0]
            if backend in self.backends:
                choose = self._threshold if entry in THRESHOLDS else self._fastest
                value = choose(entry, backend)
                self.table = replace(self.table, **{entry: value})
                for row in self.rows:
                    row["chosen"] = row["chosen"] or (row["entry"], row["value"]) == (entry, value)
        backends.set_tuning(self.device, self.table)
        return self.table

    def _fastest(self, entry: str, backend: str) -> int:
        """Return the value with the shortest time, all cases together."""
        total: dict[int, Times] = {}
        for case in self._cases(entry, DENSITY):
            for value, times in self._time(entry, backend, case, ALLOWED[entry]).items():
                total[value] = times + total.get(value, Times())
        held = getattr(self.table, entry)
        fastest = min(total, key=lambda value: total[value].ms)
        return fastest if total[fastest].clearly_below(total[held]) else held

    def _threshold(self, entry: str, backend: str) -> int:
        """Return the lowest number of bytes from which on, at all measured ones, the other kernel is faster; or 0."""
        lowest = 0
        for n_bytes in sorted(filter(None, ALLOWED[entry]), reverse=True):
            total = {0: Times(), n_bytes: Times()}
            for case in self._cases(entry, 0.97 * torch.bfloat16.itemsize / n_bytes):
                for value, times in self._time(entry, backend, case, (0, n_bytes)).items():
                    total[value] += times
            if not total[n_bytes].clearly_below(total[0]):
                break
            lowest = n_bytes
        return lowest

    def _time(self, entry: str, backend: str, case: Case, values: Sequence[int]) -> dict[int, Times]:
        """Check and time an entry's values in turns; return the times of each that can run."""
        tables = {value: replace(self.table, **{entry: value}) for value in (getattr(self.table, entry), *values)}
        start = {name: _clones(case.arguments[name]) for name in (*case.written, *case.summed)}

        def prepare(table: Tuning) -> None:
            backends.set_tuning(self.device, table)
            for name, tensors in start.items():
                for tensor, initial in zip(_list(case.arguments[name]), tensors, strict=True):
                    tensor.copy_(initial)

        expected: dict[str, Tensor] | None = None
        variants = {}
        for value, table in tables.items():
            prepare(table)
            try:
                case.run(backend)
            except _cannot_launch() as error:
                if value == getattr(self.table, entry):
                    raise
                self._add(entry, value, case, why=str(error).partition("\n")[0])
                continue
            found = _results(case)
            if expected is None:
                expected = {name: tensor.clone() for name, tensor in found.items()}
            for name, tensor in found.items():
                check_bits(f"{case.op} with {entry} {value}: {name}", tensor, expected[name])
            if value in values:
                run = functools.partial(case.run, backend)
                variants[str(value)] = Prepared(functools.partial(prepare, table), run)
        timings = measure(variants, device=self.device, n_rounds=self.n_rounds, clock=self.clock)
        found_times = {int(value): Times(timing.ms, timing.p20_ms, timing.p80_ms) for value, timing in timings.items()}
        for number, times in found_times.items():
            self._add(entry, number, case, **asdict(times))
        return found_times

    def _add(self, entry: str, value: int, case: Case, **found: Any) -> None:
        row = {"entry": entry, "value": value, "work": _work(case), "ms": None, "why": "", "chosen": False} | found
        self.rows.append(row)
        self.on_row(row)

    def _cases(self, entry: str, density: float) -> Iterator[Case]:
        """The calls whose time an entry affects. Each is freed before the next is made."""
        generator = self.generator
        if "tile" in entry:
            size = 64 if "tile64" in entry else 128
            tokens, (rows, columns) = self.sizes.tokens, self.sizes.layer
            case = inputs.tile_weight_grad_case(
                [self.sizes.layer], torch.bfloat16, 0.1, generator, tokens=tokens, tile_size=size
            )
            # Sums of its integers are exact in any order, and would hide that a value changes the order.
            shapes = {"grad_outputs": (tokens, rows), "inputs": (tokens, columns)}
            yield case.changed(
                **{k: inputs.random_tensors({k: v}, torch.bfloat16, generator) for k, v in shapes.items()}
            )
            return
        dense = inputs.random_tensors(self.sizes.shapes, torch.bfloat16, generator)
        if "encode" in entry:
            yield inputs.delta_encode_case(dense, density, generator)
            return
        active = inputs.random_active(dense, density, generator)
        if "apply" in entry:
            values = torch.randn(active.nnz, device=self.device, generator=generator).to(torch.bfloat16)
            yield inputs.delta_apply_case(dense, active, values)
        elif "swap" in entry:
            yield inputs.swap_case(dense, inputs.narrowed(active), generator)
        else:
            yield from self._steps(dense, inputs.narrowed(active), compact_too=entry not in THRESHOLDS)

    def _steps(self, dense: list[Tensor], active: Active, *, compact_too: bool) -> Iterator[Case]:
        """AdamW from dense gradients, when all active weights change and when few do; and from a compact gradient."""
        grads = inputs.random_tensors(self.sizes.shapes, torch.bfloat16, self.generator)
        case = inputs.step_case(ADAMW, dense, grads, active, self.generator, dense_grads=True)
        yield case
        yield case.changed(lr=torch.tensor([SMALL_LR], device=self.device))
        if compact_too:
            yield inputs.step_case(ADAMW, dense, grads, active, self.generator, dense_grads=False)


def _results(case: Case) -> dict[str, Tensor]:
    return case.results() | {name: case.arguments[name] for name in case.summed}


def _list(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _clones(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in _list(value)]


def _work(case: Case) -> str:
    """The op, and what distinguishes its cases."""
    if case.op not in STEP_OPS:
        return case.op
    kind = "compact" if "grad" in case.arguments else "dense"
    return f"{case.op}, {kind} gradients, lr {case.arguments['lr'].item():.0e}"


def _cannot_launch() -> tuple[type[Exception], ...]:
    """The errors of a kernel that needs more than the GPU has."""
    if backends.triton_module()[0] is None:
        return ()
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)


def print_row(row: Row) -> None:
    """Print a measurement as soon as it is there."""
    times = row["why"] or f"{row['ms']:.3f} ms"
    print(f"{row['entry']} {row['value']}, {row['work']}: {times}", flush=True)


def measure_and_save(run: Run, device: torch.device, *, seed: int, n_rounds: int | None) -> None:
    """Tune a GPU and save its table; the run has the times, and the entries that differ from the package's table.

    Raises:
        WrongResult: a value changes the result of a kernel; nothing is saved.
        TuningError: the table could not be saved.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = backends.tuning_key(index)
    start, _ = builtin(key.device, key.compute_capability)
    device = torch.device("cuda", index)
    backends.set_tuning(device, start)
    generator = torch.Generator(device).manual_seed(seed)
    runnable = [name for name in ("triton", "cuda") if not backends.why_unavailable(name, device)]
    tuner = Tuner(device, start, runnable, generator, n_rounds or Tuner.n_rounds, on_row=print_row)
    chosen = tuner.run()
    path = files.save(key, chosen, tuner.rows)
    add_rows(run, tuner.rows, asdict(start), asdict(chosen), tuner.n_rounds)
    # Without the name of the user, because the report may be published.
    shown = f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
    run.note(f"the table is saved in {shown}; `sparse-opt doctor` shows which one is used")


def add_rows(run: Run, found: Sequence[Row], start: Mapping[str, int], chosen: Mapping[str, int], n: int) -> None:
    """The times of all values, each next to that of the package's table, and what was chosen."""
    for row in found:
        case = {"entry": row["entry"], "work": row["work"], "value": row["value"]}
        if row["why"]:
            run.note(f"{row['entry']} {row['value']}: {row['why']}")
            continue
        spread = {"p20": row["p20_ms"], "p80": row["p80_ms"], "n": n}
        peers: dict[str, Any] = {"built-in": {"value": start[row["entry"]]}}
        run.add(ResultRow(suite="tune", case=case, metric="time", unit="ms", value=row["ms"], peers=peers, **spread))
    changes = [name for name in ALLOWED if chosen[name] != start[name]]
    for name in changes:
        run.note(f"{name}: {chosen[name]} instead of {start[name]} ({MEANING[name]})")
    if not changes:
        run.note("no value is faster by 3 % than that of the package's table")
