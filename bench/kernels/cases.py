"""`Case`: an op with one set of inputs, and its check against the reference. Cases of every op with random inputs.

A check overwrites the outputs with NaN, runs the op on a backend and on the reference, and compares all elements of
every tensor that the op writes bit by bit, including elements that must not change. Random inputs are generated on the
device that runs the op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from sparse_opt import ops
from sparse_opt.masks.patterns import expand_units, unit_grid
from sparse_opt.ops import STEP_OPS, narrow_indices, tile_table
from sparse_opt.tensors import as_bits

from ..harness import WrongResult as WrongResult
from . import bounds
from .bounds import Traffic

# For two fp32 sums of the same squares in different orders: a thread's chain and the reduction tree above it take fewer
# than 128 sequential additions for a segment that fits a GPU, and each rounds by 2^-24 of a sum of positive terms.
SUM_RTOL = 128 * 2.0**-24


@dataclass(frozen=True)
class Active:
    """The active elements of a list of tensors, in the form that the ops take."""

    indices: Tensor  # [nnz] int32, or uint16 with bases
    starts: list[int]
    ends: list[int]
    index_bases: Tensor | None = None

    @property
    def nnz(self) -> int:
        return self.indices.numel()

    def arguments(self) -> dict[str, Any]:
        """The arguments of an op that describe the active elements."""
        bases = {} if self.index_bases is None else {"index_bases": self.index_bases}
        return {"indices": self.indices, "starts": self.starts, "ends": self.ends, **bases}


@dataclass
class Case:
    """One op on one set of inputs.

    Args:
        op: name of a function of `sparse_opt.ops`.
        arguments: its arguments except `backend`.
        traffic: minimum memory traffic of a call.
        written: arguments that the op writes, to compare bit by bit.
        summed: arguments that the op sets to sums, to compare to rounding.
        overwritten: arguments that the op writes in full. They are set to NaN before a check.
        returned: names of the results.
    """

    op: str
    arguments: dict[str, Any]
    traffic: Traffic
    written: Sequence[str] = ()
    summed: Sequence[str] = ()
    overwritten: Sequence[str] = ()
    returned: Sequence[str] = ()
    result: Sequence[Tensor] = field(default=(), init=False)

    def run(self, backend: str | None) -> None:
        self.result = ()  # free the last run's buffers first, as a caller that ships patches does
        result = getattr(ops, self.op)(**self.arguments, backend=backend)
        self.result = () if result is None else result

    def results(self) -> dict[str, Tensor]:
        """The outputs of the last run."""
        written = {
            f"{name}[{i}]": tensor for name in self.written for i, tensor in enumerate(_tensors(self.arguments[name]))
        }
        return written | dict(zip(self.returned, self.result, strict=True))

    def changed(self, **arguments: Any) -> Self:
        """A copy with some other arguments."""
        return replace(self, arguments=self.arguments | arguments)

    def mapped(self, function: Callable[[Tensor], Tensor], names: Sequence[str] | None = None) -> Self:
        """A copy of this case with ``function`` applied to the tensors of all arguments, or of the named ones."""
        chosen = self.arguments if names is None else {name: self.arguments[name] for name in names}
        return self.changed(**{name: _mapped(value, function) for name, value in chosen.items()})


def check(case: Case, backend: str, oracle: Case | None = None) -> None:
    """Run ``case`` on ``backend`` and the reference on equal inputs; raise WrongResult unless the results agree.

    Args:
        oracle: the case that the reference runs on, with equal contents; by default a copy on the same device.
    """
    oracle = oracle or case.mapped(torch.clone, (*case.written, *case.summed))
    for each in (case, oracle):
        for name in each.overwritten:
            each.arguments[name].fill_(float("nan"))
    oracle.run("reference")
    case.run(backend)
    where = f"{case.op} on backend {backend}"
    expected = oracle.results()
    for name, found in case.results().items():
        check_bits(f"{where}: {name}", found, expected[name])
    for name in case.summed:
        _check_sum(f"{where}: {name}", case.arguments[name], oracle.arguments[name])


def check_bits(what: str, found: Tensor, expected: Tensor) -> None:
    """Raise WrongResult, with a message that begins with ``what``, unless the tensors hold the same bits."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise WrongResult(
            f"{what} is {found.dtype} of shape {list(found.shape)}, expected {expected.dtype} of {list(expected.shape)}"
        )
    found = found.to(expected.device)
    if torch.equal(as_bits(found), as_bits(expected)):
        return
    wrong = (as_bits(found) != as_bits(expected)).nonzero().view(-1)
    first = int(wrong[0])
    raise WrongResult(
        f"{what}: {len(wrong)} of {found.numel()} elements differ from the reference; at {first} found "
        f"{found.view(-1)[first].item()!r}, expected {expected.view(-1)[first].item()!r}"
    )


