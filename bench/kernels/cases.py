"""`Case`: an op with one set of inputs, and its check against the reference.

A check overwrites the outputs with NaN, runs the op on a backend and on the reference, and compares all elements of
every tensor that the op writes bit by bit, including elements that must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from sparse_opt import ops
from sparse_opt.tensors import as_bits

from ..harness import WrongResult as WrongResult
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
