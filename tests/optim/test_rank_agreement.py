"""Ranks that differ raise: one skips a step, has another learning rate, clips alone, or loads another state."""

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import device, ranks
from torch import nn

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.optim.gradients import reduction

pytestmark = pytest.mark.dist

DIFFERENCES = {
    "skips": "has made 2 steps, and this one 3",
    **dict.fromkeys(
        ("lr", "decay", "lr of one step", "clips", "max_grad_norm"),
        "has made its steps with another learning rate, other options or other clipping than this one",
    ),
}


def build(**options: Any) -> tuple[nn.Module, SparseAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(device())
    mask = MaskSet.random(model, density=0.3, seed=0)
    return model, SparseAdamW(model, mask, lr=0.1, process_group=dist.group.WORLD, **options)


def backward(model: nn.Module) -> None:
    model(torch.full((2, 32), 1.0 + dist.get_rank(), device=device())).square().mean().backward()


def check_that_all_raise(rank: int, what: str, **options: Any) -> None:
    """The last rank differs in step 2 by `what`."""
    reduction.MAX_PIECE_BYTES = 2048  # several pieces
    model, optimizer = build(**options)
    group, last = optimizer.param_groups[0], dist.get_world_size() - 1
    error, step = None, 0
    while error is None and step < 6:
        try:
            backward(model)
            odd = rank == last and step == 2
            if odd and what == "clips":
                optimizer.clip_grad_norm_(1e-3)
            if odd and what == "max_grad_norm":
                optimizer.max_grad_norm = 1e-3
            group["lr"] = 0.2 if odd and what in ("lr", "lr of one step") else group["lr"]
            group["weight_decay"] = 0.5 if odd and what == "decay" else group["weight_decay"]
            if not (odd and what == "skips"):
                optimizer.step()
            group["lr"] = 0.1 if what == "lr of one step" else group["lr"]
            optimizer.zero_grad()
            step += 1
        except RuntimeError as raised:
            error = raised
    if what == "nothing":
        assert error is None
        optimizer.check_ranks()
        return
    # With gloo in the next step. With NCCL the host compares a reduction when it launches the following one.
    assert step == (3 if device().type == "cpu" else 4)
    if device().type == "cpu":  # the gradients are still there, and so is the difference
        with pytest.raises(RuntimeError, match="the ranks differ"):
            optimizer.step()
    found, text = re.fullmatch(r"rank (\d): the ranks differ: rank (\d) (.*)", str(error)).groups(), DIFFERENCES[what]
    assert found[:2] == (str(rank), "0" if rank == last else str(last))
    assert re.fullmatch(text if rank != last or what != "skips" else "has made 3 steps, and this one 2", found[2])


@ranks(2)
def test_all_ranks_raise(rank: int) -> None:
    for what in ("nothing", *DIFFERENCES):
        print(what, flush=True)  # shown with a failure
        check_that_all_raise(rank, what)


@ranks(3)
def test_three_ranks_and_narrow_gradients(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for what in ("nothing", "skips"):
            print(dtype, what, flush=True)
            check_that_all_raise(rank, what, grad_dtype=dtype)


@ranks(2)
def test_a_rate_that_all_ranks_change_before_the_step_is_no_difference(rank: int) -> None:
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
    optimizer.load_state_dict(saved)
    if rank == 1:
        saved["state"][2]["exp_avg"][0] += 1.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"the ranks differ: exp_avg of '1.weight' in the saved state"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert all(torch.equal(a, before["state"][i][k]) for i, s in after["state"].items() for k, a in s.items())
    backward(model)
    optimizer.step()
    optimizer.check_ranks()


def test_steps_whose_random_bits_would_repeat_are_refused() -> None:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), stochastic_rounding=True)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"].fill_(2**24 - 1)
    optimizer.load_state_dict(saved)
    for last in (False, True):
        model(torch.ones(1, 8).bfloat16()).sum().backward()
        if last:
            with pytest.raises(RuntimeError, match="16777216 steps were made"):
                optimizer.step()
        else:
            optimizer.step()
