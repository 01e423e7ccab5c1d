"""The timed optimizers, which keep their gradients so that they can step repeatedly, and checks of their results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.tensors import as_bits

from .cases import SUM_RTOL, Active, AdamWCase, WrongResult, check_bits

Named = dict[str, nn.Parameter]
Gradients = Literal["dense", "compact"]

# The same for all optimizers, and large enough that every active bf16 weight changes in a step.
LR, WEIGHT_DECAY = 1e-3, 0.1
# A learning rate as in reinforcement learning, where few weights change in a step.
SMALL_LR = 1e-6


def parameters(weights: Mapping[str, Tensor]) -> Named:
    """Parameters that share the weights' storage."""
    return {name: nn.Parameter(weight) for name, weight in weights.items()}


def torch_adamw(params: Named, grads: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """torch's fused AdamW; its states have the parameters' dtype."""
    for name, param in params.items():
        param.grad = grads[name]
    return torch.optim.AdamW(params.values(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def sparse_adamw(
    params: Named,
    grads: Mapping[str, Tensor],
    mask: MaskSet,
    gradients: Gradients,
    backend: str | None = None,
    *,
    state_dtype: torch.dtype = torch.float32,
    keep_base_weights: bool = False,
    lr: float = LR,
) -> SparseAdamW:
    """SparseAdamW over the mask, with compact fp32 gradients; bf16 moments use stochastic rounding."""
    optimizer = SparseAdamW(
        params.items(),
        mask,
        lr=lr,
        weight_decay=WEIGHT_DECAY,
        grads=gradients,
        state_dtype=state_dtype,
        stochastic_rounding=state_dtype != torch.float32,
        keep_base_weights=keep_base_weights,
        backend=backend,
    )
    trained = {name: param for name, param in params.items() if param.requires_grad}
    if gradients == "dense":
        for name, param in trained.items():
            param.grad = grads[name]
    else:
        torch.autograd.backward(list(trained.values()), [grads[name] for name in trained])
    return optimizer


def step_again(optimizer: SparseAdamW) -> None:
    """Step with the gradients of the last step; normally a step consumes its compact gradients.

    No public method does this, because training has no use for it.
    """
    optimizer._collector.stepped = False
    optimizer.step()


def mask_of(names: Mapping[str, Tensor], active: Active) -> MaskSet:
    """The mask of the named tensors' active elements."""
    indices = active.indices.cpu()
    segments = zip(names, active.starts, active.ends, strict=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in names.items()}
    return MaskSet({name: indices[start:end] for name, start, end in segments}, shapes)


def active_of(mask: MaskSet, device: torch.device) -> Active:
    """The active elements of a mask's tensors, in the order of the mask, on the device."""
    parts = [mask[name] for name in mask.names]
    ends = list(itertools.accumulate(part.numel() for part in parts))
    return Active(torch.cat(parts).to(device), [0, *ends[:-1]], ends)


def check_first_step(optimizer: SparseAdamW, params: Named, grads: Mapping[str, Tensor], active: Active) -> None:
    """Make the optimizer's first step and compare weights and moments bit by bit with those of the reference op.

    Raises:
        WrongResult: a bit differs.
    """
    device = active.indices.device
    oracle = AdamWCase(
        params=[param.detach().clone() for param in params.values()],
        active=active,
        lr=torch.tensor([float(optimizer.param_groups[0]["lr"])], device=device),
        steps=torch.ones(len(params), device=device),
        dense_grads=list(grads.values()),
        options={"weight_decay": WEIGHT_DECAY, "stochastic_rounding": optimizer.stochastic_rounding},
        exp_avg=torch.zeros(active.nnz, dtype=optimizer.state_dtype, device=device),
        exp_avg_sq=torch.zeros(active.nnz, dtype=optimizer.state_dtype, device=device),
    )
    oracle.run("reference")
    optimizer.step()
    for i, (name, param) in enumerate(params.items()):
        check_bits(f"the first step: {name}", param.detach(), oracle.params[i])
        where = slice(active.starts[i], active.ends[i])
        for moment in ("exp_avg", "exp_avg_sq"):
            if where.stop > where.start:
                wanted = getattr(oracle, moment)[where]
                check_bits(f"the first step: {moment} of {name}", optimizer.state[param][moment], wanted)


def changed_share(optimizer: SparseAdamW, params: Named, nnz: int) -> float:
    """Make a step and return the share of the ``nnz`` active weights whose bits it changed."""
    before = [as_bits(param.detach()).clone() for param in params.values()]
    step_again(optimizer)
    changed = [(as_bits(p.detach()) != bits).sum() for p, bits in zip(params.values(), before, strict=True)]
    return int(torch.stack(changed).sum()) / nnz


def check_norm(optimizer: SparseAdamW, grads: Mapping[str, Tensor], active: Active) -> None:
    """Compare the norm computed for clipping with an fp64 sum.

    Raises:
        WrongResult: they differ by more than rounding.
    """
    total = torch.zeros((), dtype=torch.float64, device=active.indices.device)
    for grad, start, end in zip(grads.values(), active.starts, active.ends, strict=True):
        total += grad.view(-1)[active.indices[start:end].long()].double().square().sum()
    found, wanted = optimizer.clip_grad_norm_(max_norm=float("inf")).item(), total.sqrt().item()
    if not abs(found - wanted) <= SUM_RTOL * wanted:
        raise WrongResult(f"the norm of the active gradients is {found!r}, wanted {wanted!r}")


class BaseWeightsSwap:
    """Enters and exits `base_weights()` in separate calls, so that each can be timed."""

    def __init__(self, optimizer: SparseAdamW) -> None:
        self.optimizer = optimizer
        self.inside = contextlib.ExitStack()
        self.is_inside = False

    def enter(self) -> None:
        self.inside.enter_context(self.optimizer.base_weights())
        self.is_inside = True

    def leave(self) -> None:
        self.inside.close()
        self.is_inside = False

    def be_outside(self) -> None:
        if self.is_inside:
            self.leave()

    def be_inside(self) -> None:
        if not self.is_inside:
            self.enter()


def check_base_weights(swap: BaseWeightsSwap, params: Named) -> None:
    """Make a step, then compare the model inside and outside `base_weights()` bit by bit.

    Raises:
        WrongResult: a bit differs, or the step changed nothing.
    """
    base = {name: param.detach().clone() for name, param in params.items()}
    swap.optimizer.step()
    trained = {name: param.detach().clone() for name, param in params.items()}
    if all(torch.equal(base[name], trained[name]) for name in base):
        raise WrongResult("base_weights: a step changed no weight, so that nothing can be told apart")
    swap.enter()
    try:
        for name, param in params.items():
            check_bits(f"base_weights: {name} inside", param.detach(), base[name])
    finally:
        swap.leave()
    for name, param in params.items():
        check_bits(f"base_weights: {name} outside again", param.detach(), trained[name])


def swapped_share(swap: BaseWeightsSwap, params: Named, nnz: int) -> float:
    """The share of the ``nnz`` active weights whose bits differ inside and outside `base_weights()`."""
    outside = [as_bits(param.detach()).clone() for param in params.values()]
    swap.enter()
    differing = [(as_bits(p.detach()) != bits).sum() for p, bits in zip(params.values(), outside, strict=True)]
    swap.leave()
    return int(torch.stack(differing).sum()) / nnz


def check_no_sync(what: str, call: Callable[[], object], device: torch.device) -> None:
    """Run ``call`` with torch's synchronization check enabled; on a CPU nothing is checked.

    Raises:
        WrongResult: the call synchronized with the device.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise WrongResult(f"{what} waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


def index_itemsize(optimizer: SparseAdamW) -> int:
    """Bytes per index that the optimizer stores: for element masks per element, for patterns per unit (4)."""
    mask = optimizer.mask
    return round(optimizer.nbytes()["indices"] / mask.nnz) if mask.pattern == "element" else 4
