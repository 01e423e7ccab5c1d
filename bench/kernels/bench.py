"""Benchmark of every op and optimizer on the weights of a 3B model, compared with its bandwidth bound and its peers.

Each row is checked before it is timed. Its floor is the bytes of `floors` divided by the copy rate, which is measured
first in the same run. The tensors take gigabytes, so no data stays in a cache between calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparse_opt import BackendUnavailable, MaskSet, backends, set_l2_fetch_granularity
from sparse_opt.tensors import as_bits

from ..common.rows import TORCH, Row, Work, row_of
from ..common.shapes import LLAMA_3_2_3B_SIZES, Shapes, total_numel
from ..common.timing import Prepared, measure
from . import backward, floors, inputs, peers, targets, tile_gradients
from .cases import Active, Case, DeltaApplyCase, WrongResult, check
from .optimizers import (
    LR,
    SMALL_LR,
    BaseWeightsSwap,
    Gradients,
    active_of,
    changed_share,
    check_base_weights,
    check_first_step,
    check_no_sync,
    check_norm,
    index_itemsize,
    mask_of,
    parameters,
    sparse_adamw,
    step_again,
    swapped_share,
)

# So large that the clip coefficient is 1: a timed clip does all its work without changing the gradients.
NO_CLIP = 1e30
# Parts of the table that can be timed alone.
PARTS = ("weights", "backward", "tiles", "deltas")
STEP_NAMES: dict[Gradients, str] = {"dense": targets.STEP_DENSE, "compact": targets.STEP_COMPACT}


@dataclass
class KernelBench:
    """Fills the table.

    Args:
        shapes: shapes of the weight matrices; parameters and gradients are bf16.
        device: the device of all tensors.
        backends: the backends to time.
        densities: densities of the masks over the weights.
        patterns: patterns of the run and tile masks, at `pattern_density`.
        delta_numel: elements of the bf16 tensor that is encoded, and of the copy.
        delta_densities: shares of changed elements.
        n_rounds: timed calls of each row.
        with_peers: also time the optimizers of other packages.
        backward_sizes: sizes of the model whose backward pass is timed (see `backward.llama`); None skips it.
        tile_tokens: token counts of the tile weight gradients, the largest first; an empty sequence skips them.
        parts: the subset of `PARTS` that is timed; the copy always is.
        on_row: called with each row when it is measured.
        on_failure: called with each failed check; failed cases are not timed.
    """

    shapes: Shapes
    device: torch.device
    backends: Sequence[str]
    densities: Sequence[float] = (0.025, 0.1)
    patterns: Sequence[str] = ("run16", "run32", "tile64", "tile128")
    pattern_density: float = 0.025
    delta_numel: int = 2**30
    delta_densities: Sequence[float] = (0.01, 0.025, 0.1)
    n_rounds: int = 20
    seed: int = 0
    with_peers: bool = True
    backward_sizes: Mapping[str, int] | None = field(default_factory=lambda: LLAMA_3_2_3B_SIZES)
    tile_tokens: Sequence[int] = (8192, 1024)
    parts: Collection[str] = PARTS
    on_row: Callable[[Row], None] = lambda row: None
    on_failure: Callable[[str], None] = lambda failure: None
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # rows that were not timed -> reason
    peer_versions: dict[str, str] = field(default_factory=dict)
    start: list[Tensor] = field(default_factory=list)
    copy_rate: float = 0.0  # bytes per second, read plus written

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def run(self) -> None:
        """Time all rows. Failed checks are recorded in `failures`; other errors propagate, except those of peers."""
        self._copy()
        if "weights" in self.parts:
            self._weights()
        if "backward" in self.parts:
            self._backward()
        if "tiles" in self.parts:
            self._tile_gradients()
        if "deltas" in self.parts:
            for density in self.delta_densities:
                self._delta(density)

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_dict() for row in self.rows]
        return {
            "n_matrices": len(self.shapes),
            "numel": total_numel(self.shapes),
            "delta_numel": self.delta_numel,
            "parts": list(self.parts),
            "copy_gb_per_s": self.copy_rate / 1e9,
            "floor_counting": floors.COUNTING,
            "rows": rows,
            "targets": [verdict.as_dict() for verdict in targets.judge(rows)],
            "left_out": self.left_out,
            "peer_versions": self.peer_versions,
        }

    def _copy(self) -> None:
        source = torch.randn(self.delta_numel, dtype=torch.bfloat16, device=self.device, generator=self.generator)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        timing = measure({"copy": copy}, device=self.device, n_rounds=self.n_rounds)["copy"]
        nbytes = 2 * source.nbytes
        self.copy_rate = nbytes / (1e-3 * timing.ms)
        self._add(Row("copy", TORCH, None, timing, nbytes, timing.ms))

    # On the weights

    def _weights(self) -> None:
        params = inputs.random_tensors(self.shapes, torch.bfloat16, self.generator, scale=0.02)
        self.start = [param.clone() for param in params]
        grads = inputs.random_tensors(self.shapes, torch.bfloat16, self.generator, scale=1e-3)
        for i, density in enumerate(self.densities):
            active = inputs.random_active(params, density, self.generator)
            self._op_steps(params, grads, active, density)
            self._gather_and_swap(params, grads, active, density, peer=i == 0)
            mask = mask_of(self._named(params), active)
            self._optimizers(params, grads, mask, active, density, self._fused_step(params, grads) if i == 0 else [])
            if i == 0:
                self._time(self._other_dense_steps(params, grads, mask))
            self._base_weights(params, grads, mask, density)
            self._fine_fetches(params, grads, mask, active, density, with_dense=i == 0)
        for pattern in self.patterns:
            self._pattern(params, grads, pattern)
        if self.with_peers:
            for peer in peers.PEERS:
                self._peer(peer, params, grads)

    def _op_steps(self, params: list[Tensor], grads: list[Tensor], active: Active, density: float) -> None:
        narrow = inputs.narrowed(active)
        for kind in STEP_NAMES:
            name = f"indexed_adamw_, {kind} gradients"
            self._restart(params)
            wide = inputs.adamw_case(params, grads, active, self.generator, dense_grads=kind == "dense")
            cases = {name: dataclasses.replace(wide, active=narrow), name + targets.WIDE: wide}
            # Restart from the same weights: under a constant gradient they grow until a step no longer changes a bit.
            self._cases(cases, density, before=functools.partial(self._restart, params))

    def _gather_and_swap(
        self, params: list[Tensor], grads: list[Tensor], active: Active, density: float, *, peer: bool
    ) -> None:
        others = []
        if peer:
            named = parameters(self._named(params))
            for param, grad in zip(named.values(), grads, strict=True):
                param.grad = grad
            clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(named.values()), NO_CLIP)
            nbytes = floors.dense_clip_bytes(total_numel(self.shapes), grad_itemsize=2)
            others = [Work("torch.nn.utils.clip_grad_norm_", TORCH, None, clip, nbytes)]
        narrow = inputs.narrowed(active)
        gathers = {targets.GATHER: narrow, targets.GATHER + targets.WIDE: active}
        self._cases({name: inputs.gather_case(grads, where) for name, where in gathers.items()}, density, others)
        swaps = {targets.SWAP: narrow, targets.SWAP + targets.WIDE: active}
        self._cases({name: inputs.swap_case(params, where, self.generator) for name, where in swaps.items()}, density)

    def _fused_step(self, params: list[Tensor], grads: list[Tensor]) -> list[Work]:
        step = peers.torch_adamw_step(parameters(self._named(params)), grads, fused=True)
        nbytes = floors.dense_adamw_bytes(total_numel(self.shapes), param_itemsize=2)
        return [Work(peers.FUSED, TORCH, None, step, nbytes)]

    def _other_dense_steps(self, params: list[Tensor], grads: list[Tensor], mask: MaskSet) -> list[Work]:
        """torch's foreach AdamW over all elements, and a masked step without sparse kernels.

        Their states and copies take several times the size of the model, so they are made after the others are freed.
        """
        numel = total_numel(self.shapes)
        nbytes = floors.dense_adamw_bytes(numel, param_itemsize=2)
        foreach, masked = (parameters(self._named(params)) for _ in range(2))
        bools = [mask.bool(name).to(self.device) for name in mask.names]
        copies = [grad.clone() for grad in grads]
        return [
            Work(peers.FOREACH, TORCH, None, peers.torch_adamw_step(foreach, grads, fused=False), nbytes),
            Work(
                peers.MASKED,
                TORCH,
                None,
                peers.masked_adamw_step(masked, copies, bools),
                floors.dense_adamw_bytes(numel, param_itemsize=2, mask_itemsize=1),
            ),
        ]

    def _optimizers(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        mask: MaskSet,
        active: Active,
        density: float,
        others: Sequence[Work],
    ) -> None:
        """SparseAdamW as users call it, on the backend that `auto` selects."""
        works = []
        for kind, name in STEP_NAMES.items():
            for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, targets.BF16)):
                step = self._step(name + suffix, params, grads, mask, active, density, kind=kind, state_dtype=dtype)
                works += step
            works += self._step(name + targets.SMALL, params, grads, mask, active, density, kind=kind, lr=SMALL_LR)
        self._time([*works, *others])

        named, named_grads = parameters(self._named(params)), self._named(grads)
        optimizer = sparse_adamw(named, named_grads, mask, "compact")
        clip = functools.partial(optimizer.clip_grad_norm_, NO_CLIP)
        if self._sound(targets.CLIP, functools.partial(check_norm, optimizer, named_grads, active)) and self._sound(
            targets.CLIP, functools.partial(check_no_sync, targets.CLIP, clip, self.device)
        ):
            self._time([Work(targets.CLIP, self._auto("indexed_adamw_"), density, clip, None, is_auto=True)])

    def _step(
        self,
        name: str,
        params: list[Tensor],
        grads: list[Tensor],
        mask: MaskSet,
        active: Active,
        density: float,
        *,
        kind: Gradients,
        state_dtype: torch.dtype = torch.float32,
        backend: str | None = None,
        lr: float = LR,
    ) -> list[Work]:
        """The step of one SparseAdamW, if its first step is correct."""
        self._restart(params)
        named, named_grads = parameters(self._named(params)), self._named(grads)
        optimizer = sparse_adamw(named, named_grads, mask, kind, backend, state_dtype=state_dtype, lr=lr)
        if not self._sound(name, functools.partial(check_first_step, optimizer, named, named_grads, active)):
            return []
        held, changed = optimizer.nbytes(), changed_share(optimizer, named, mask.nnz)
        nbytes = floors.adamw_bytes(
            mask.numel,
            mask.nnz,
            param_itemsize=2,
            grad_itemsize=2 if kind == "dense" else 4,
            dense_grads=kind == "dense",
            moment_itemsize=state_dtype.itemsize,
            index_itemsize=index_itemsize(optimizer),
            pattern=mask.pattern,
            changed=changed,
        )
        auto = self._auto("indexed_adamw_")
        per_active = (held["indices"] + held["state"]) / mask.nnz
        taken = backend or auto
        step = functools.partial(step_again, optimizer)
        return [Work(name, taken, density, step, nbytes, taken == auto, per_active, changed)]

    def _base_weights(
        self, params: list[Tensor], grads: list[Tensor], mask: MaskSet, density: float, fetches: str = ""
    ) -> None:
        self._restart(params)
        named = parameters(self._named(params))
        swap = BaseWeightsSwap(sparse_adamw(named, self._named(grads), mask, "dense", keep_base_weights=True))
        if not self._sound("SparseAdamW.base_weights", functools.partial(check_base_weights, swap, named)):
            return
        size = index_itemsize(swap.optimizer)
        changed = swapped_share(swap, named, mask.nnz)
        nbytes = floors.swap_bytes(mask.numel, mask.nnz, itemsize=2, index_itemsize=size, changed=changed)
        backend = self._auto("indexed_swap_")
        enter, leave = Prepared(swap.be_outside, swap.enter), Prepared(swap.be_inside, swap.leave)
        self._time(
            [
                Work(targets.BASE_IN + fetches, backend, density, enter, nbytes, is_auto=True, changed=changed),
                Work(targets.BASE_OUT + fetches, backend, density, leave, nbytes, is_auto=True, changed=changed),
            ]
        )
        swap.be_outside()

    def _fine_fetches(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        mask: MaskSet,
        active: Active,
        density: float,
        *,
        with_dense: bool,
    ) -> None:
        """Ops on single elements with `set_l2_fetch_granularity(32)`, and the dense step for comparison."""
        if self.device.type == "cpu":
            return
        try:
            before = set_l2_fetch_granularity(32, self.device)
        except (BackendUnavailable, RuntimeError) as error:
            self.left_out[f"rows{targets.FINE}"] = str(error).partition("\n")[0]
            return
        try:
            gather = inputs.gather_case(grads, inputs.narrowed(active))
            self._cases({targets.GATHER + targets.FINE: gather}, density, only=self._auto("masked_grad_gather_"))
            works = []
            if with_dense:
                works += [work._replace(name=work.name + targets.FINE) for work in self._fused_step(params, grads)]
            for kind, name in STEP_NAMES.items():
                for lr, suffix in ((LR, ""), (SMALL_LR, targets.SMALL)):
                    step = name + suffix + targets.FINE
                    works += self._step(step, params, grads, mask, active, density, kind=kind, lr=lr)
            self._time(works)
            self._base_weights(params, grads, mask, density, targets.FINE)
        finally:
            set_l2_fetch_granularity(before, self.device)

    def _pattern(self, params: list[Tensor], grads: list[Tensor], pattern: str) -> None:
        mask = MaskSet.random(self.shapes, density=self.pattern_density, pattern=pattern, seed=self.seed)
        name = f"{targets.STEP_DENSE}, {pattern}"
        if not mask.nnz:
            self.left_out[name] = f"{self.pattern_density:.1%} of matrices this small is no {pattern} unit"
            return
        active = active_of(mask, self.device)
        density = self.pattern_density
        works = []
        for backend in self.backends:
            works += self._step(name, params, grads, mask, active, density, kind="dense", backend=backend)
        self._time(works)

    def _peer(self, peer: peers.Peer, params: list[Tensor], grads: list[Tensor]) -> None:
        if why := peer.why_absent(self.device):
            self.left_out[peer.name] = why
            return
        self.peer_versions[peer.name] = peer.version()
        try:
            step = peers.peer_step(peer, parameters(self._named(params)), grads)
            self._time([Work(peer.name, TORCH, None, step, peer.nbytes(total_numel(self.shapes)))])
        except Exception as error:  # another package's error, of any type: reported, and the run continues
            first_line = str(error).strip().partition("\n")[0]
            self.left_out[peer.name] = f"FAILED: {type(error).__name__}: {first_line}"

    # A backward pass and deltas

    def _backward(self) -> None:
        if self.backward_sizes is None:
            return
        if why := backward.why_absent():
            self.left_out[targets.BACKWARD_HOOKS] = why
            return
        works: list[Work] = []

        def make() -> None:
            assert self.backward_sizes is not None
            works.extend(backward.backward_works(self.backward_sizes, self.device, self.densities[0], self.seed))

        if self._sound(targets.BACKWARD_HOOKS, make):
            self._time(works)

    def _tile_gradients(self) -> None:
        if not self.tile_tokens:
            return
        self.start.clear()  # free the copy of the initial weights, which is no longer needed
        shapes = tile_gradients.linear_layers(self.shapes)
        if why := tile_gradients.why_absent(shapes, self.tile_tokens[0], self.device):
            self.left_out[f"weight gradients, {self.tile_tokens[0]} tokens"] = why
            return
        for works, n_rounds in tile_gradients.Comparisons(
            shapes, self.tile_tokens, self.backends, self.generator, self._sound
        ):
            self._time(works, min(n_rounds, self.n_rounds))
            works.clear()  # free their tensors before the next are made

    def _delta(self, density: float) -> None:
        old = inputs.random_tensors({"weight": (self.delta_numel,)}, torch.bfloat16, self.generator)
        case = inputs.delta_encode_case(old, density, self.generator)
        peer = functools.partial(torch_encode, old[0], case.new[0])
        others = [Work(targets.TORCH_ENCODE, TORCH, density, peer, case.floor_bytes)]
        self._cases({targets.ENCODE: case}, density, others)

        indices, values, _ = torch.ops.sparse_opt.delta_encode(old, case.new, backend="reference")
        active = Active(indices, [0], [len(indices)])
        self._cases({targets.APPLY: DeltaApplyCase(dense=old, active=active, values=values)}, density)

    # Shared code

    def _restart(self, params: list[Tensor]) -> None:
        """Restore the initial weights: after many steps they are so large that a small step changes no bit."""
        for param, start in zip(params, self.start, strict=True):
            param.copy_(start)

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.shapes, tensors, strict=True))

    def _auto(self, op: str) -> str:
        return backends.choose(op, self.device)

    def _cases(
        self,
        cases: Mapping[str, Case],
        density: float,
        others: Sequence[Work] = (),
        before: Callable[[], object] | None = None,
        only: str | None = None,
    ) -> None:
        """Check the cases on each backend, then time those that pass, and the other works, in turns.

        Args:
            before: called before each call of a case, untimed.
            only: check and time only this backend.
        """

        def call(case: Case, backend: str) -> Callable[[], object]:
            run = functools.partial(case.run, backend)
            return run if before is None else Prepared(before, run)

        works = [
            Work(
                name,
                backend,
                density,
                call(case, backend),
                case.floor_bytes,
                backend == self._auto(case.op),
            )
            for name, case in cases.items()
            for backend in self.backends
            if only in (None, backend) and self._sound(name, functools.partial(check, case, backend))
        ]
        self._time([*works, *others])

    def _sound(self, name: str, run_check: Callable[[], None]) -> bool:
        try:
            run_check()
        except WrongResult as error:
            self.failures.append(f"{name}: {error}")
            self.on_failure(self.failures[-1])
            return False
        return True

    def _time(self, works: Sequence[Work], n_rounds: int | None = None) -> None:
        calls = {str(i): work.call for i, work in enumerate(works)}
        timings = measure(calls, device=self.device, n_rounds=n_rounds or self.n_rounds)
        for work, timing in zip(works, timings.values(), strict=True):
            self._add(row_of(work, timing, self.copy_rate))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.on_row(row)


def torch_encode(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The closest torch operations to delta_encode."""
    where = (as_bits(old) != as_bits(new)).nonzero().view(-1)
    return where, new.view(-1)[where]
