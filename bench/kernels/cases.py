"""Cases: an op with one set of inputs, its run on a backend, its check against the reference, and the bytes it must
move.

Inputs are random and outputs are poisoned before a check. A check compares all elements of every tensor that the op
writes bit by bit, including elements that must not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sparse_opt import ops
from sparse_opt.tensors import as_bits

from . import floors

# For two fp32 sums of the same squares in different orders: a thread's chain and the reduction tree above it take fewer
# than 128 sequential additions for a segment that fits a GPU, and each rounds by 2^-24 of a sum of positive terms.
SUM_RTOL = 128 * 2.0**-24


class WrongResult(AssertionError):
    """The result of a backend differs from the reference's, so it must not be timed."""


@dataclass
class Active:
    """The active elements of a list of tensors, in the form that the ops take."""

    indices: Tensor  # [nnz] int32, or uint16 with bases
    starts: list[int]
    ends: list[int]
    index_bases: Tensor | None = None

    @property
    def nnz(self) -> int:
        return self.indices.numel()


@dataclass
class Case:
    """One op on one set of inputs. Subclasses hold the op's arguments as fields."""

    op: ClassVar[str]
    written: ClassVar[tuple[str, ...]] = ()  # fields that the op writes, to compare bit by bit
    summed: ClassVar[tuple[str, ...]] = ()  # fields that the op sets to sums, to compare to rounding

    def run(self, backend: str | None) -> None:
        raise NotImplementedError

    def poison(self) -> None:
        """Overwrite the outputs that the op must write in full, so that a missing write is detected."""

    def results(self) -> dict[str, Tensor]:
        """The outputs of the last run."""
        found = {name: getattr(self, name) for name in self.written}
        return {f"{name}[{i}]": t for name, value in found.items() for i, t in enumerate(_as_list(value))}

    @property
    def floor_bytes(self) -> float:
        raise NotImplementedError

    def mapped(self, function: Callable[[Tensor], Tensor], names: Sequence[str] | None = None) -> Self:
        """A copy of this case with ``function`` applied to the tensors of all fields, or of the named ones."""
        other = copy.copy(self)
        for f in fields(self):
            if names is None or f.name in names:
                setattr(other, f.name, _mapped(getattr(self, f.name), function))
        return other


def check(case: Case, backend: str, oracle: Case | None = None) -> None:
    """Run ``case`` on ``backend`` and the reference on equal inputs; raise WrongResult unless the results agree.

    Args:
        oracle: the case that the reference runs on, with equal contents; by default a copy on the same device.
    """
    oracle = oracle or case.mapped(torch.clone, case.written + case.summed)
    case.poison()
    oracle.poison()
    oracle.run("reference")
    case.run(backend)
    where = f"{case.op} on backend {backend}"
    wanted = oracle.results()
    for name, found in case.results().items():
        check_bits(f"{where}: {name}", found, wanted[name])
    for name in case.summed:
        _check_sum(f"{where}: {name}", getattr(case, name), getattr(oracle, name))


