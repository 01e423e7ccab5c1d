"""Rows of the kernel table on a model's weights: every op, SparseAdamW as users call it, and the peers.

The tensors take gigabytes, so no data stays in a cache between calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_opt import BackendUnavailable, MaskSet, set_l2_fetch_granularity
from sparse_opt.errors import MaskError
from sparse_opt.ops import STEP_OPS

from ...common.peers import Peer, why_failed
from ...common.shapes import Shapes, total_numel
from ...common.timing import Prepared
from .. import bounds, inputs
from ..bounds import Traffic
from ..cases import Active
from ..optimizers import (
    ADAMW,
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
    step_traffic,
    swapped_share,
)
from . import peers, targets
from .recorder import TORCH, Recorder, Work

# So large that the clip coefficient is 1: a timed clip does all its work without changing the gradients.
NO_CLIP = 1e30
# After so many steps a swap at SMALL_LR exchanges few weights.
FEW_STEPS = 10
STEP_NAMES: dict[Gradients, str] = {"dense": targets.STEP_DENSE, "compact": targets.STEP_COMPACT}


class Masked(NamedTuple):
    """A mask over the weights, in both forms."""

    mask: MaskSet
    active: Active
    density: float


@dataclass
class WeightRows:
    """Times the works on bf16 weights and gradients of ``shapes``.

    Args:
        densities: densities of the masks of single elements.
        patterns: patterns of the run and tile masks, at `pattern_density`.
        with_peers: also time the optimizers of other packages.
    """

    recorder: Recorder
    shapes: Shapes
    generator: torch.Generator
    densities: Sequence[float]
    patterns: Sequence[str]
    pattern_density: float
    seed: int
    with_peers: bool

    def __post_init__(self) -> None:
        self.numel = total_numel(self.shapes)
        self.params = inputs.random_tensors(self.shapes, torch.bfloat16, self.generator, scale=0.02)
        self.start = [param.clone() for param in self.params]
        self.grads = inputs.random_tensors(self.shapes, torch.bfloat16, self.generator, scale=1e-3)
        self.named_grads = self._named(self.grads)

    def run(self) -> None:
        """Time all rows."""
        for i, density in enumerate(self.densities):
            active = inputs.random_active(self.params, density, self.generator)
            masked = Masked(mask_of(self._named(self.params), active), active, density)
            self._op_steps(masked)
            self._gather_and_swap(masked, [self._torch_clip()] if i == 0 else [])
            self._optimizers(masked, [self._fused_step()] if i == 0 else [])
            if i == 0:
                self.recorder.time(self._other_dense_steps(masked.mask))
            self.base_weights(masked)
            for compact_weights in (False, True):
                self.base_weights(masked, lr=SMALL_LR, n_steps=FEW_STEPS, compact_weights=compact_weights)
            self.fine_fetches(masked, with_dense=i == 0)
        for pattern in self.patterns:
            self._pattern(pattern)
        if self.with_peers:
            for peer in peers.PEERS:
                self.peer(peer)

    def _op_steps(self, masked: Masked) -> None:
        narrow = inputs.narrowed(masked.active).arguments()
        for op, kind in itertools.product(STEP_OPS, STEP_NAMES):
            name = f"{op}, {kind} gradients"
            self._restart()
            wide = inputs.step_case(
                op, self.params, self.grads, masked.active, self.generator, dense_grads=kind == "dense"
            )
            cases = {name: wide.changed(**narrow), name + targets.WIDE: wide}
            # Restart from the same weights: under a constant gradient they grow until a step no longer changes a bit.
            self.recorder.time_cases(cases, masked.density, before=self._restart)

    def _gather_and_swap(self, masked: Masked, others: Sequence[Work]) -> None:
        both = {"": inputs.narrowed(masked.active), targets.WIDE: masked.active}
        gathers = {targets.GATHER + name: inputs.gather_case(self.grads, active) for name, active in both.items()}
        self.recorder.time_cases(gathers, masked.density, others)
        swaps = {
            targets.SWAP + name: inputs.swap_case(self.params, active, self.generator) for name, active in both.items()
        }
        self.recorder.time_cases(swaps, masked.density)
        replaces = {
            targets.REPLACE + name: inputs.replace_case(self.params, active, self.generator)
            for name, active in both.items()
        }
        self.recorder.time_cases(replaces, masked.density)

    def _optimizers(self, masked: Masked, others: Sequence[Work]) -> None:
        """SparseAdamW as users call it, on the backend that `auto` selects."""
        works = []
        for kind, name in STEP_NAMES.items():
            works += self._step(name, masked, kind)
            works += self._step(name + targets.BF16, masked, kind, state_dtype=torch.bfloat16)
            works += self._step(name + targets.SMALL, masked, kind, lr=SMALL_LR)
            works += self._step(name + targets.SMALL + targets.KNOWN, masked, kind, lr=SMALL_LR, compact_weights=True)
        self.recorder.time([*works, *others])

        optimizer = sparse_adamw(self._parameters(), self.named_grads, masked.mask, "compact")
        clip = functools.partial(optimizer.clip_grad_norm_, NO_CLIP)
        checks = (
            functools.partial(check_norm, optimizer, self.named_grads, masked.active),
            functools.partial(check_no_sync, targets.CLIP, clip, self.recorder.device),
        )
        if all(self.recorder.passes(targets.CLIP, check) for check in checks):
            self.recorder.time([self._auto_work(targets.CLIP, ADAMW, masked, clip, None)])

    def _auto_work(
        self, name: str, op: str, masked: Masked, call: Prepared | functools.partial[Tensor], traffic: Traffic | None
    ) -> Work:
        return Work(name, self.recorder.auto(op), masked.density, call, traffic, is_auto=True)

    def _step(
        self,
        name: str,
        masked: Masked,
        kind: Gradients,
        *,
        state_dtype: torch.dtype = torch.float32,
        backend: str | None = None,
        lr: float = LR,
        compact_weights: bool = False,
    ) -> list[Work]:
        """The step of one SparseAdamW, if its first step is correct."""
        self._restart()
        named, mask = self._parameters(), masked.mask
        optimizer = sparse_adamw(
            named,
            self.named_grads,
            mask,
            kind,
            backend,
            state_dtype=state_dtype,
            lr=lr,
            compact_weights=compact_weights,
        )
        first_step = functools.partial(check_first_step, optimizer, named, self.named_grads, masked.active)
        if not self.recorder.passes(name, first_step):
            return []
        held, changed = optimizer.nbytes(), changed_share(optimizer, named, mask.nnz)
        auto = self.recorder.auto(ADAMW)

        def prepare() -> None:
            # The optimizers of all rows write the same weights in turns: without a restart, those that step at LR would
            # make them so large that a step at SMALL_LR changes no bit.
            self._restart()
            if compact_weights:
                optimizer.sync_weights()

        work = Work(
            name,
            backend or auto,
            masked.density,
            Prepared(prepare, functools.partial(step_again, optimizer)),
            step_traffic(optimizer, param_itemsize=2, dense_grads=kind == "dense", changed=changed),
            backend in (None, auto),
            (held["indices"] + held["state"] + held["compact_weights"]) / mask.nnz,
            changed,
        )
        return [work]

    def base_weights(
        self,
        masked: Masked,
        fetches: str = "",
        *,
        lr: float = LR,
        n_steps: int = 1,
        compact_weights: bool = False,
    ) -> None:
        """The swaps after `n_steps` steps at this learning rate."""
        self._restart()
        named, mask = self._parameters(), masked.mask
        optimizer = sparse_adamw(
            named, self.named_grads, mask, "dense", keep_base_weights=True, lr=lr, compact_weights=compact_weights
        )
        swap = BaseWeightsSwap(optimizer)
        if not self.recorder.passes("SparseAdamW.base_weights", functools.partial(check_base_weights, swap, named)):
            return
        for _ in range(n_steps - 1):
            step_again(swap.optimizer)
        changed = swapped_share(swap, named, mask.nnz)
        size = index_itemsize(swap.optimizer)
        if compact_weights:
            traffic = bounds.replace_traffic(
                mask.numel, mask.nnz, itemsize=2, compact_itemsizes=4, index_itemsize=size, changed=changed
            )
        else:
            traffic = bounds.swap_traffic(mask.numel, mask.nnz, itemsize=2, index_itemsize=size, changed=changed)
        suffix = (targets.SMALL if lr == SMALL_LR else "") + (targets.KNOWN if compact_weights else "") + fetches
        calls = {
            targets.BASE_IN: Prepared(swap.be_outside, swap.enter),
            targets.BASE_OUT: Prepared(swap.be_inside, swap.leave),
        }
        works = [
            self._auto_work(name + suffix, targets.SWAP, masked, call, traffic)._replace(changed=changed)
            for name, call in calls.items()
        ]
        self.recorder.time(works)
        swap.be_outside()

    def fine_fetches(self, masked: Masked, *, with_dense: bool) -> None:
        """Ops on single elements with `set_l2_fetch_granularity(32)`, and the dense step for comparison."""
        recorder = self.recorder
        if recorder.device.type == "cpu":
            return
        try:
            before = set_l2_fetch_granularity(32, recorder.device)
        except (BackendUnavailable, RuntimeError) as error:
            recorder.left_out[f"rows{targets.FINE}"] = str(error).partition("\n")[0]
            return
        try:
            gather = inputs.gather_case(self.grads, inputs.narrowed(masked.active))
            only = recorder.auto(gather.op)
            recorder.time_cases({targets.GATHER + targets.FINE: gather}, masked.density, only=only)
            works = [self._fused_step(targets.FINE)] if with_dense else []
            for kind, name in STEP_NAMES.items():
                for lr, suffix in ((LR, ""), (SMALL_LR, targets.SMALL)):
                    works += self._step(name + suffix + targets.FINE, masked, kind, lr=lr)
            recorder.time(works)
            self.base_weights(masked, targets.FINE)
        finally:
            set_l2_fetch_granularity(before, recorder.device)

    def _pattern(self, pattern: str) -> None:
        density = self.pattern_density
        name = f"{targets.STEP_DENSE}, {pattern}"
        try:
            mask = MaskSet.random(self.shapes, density=density, pattern=pattern, seed=self.seed)
        except MaskError as error:  # these small matrices have no unit
            self.recorder.left_out[name] = str(error)
            return
        masked = Masked(mask, active_of(mask, self.recorder.device), density)
        works = []
        for backend in self.recorder.backends:
            works += self._step(name, masked, "dense", backend=backend)
        self.recorder.time(works)

    # Peers

    def _torch_clip(self) -> Work:
        named = self._parameters()
        for param, grad in zip(named.values(), self.grads, strict=True):
            param.grad = grad
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(named.values()), NO_CLIP)
        traffic = bounds.dense_clip_traffic(self.numel, grad_itemsize=2)
        return Work("torch.nn.utils.clip_grad_norm_", TORCH, None, clip, traffic)

    def _fused_step(self, fetches: str = "") -> Work:
        step = peers.torch_adamw_step(self._parameters(), self.grads, fused=True)
        traffic = bounds.dense_adamw_traffic(self.numel, param_itemsize=2)
        return Work(peers.FUSED + fetches, TORCH, None, step, traffic)

    def _other_dense_steps(self, mask: MaskSet) -> list[Work]:
        """torch's foreach AdamW over all elements, and a masked step without sparse kernels.

        Their states and copies take several times the size of the model, so they are made after the others are freed.
        """
        bools = [mask.bool(name).to(self.recorder.device) for name in mask.names]
        foreach = peers.torch_adamw_step(self._parameters(), self.grads, fused=False)
        masked = peers.masked_adamw_step(self._parameters(), [grad.clone() for grad in self.grads], bools)
        return [
            Work(name, TORCH, None, step, bounds.dense_adamw_traffic(self.numel, param_itemsize=2, mask_itemsize=size))
            for name, step, size in ((peers.FOREACH, foreach, 0), (peers.MASKED, masked, 1))
        ]

    def peer(self, peer: Peer) -> None:
        """Time the step of another package, or record why not."""
        recorder = self.recorder
        if why := peer.why_absent(recorder.device):
            recorder.left_out[peer.name] = why
            return
        recorder.peer_versions[peer.name] = peer.version()
        try:
            step = peers.peer_step(peer, self._parameters(), self.grads)
            size = peers.STATE_ITEMSIZE
            traffic = bounds.dense_adamw_traffic(self.numel, param_itemsize=2, state_itemsize=size)
            recorder.time([Work(peer.name, TORCH, None, step, traffic)])
        except Exception as error:  # another package's error, of any type: reported, and the run continues
            recorder.left_out[peer.name] = why_failed(error)

    def _restart(self) -> None:
        """Restore the initial weights: after many steps they are so large that a small step changes no bit."""
        for param, start in zip(self.params, self.start, strict=True):
            param.copy_(start)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return parameters(self._named(self.params))

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.shapes, tensors, strict=True))