def _check_sum(what: str, found: Tensor, expected: Tensor) -> None:
    found = found.to(expected.device)
    wrong = ~((found - expected).abs() <= SUM_RTOL * expected)  # negated, so that NaN counts as wrong
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise WrongResult(
            f"{what}[{first}]: found {found[first].item()!r}, expected {expected[first].item()!r} to a relative "
            f"{SUM_RTOL:.1e}"
        )


def _tensors(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [function(tensor) for tensor in value]
    return value


# Random inputs

# So large that a step changes the bits of nearly every active weight, as the bandwidth bounds assume.
LR = 1.0
# The share of elements that replace_case changes.
REPLACED = 0.02
TOKENS = 512  # tokens in the batch of the weight gradients


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> list[Tensor]:
    """Normal random values with standard deviation ``scale``, on the generator's device."""
    return [
        torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).mul_(scale)
        for shape in shapes.values()
    ]


def random_active(dense: Sequence[Tensor], density: float, generator: torch.Generator) -> Active:
    """A random mask over ``dense``, on its device: each element is active with probability ``density``."""
    found = [
        (torch.rand(t.numel(), device=t.device, generator=generator) < density).nonzero().view(-1).to(torch.int32)
        for t in dense
    ]
    return Active(torch.cat(found), *segments(map(len, found)))


