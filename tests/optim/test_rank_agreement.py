"""Ranks that differ: check_ranks() names what, and so does the load of different states."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import device, ranks
from torch import nn

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.optim.gradients import reduction

pytestmark = pytest.mark.dist


def build(**options: Any) -> tuple[nn.Module, SparseAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(device())
    mask = MaskSet.random(model, density=0.3, seed=0)
    return model, SparseAdamW(model, mask, lr=0.1, process_group=dist.group.WORLD, **options)


def backward(model: nn.Module) -> None:
    model(torch.full((2, 32), 1.0 + dist.get_rank(), device=device())).square().mean().backward()


def change_weight(model: nn.Module, optimizer: SparseAdamW) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 1.0


def change_state(key: str) -> Callable[[nn.Module, SparseAdamW], None]:
    return lambda model, optimizer: optimizer.state[model[0].weight][key].add_(1.0)


def change_rate(model: nn.Module, optimizer: SparseAdamW) -> None:
    optimizer.param_groups[0]["lr"] = 0.2


def change_steps(model: nn.Module, optimizer: SparseAdamW) -> None:
    optimizer.n_steps += 1


DIFFERENCES = {
    "the number of steps is 3 on rank 0, but 4 on rank 1": change_steps,
    "parameter '0.weight' is digest": change_weight,
    "lr of parameter group 0 is 0.1 on rank 0, but 0.2 on rank 1": change_rate,
    **{f"{key} of '0.weight' is digest": change_state(key) for key in ("step", "exp_avg", "base")},
}


@ranks(2)
def test_check_ranks_names_what_differs(rank: int) -> None:
    reduction.MAX_PIECE_BYTES = 2048  # several pieces
    for message, change in DIFFERENCES.items():
        print(message, flush=True)  # shown with a failure
        model, optimizer = build()
        for _ in range(3):
            backward(model)
            optimizer.step()
        optimizer.check_ranks()
        if rank == 1:
            change(model, optimizer)
        with pytest.raises(RuntimeError, match=f"the ranks differ: {message}"):
            optimizer.check_ranks()


@ranks(3)
def test_narrow_gradients_of_three_ranks(rank: int) -> None:
    reduction.MAX_PIECE_BYTES = 2048
    for dtype in (torch.bfloat16, torch.float16):
        model, optimizer = build(grad_dtype=dtype)
        for _ in range(3):
            backward(model)
            optimizer.step()
        optimizer.check_ranks()


@ranks(2)
def test_a_rank_without_a_pass_outside_no_sync_reduces_in_its_step(rank: int) -> None:
    model, optimizer = build()
    for step in range(4):
        with optimizer.no_sync() if rank == 1 and step == 2 else contextlib.nullcontext():
            backward(model)  # on rank 1 the step reduces
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
    optimizer.check_ranks()


@ranks(2)
def test_ranks_that_load_different_states_raise(rank: int) -> None:
    model, optimizer = build()
    backward(model)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("exp_avg", "base"):
        other = copy.deepcopy(saved)
        if rank == 1:
            other["state"][2][key][0] += 1.0
        with pytest.raises(RuntimeError, match=f"the ranks differ: {key} of '1.weight' is digest"):
            optimizer.load_state_dict(other)
    optimizer.load_state_dict(saved)
    backward(model)
    optimizer.step()
    optimizer.check_ranks()
