"""Every op on the weights of a 3B model: checked, timed, and set beside its floor and torch's time for the same work.

The floor of a row is the bytes of `floors` over the copy rate, which is measured first in the same run. The tensors are
gigabytes, so nothing of a call is left in a cache for the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_opt import backends
from sparse_opt.ops.reference import as_bits

from . import floors, inputs
from .cases import Active, Case, DeltaApplyCase, WrongResult, check
from .optimizers import (
    Gradients,
    check_first_step,
    check_norm,
    mask_of,
    parameters,
    sparse_adamw,
    torch_adamw,
)
from .shapes import Shapes, total_numel
from .timing import Timing, measure

TORCH = "torch"
# So large that the coefficient is 1: a timed clip does all its work and leaves the gradients as they are.
NO_CLIP = 1e30


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    backend: str
    density: float | None  # None where the work does not depend on it
    timing: Timing
    nbytes: float | None  # the fewest that the work needs to move
    floor_ms: float | None

    @property
    def share_of_floor(self) -> float | None:
        """Floor over time: 1 is as fast as memory allows."""
        return None if self.floor_ms is None else self.floor_ms / self.timing.ms

    def as_dict(self) -> dict[str, Any]:
        timing = self.timing.as_dict()
        found = {"work": self.work, "backend": self.backend, "density": self.density, **timing}
        return {**found, "bytes": self.nbytes, "floor_ms": self.floor_ms, "share_of_floor": self.share_of_floor}


class Work(NamedTuple):
    """What is timed, and its row's description."""

    name: str
    backend: str
    density: float | None
    call: Callable[[], object]
    nbytes: float | None