def segments(sizes: Iterable[int]) -> tuple[list[int], list[int]]:
    """The starts and ends of consecutive segments of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [0, *ends[:-1]], ends


def narrowed(active: Active) -> Active:
    """The same elements with two-byte indices, as the optimizer stores them."""
    indices, index_bases = narrow_indices(active.indices, active.starts, active.ends)
    return Active(indices, active.starts, active.ends, index_bases)


def step_case(
    op: str, params: list[Tensor], grads: list[Tensor], active: Active, generator: torch.Generator, *, dense_grads: bool
) -> Case:
    """The third step of an optimizer with fp32 states; the gradient is ``grads``, or a compact fp32 one.

    Options that switch an optional state on are 0.9.
    """
    device, definition = generator.device, STEP_OPS[op]

    def compact(scale: float) -> Tensor:
        return torch.randn(active.nnz, device=device, generator=generator).mul_(scale)

    # The second moments, which are named *_sq, are not negative.
    states = {s: compact(1e-3).square_() if s.endswith("_sq") else compact(1e-3) for s in definition.states}
    return step_case_of(
        op,
        params,
        active,
        states,
        lr=LR,
        step=3,
        **({"dense_grads": grads} if dense_grads else {"grad": compact(1.0)}),
        **dict.fromkeys(definition.optional.values(), 0.9),
    )


def step_case_of(
    op: str, params: list[Tensor], active: Active, states: Mapping[str, Tensor], *, lr: float, step: int, **options: Any
) -> Case:
    """The step of an optimizer with these states; ``options`` are other arguments of the op, a gradient among them."""
    device = active.indices.device
    arguments = {
        "params": params,
        **active.arguments(),
        **states,
        "lr": torch.tensor([lr], device=device),
        "steps": torch.full((len(params),), float(step), device=device),
        **options,
    }
    return Case(op, arguments, bounds.of_step(arguments), written=("params", *states))


def gather_case(grads: list[Tensor], active: Active) -> Case:
    """masked_grad_gather_ into a compact fp32 gradient with the sums that clipping uses, as in the optimizer."""
    outputs = _gradient_outputs(active.nnz, len(grads), grads[0].device)
    arguments = {"dense": grads, **active.arguments(), **outputs}
    traffic = bounds.gather_traffic(**_sizes(grads, active))
    return Case("masked_grad_gather_", arguments, traffic, **_GRADIENT_OUTPUTS)


def _sizes(dense: Sequence[Tensor], active: Active) -> dict[str, Any]:
    """What the traffic of an op on active elements follows from."""
    numel, nnz, itemsize = bounds.numel_of(dense), active.nnz, dense[0].element_size()
    return {"numel": numel, "nnz": nnz, "itemsize": itemsize, "index_itemsize": active.indices.element_size()}


def _gradient_outputs(nnz: int, n_tensors: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "out": torch.empty(nnz, device=device),
        "sum_sq": torch.empty(n_tensors, device=device),
        "found_inf": torch.zeros(1, device=device),
    }


_GRADIENT_OUTPUTS: dict[str, Any] = {
    "written": ("out", "found_inf"),
    "summed": ("sum_sq",),
    "overwritten": ("out", "sum_sq"),
}


def tile_weight_grad_case(
    shapes: Iterable[tuple[int, ...]],
    dtype: torch.dtype,
    density: float,
    generator: torch.Generator,
    *,
    tokens: int = TOKENS,
    tile_size: int = 64,
) -> Case:
    """The matrices among ``shapes`` with round(density * tiles) random tiles each, at least one unless 0.

    Operands are small integers: the sums of their products are exact in any order of additions, so that results can be
    compared bit by bit.
    """
    device = generator.device
    matrices = [shape for shape in shapes if len(shape) == 2]
    pattern = f"tile{tile_size}"
    tables: list[Tensor] = []
    slots: list[int] = []
    for shape in matrices:
        n_tiles = math.prod(unit_grid(shape, pattern))
        n_active = max(round(density * n_tiles), 1 if density > 0 else 0)
        chosen = torch.randperm(n_tiles, device=device, generator=generator)[:n_active].sort().values.cpu()
        positions = expand_units(chosen, shape, pattern)
        tables.append(tile_table(positions, shape, tile_size, first_slot=sum(slots)))
        slots.append(positions.numel())

    def integers(width: int) -> Tensor:
        return torch.randint(-8, 9, (tokens, width), device=device, generator=generator).to(dtype)

    starts, ends = segments(map(len, tables))
    arguments = {
        "grad_outputs": [integers(rows) for rows, _ in matrices],
        "inputs": [integers(columns) for _, columns in matrices],
        "tiles": torch.cat(tables).to(device),
        "starts": starts,
        "ends": ends,
        "tile_size": tile_size,
        **_gradient_outputs(sum(slots), len(matrices), device),
    }
    return Case("tile_weight_grad_", arguments, bounds.of_tiles(arguments), **_GRADIENT_OUTPUTS)


def swap_case(dense: list[Tensor], active: Active, generator: torch.Generator) -> Case:
    arguments = {"dense": dense, "compact": _values(dense, active, generator), **active.arguments()}
    traffic = bounds.swap_traffic(**_sizes(dense, active))
    return Case("indexed_swap_", arguments, traffic, written=("dense", "compact"))


def replace_case(dense: list[Tensor], active: Active, generator: torch.Generator) -> Case:
    """A few elements change, as those of a model in few steps at a small learning rate."""
    before = _values(dense, active, generator)
    changes = torch.rand(active.nnz, device=before.device, generator=generator) < REPLACED
    after = torch.where(changes, _values(dense, active, generator), before)
    changed = float(changes.float().mean()) if active.nnz else 0.0
    traffic = bounds.replace_traffic(**_sizes(dense, active), changed=changed)
    arguments = {"dense": dense, "before": before, "after": after, **active.arguments()}
    return Case("indexed_replace_", arguments, traffic, written=("dense",))


def _values(dense: list[Tensor], active: Active, generator: torch.Generator) -> Tensor:
    return torch.randn(active.nnz, dtype=dense[0].dtype, device=dense[0].device, generator=generator)


def delta_encode_case(old: list[Tensor], density: float, generator: torch.Generator) -> Case:
    """``old`` against a copy in which the last bit of each element is flipped with probability ``density``."""
    new, n_changed = [], 0
    for tensor in old:
        flips = torch.rand(tensor.numel(), device=tensor.device, generator=generator) < density
        bits = as_bits(tensor) ^ flips
        new.append(bits.view(tensor.dtype).view(tensor.shape))
        n_changed += int(flips.sum())
    itemsize = old[0].element_size()  # both states are read; indices and values of the changes are written
    traffic = Traffic(2 * bounds.numel_of(old) * itemsize + n_changed * (4 + itemsize))
    returned = ("indices", "values", "counts")
    return Case("delta_encode", {"old": old, "new": new}, traffic, returned=returned)


def delta_apply_case(dense: list[Tensor], active: Active, values: Tensor) -> Case:
    arguments = {"dense": dense, "values": values, **active.arguments()}
    return Case("delta_apply_", arguments, bounds.apply_traffic(**_sizes(dense, active)), written=("dense",))


def random_case(
    op: str,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    density: float,
    generator: torch.Generator,
    *,
    dense_grads: bool = True,
) -> Case:
    """A case of the op ``op`` on random tensors of these shapes; ``dense_grads`` applies to optimizer steps."""

    def step() -> Case:
        params, grads = (random_tensors(shapes, dtype, generator) for _ in range(2))
        active = narrowed(random_active(params, density, generator))
        return step_case(op, params, grads, active, generator, dense_grads=dense_grads)

    def on_active(make: Callable[[list[Tensor], Active], Case], *, narrow: bool = True) -> Case:
        dense = random_tensors(shapes, dtype, generator)
        active = random_active(dense, density, generator)
        return make(dense, narrowed(active) if narrow else active)

    makers: dict[str, Callable[[], Case]] = {
        **dict.fromkeys(STEP_OPS, step),
        "masked_grad_gather_": lambda: on_active(gather_case),
        "tile_weight_grad_": lambda: tile_weight_grad_case(shapes.values(), dtype, density, generator),
        "indexed_swap_": lambda: on_active(lambda dense, active: swap_case(dense, active, generator)),
        "indexed_replace_": lambda: on_active(lambda dense, active: replace_case(dense, active, generator)),
        "delta_encode": lambda: delta_encode_case(random_tensors(shapes, dtype, generator), density, generator),
        "delta_apply_": lambda: on_active(
            lambda dense, active: delta_apply_case(dense, active, _values(dense, active, generator)), narrow=False
        ),
    }
    return makers[op]()