def check_bits(what: str, found: Tensor, wanted: Tensor) -> None:
    """Raise WrongResult, with a message that begins with ``what``, unless the tensors hold the same bits."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        raise WrongResult(
            f"{what} is {found.dtype} of shape {list(found.shape)}, wanted {wanted.dtype} of {list(wanted.shape)}"
        )
    found = found.to(wanted.device)
    if torch.equal(as_bits(found), as_bits(wanted)):
        return
    wrong = (as_bits(found) != as_bits(wanted)).nonzero().view(-1)
    first = int(wrong[0])
    raise WrongResult(
        f"{what}: {len(wrong)} of {found.numel()} elements differ from the reference; at {first} found "
        f"{found.view(-1)[first].item()!r}, wanted {wanted.view(-1)[first].item()!r}"
    )


def _check_sum(what: str, found: Tensor, wanted: Tensor) -> None:
    found = found.to(wanted.device)
    wrong = ~((found - wanted).abs() <= SUM_RTOL * wanted)  # negated, so that NaN counts as wrong
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise WrongResult(
            f"{what}[{first}] is {found[first].item()!r}, wanted {wanted[first].item()!r} to a relative {SUM_RTOL:.1e}"
        )


def _as_list(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [function(t) for t in value]
    if isinstance(value, Active):
        bases = None if value.index_bases is None else function(value.index_bases)
        return Active(function(value.indices), value.starts, value.ends, bases)
    return value


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


@dataclass
class StepCase(Case):
    """Base of the optimizer step cases. The gradient is ``grad`` (compact) or ``dense_grads``; the other is None."""

    params: list[Tensor]
    active: Active
    lr: Tensor  # [1] fp32
    steps: Tensor  # [n] fp32
    grad: Tensor | None = None
    dense_grads: list[Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def floor_arguments(self) -> dict[str, Any]:
        gradient = self.dense_grads[0] if self.dense_grads is not None else self.grad
        assert gradient is not None
        return {
            "numel": _numel(self.params),
            "nnz": self.active.nnz,
            "param_itemsize": self.params[0].element_size(),
            "grad_itemsize": gradient.element_size(),
            "dense_grads": self.dense_grads is not None,
            "index_itemsize": self.active.indices.element_size(),
        }


@dataclass
class AdamWCase(StepCase):
    op = "indexed_adamw_"
    written = ("params", "exp_avg", "exp_avg_sq")
    exp_avg: Tensor = field(kw_only=True)
    exp_avg_sq: Tensor = field(kw_only=True)

    def run(self, backend: str | None) -> None:
        ops.indexed_adamw_(
            self.params,
            self.active.indices,
            self.active.starts,
            self.active.ends,
            self.exp_avg,
            self.exp_avg_sq,
            self.lr,
            self.steps,
            grad=self.grad,
            dense_grads=self.dense_grads,
            index_bases=self.active.index_bases,
            backend=backend,
            **self.options,
        )

    @property
    def floor_bytes(self) -> float:
        return floors.adamw_bytes(**self.floor_arguments(), moment_itemsize=self.exp_avg.element_size())


@dataclass
class SGDCase(StepCase):
    op = "indexed_sgd_"
    written = ("params", "momentum_buffer")
    momentum_buffer: Tensor = field(kw_only=True)

    def run(self, backend: str | None) -> None:
        ops.indexed_sgd_(
            self.params,
            self.active.indices,
            self.active.starts,
            self.active.ends,
            self.momentum_buffer,
            self.lr,
            self.steps,
            momentum=0.9,
            grad=self.grad,
            dense_grads=self.dense_grads,
            index_bases=self.active.index_bases,
            backend=backend,
            **self.options,
        )

    @property
    def floor_bytes(self) -> float:
        return floors.sgd_bytes(**self.floor_arguments(), momentum_itemsize=self.momentum_buffer.element_size())


@dataclass
class GatherCase(Case):
    """masked_grad_gather_ with the sum of squares and the non-finite flag, which clipping uses."""

    op = "masked_grad_gather_"
    written = ("out", "found_inf")
    summed = ("sum_sq",)
    out: Tensor
    dense: list[Tensor]
    active: Active
    sum_sq: Tensor
    found_inf: Tensor

    def run(self, backend: str | None) -> None:
        where = self.active.indices, self.active.starts, self.active.ends
        ops.masked_grad_gather_(
            self.out,
            self.dense,
            *where,
            sum_sq=self.sum_sq,
            found_inf=self.found_inf,
            index_bases=self.active.index_bases,
            backend=backend,
        )

    def poison(self) -> None:
        self.out.fill_(float("nan"))
        self.sum_sq.fill_(float("nan"))

    @property
    def floor_bytes(self) -> float:
        return floors.gather_bytes(
            _numel(self.dense),
            self.active.nnz,
            grad_itemsize=self.dense[0].element_size(),
            out_itemsize=self.out.element_size(),
            index_itemsize=self.active.indices.element_size(),
        )


@dataclass
class TileWeightGradCase(Case):
    """tile_weight_grad_ with the sum of squares and the non-finite flag, which clipping uses.

    Operands must be small integers: the sums of their products are exact in any order of additions, so that results can
    be compared bit by bit.
    """

    op = "tile_weight_grad_"
    written = ("out", "found_inf")
    summed = ("sum_sq",)
    out: Tensor
    grad_outputs: list[Tensor]
    inputs: list[Tensor]
    tiles: Tensor  # [k, 4] int64
    starts: list[int]
    ends: list[int]
    slots: list[int]  # number of each matrix's slots
    tile_size: int
    sum_sq: Tensor
    found_inf: Tensor

    def run(self, backend: str | None) -> None:
        ops.tile_weight_grad_(
            self.out,
            self.grad_outputs,
            self.inputs,
            self.tiles,
            self.starts,
            self.ends,
            tile_size=self.tile_size,
            sum_sq=self.sum_sq,
            found_inf=self.found_inf,
            backend=backend,
        )

    def poison(self) -> None:
        self.out.fill_(float("nan"))
        self.sum_sq.fill_(float("nan"))

    @property
    def floor_bytes(self) -> float:
        return sum(
            floors.tile_weight_grad_bytes(
                x.shape[0],
                grad_output.shape[1],
                x.shape[1],
                nnz,
                tile_size=self.tile_size,
                itemsize=x.element_size(),
                out_itemsize=self.out.element_size(),
            )
            for grad_output, x, nnz in zip(self.grad_outputs, self.inputs, self.slots, strict=True)
        )


@dataclass
class SwapCase(Case):
    op = "indexed_swap_"
    written = ("dense", "compact")
    dense: list[Tensor]
    compact: Tensor
    active: Active

    def run(self, backend: str | None) -> None:
        where = self.active.indices, self.active.starts, self.active.ends
        ops.indexed_swap_(self.dense, self.compact, *where, index_bases=self.active.index_bases, backend=backend)

    @property
    def floor_bytes(self) -> float:
        return floors.swap_bytes(
            _numel(self.dense),
            self.active.nnz,
            itemsize=self.compact.element_size(),
            index_itemsize=self.active.indices.element_size(),
        )


@dataclass
class DeltaEncodeCase(Case):
    op = "delta_encode"
    old: list[Tensor]
    new: list[Tensor]
    n_changed: int
    result: tuple[Tensor, Tensor, Tensor] | None = None

    def run(self, backend: str | None) -> None:
        self.result = None  # free the last run's buffers first, as a caller that ships patches does
        self.result = ops.delta_encode(self.old, self.new, backend=backend)

    def results(self) -> dict[str, Tensor]:
        assert self.result is not None
        return dict(zip(("indices", "values", "counts"), self.result, strict=True))

    @property
    def floor_bytes(self) -> float:
        return floors.delta_encode_bytes(_numel(self.new), self.n_changed, itemsize=self.new[0].element_size())


@dataclass
class DeltaApplyCase(Case):
    op = "delta_apply_"
    written = ("dense",)
    dense: list[Tensor]
    active: Active
    values: Tensor

    def run(self, backend: str | None) -> None:
        where = self.active.starts, self.active.ends
        ops.delta_apply_(self.dense, self.active.indices, self.values, *where, backend=backend)

    @property
    def floor_bytes(self) -> float:
        return floors.delta_apply_bytes(
            _numel(self.dense),
            self.active.nnz,
            itemsize=self.values.element_size(),
            index_itemsize=self.active.indices.element_size(),
        )