@dataclass
class KernelBench:
    """Fills the table.

    Args:
        shapes: the weight matrices; parameters and gradients are bf16.
        device: where everything runs.
        backends: those to time.
        densities: of the masks over the weights.
        delta_numel: elements of the bf16 tensor that is encoded, and of the copy.
        delta_densities: shares of changed elements.
        n_rounds: timed calls of each row.
        on_row: called with each row as it comes.
        on_failure: called with each failed check; what failed is not timed.
    """

    shapes: Shapes
    device: torch.device
    backends: Sequence[str]
    densities: Sequence[float] = (0.025, 0.1)
    delta_numel: int = 2**30
    delta_densities: Sequence[float] = (0.01, 0.025, 0.1)
    n_rounds: int = 20
    seed: int = 0
    on_row: Callable[[Row], None] = lambda row: None
    on_failure: Callable[[str], None] = lambda failure: None
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    copy_rate: float = 0.0  # bytes a second, those read and those written together

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def run(self) -> None:
        """Time everything. What a check refuses is in `failures`; other errors pass through."""
        self._copy()
        self._weights()
        for density in self.delta_densities:
            self._delta(density)

    def as_dict(self) -> dict[str, Any]:
        return {
            "n_matrices": len(self.shapes),
            "numel": total_numel(self.shapes),
            "delta_numel": self.delta_numel,
            "copy_gb_per_s": self.copy_rate / 1e9,
            "rows": [row.as_dict() for row in self.rows],
        }

    def _copy(self) -> None:
        source = torch.randn(self.delta_numel, dtype=torch.bfloat16, device=self.device, generator=self.generator)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        timing = measure({"copy": copy}, device=self.device, n_rounds=self.n_rounds)["copy"]
        nbytes = 2 * source.nbytes
        self.copy_rate = nbytes / (1e-3 * timing.ms)
        self._add(Row("copy", TORCH, None, timing, nbytes, timing.ms))

    def _weights(self) -> None:
        params = inputs.random_tensors(self.shapes, torch.bfloat16, self.generator, scale=0.02)
        grads = inputs.random_tensors(self.shapes, torch.bfloat16, self.generator, scale=1e-3)
        for i, density in enumerate(self.densities):
            active = inputs.random_active(params, density, self.generator)
            self._steps(params, grads, active, density, peer=i == 0)
            self._gather_and_swap(params, grads, active, density, peer=i == 0)
            self._optimizer(params, grads, active, density)

    def _steps(self, params: list[Tensor], grads: list[Tensor], active: Active, density: float, *, peer: bool) -> None:
        for kind in ("dense", "compact"):
            case = inputs.adamw_case(params, grads, active, self.generator, dense_grads=kind == "dense")
            peers = []
            if peer and kind == "dense":
                step = torch_adamw(parameters(self._named(params)), self._named(grads)).step
                nbytes = floors.dense_adamw_bytes(total_numel(self.shapes), param_itemsize=2)
                peers = [Work("torch.optim.AdamW(fused=True).step", TORCH, None, step, nbytes)]
            self._case(f"indexed_adamw_, {kind} gradients", case, density, peers)

    def _gather_and_swap(
        self, params: list[Tensor], grads: list[Tensor], active: Active, density: float, *, peer: bool
    ) -> None:
        peers = []
        if peer:
            named = parameters(self._named(params))
            for param, grad in zip(named.values(), grads, strict=True):
                param.grad = grad
            clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(named.values()), NO_CLIP)
            nbytes = floors.dense_clip_bytes(total_numel(self.shapes), grad_itemsize=2)
            peers = [Work("torch.nn.utils.clip_grad_norm_", TORCH, None, clip, nbytes)]
        self._case("masked_grad_gather_", inputs.gather_case(grads, active), density, peers)
        self._case("indexed_swap_", inputs.swap_case(params, active, self.generator), density)

    def _optimizer(self, params: list[Tensor], grads: list[Tensor], active: Active, density: float) -> None:
        """SparseAdamW as it is used, on the backend that is taken where none is named."""
        backend = backends.choose("indexed_adamw_", self.device.type)
        named_grads = self._named(grads)
        mask = mask_of(self._named(params), active)
        kinds: tuple[Gradients, ...] = ("dense", "compact")
        for kind in kinds:
            named = parameters(self._named(params))
            optimizer = sparse_adamw(named, named_grads, mask, kind)
            nbytes = floors.adamw_bytes(
                mask.numel,
                mask.nnz,
                param_itemsize=2,
                grad_itemsize=2 if kind == "dense" else 4,
                dense_grads=kind == "dense",
            )
            name = f"SparseAdamW.step, {kind} gradients"
            if self._sound(name, functools.partial(check_first_step, optimizer, named, named_grads, active)):
                self._time([Work(name, backend, density, optimizer.step, nbytes)])
            if kind == "compact":
                name = "SparseAdamW.clip_grad_norm_"
                if self._sound(name, functools.partial(check_norm, optimizer, named_grads, active)):
                    clip = functools.partial(optimizer.clip_grad_norm_, NO_CLIP)
                    self._time([Work(name, backend, density, clip, None)])

    def _delta(self, density: float) -> None:
        old = inputs.random_tensors({"weight": (self.delta_numel,)}, torch.bfloat16, self.generator)
        case = inputs.delta_encode_case(old, density, self.generator)
        peer = functools.partial(torch_encode, old[0], case.new[0])
        self._case("delta_encode", case, density, [Work("ne, nonzero, index", TORCH, density, peer, case.floor_bytes)])

        indices, values, _ = torch.ops.sparse_opt.delta_encode(old, case.new, backend="reference")
        active = Active(indices, [0], [len(indices)])
        self._case("delta_apply_", DeltaApplyCase(dense=old, active=active, values=values), density)

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.shapes, tensors, strict=True))

    def _case(self, name: str, case: Case, density: float, peers: Sequence[Work] = ()) -> None:
        """Check the case on each backend; time those that are right, and the peers, in turns."""
        works = [
            Work(name, backend, density, functools.partial(case.run, backend), case.floor_bytes)
            for backend in self.backends
            if self._sound(name, functools.partial(check, case, backend))
        ]
        self._time([*works, *peers])

    def _sound(self, name: str, run_check: Callable[[], None]) -> bool:
        try:
            run_check()
        except WrongResult as error:
            self.failures.append(f"{name}: {error}")
            self.on_failure(self.failures[-1])
            return False
        return True

    def _time(self, works: Sequence[Work]) -> None:
        calls = {str(i): work.call for i, work in enumerate(works)}
        timings = measure(calls, device=self.device, n_rounds=self.n_rounds)
        for work, timing in zip(works, timings.values(), strict=True):
            floor_ms = None if work.nbytes is None else 1e3 * work.nbytes / self.copy_rate
            self._add(Row(work.name, work.backend, work.density, timing, work.nbytes, floor_ms))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.on_row(row)


def torch_encode(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """What torch has for delta_encode."""
    where = (as_bits(old) != as_bits(new)).nonzero().view(-1)
    return where, new.view(-1)[where]
