"""The mean of the ranks' compact gradients equals that of one process, with the same bits on all ranks."""

import contextlib
import copy
import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import device, launch, ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparse_opt import MaskSet, SparseAdamW, SparseSGD, backends
from sparse_opt.optim import OPTIMIZERS
from sparse_opt.optim.gradients import reduction

pytestmark = pytest.mark.dist

STEPS, MICRO_BATCHES, ROWS, WIDTH = 12, 2, 4, 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, WIDTH))
    return layers.to(device())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batches(rank: int) -> Any:
    """Yield (the global batch, this rank's micro-batches) for each step."""
    generator = torch.Generator().manual_seed(1)
    n = dist.get_world_size()
    for _ in range(STEPS):
        batch = torch.randn(n * MICRO_BATCHES * ROWS, WIDTH, generator=generator).to(device())
        yield batch, batch.chunk(n)[rank].chunk(MICRO_BATCHES)


def train(rank: int, make: Any, sync: str) -> tuple[nn.Module, nn.Module]:
    """Train one model on all ranks, and a copy of it on the global batch alone; return both."""
    model = make_model()
    alone = copy.deepcopy(model)
    optimizer, single = make(model, dist.group.WORLD), make(alone, False)
    for batch, mine in batches(rank):
        for i, x in enumerate(mine):
            last = i == len(mine) - 1
            inside = sync == "step" or (sync == "last" and not last)
            with optimizer.no_sync() if inside else contextlib.nullcontext():
                (loss_of(model, x) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        single.step()
        single.zero_grad()
        if optimizer.max_grad_norm is not None:
            torch.testing.assert_close(optimizer.grad_norm, single.grad_norm, rtol=1e-4, atol=0.0)
        optimizer.check_ranks()
    return model, alone


def assert_close(model: nn.Module, alone: nn.Module, tolerance: float) -> None:
    changed = 0
    for p, q, start in zip(model.parameters(), alone.parameters(), make_model().parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.0, atol=tolerance)
        changed += int((p != start).sum())
    assert changed > 100


# SGD adds lr * gradient, and the two sums of a gradient differ by the roundings of the ranks' sums: less than
# 2**-20 of gradients below 1e-2 in each step of lr 0.1.
SGD_TOLERANCE = STEPS * 0.1 * 1e-2 * 2**-20 + 2**-24


def check_equality_with_one_process(rank: int) -> None:
    reduction.MAX_PIECE_BYTES = 4096  # several pieces
    for pattern, backend, sync in (
        ("element", None, "last"),
        ("run16", None, "step"),
        ("tile64", None, "last"),
        ("tile64", "reference", "always"),
    ):
        mask = MaskSet.random(make_model(), density=0.3, pattern=pattern, seed=0)

        def make(model: nn.Module, group: Any, mask: MaskSet = mask, backend: str | None = backend) -> SparseSGD:
            return SparseSGD(model, mask, lr=0.1, max_grad_norm=0.05, backend=backend, process_group=group)

        model, alone = train(rank, make, sync)
        assert_close(model, alone, SGD_TOLERANCE)


@ranks(2)
def test_two_ranks_equal_one_process_with_the_global_batch(rank: int) -> None:
    check_equality_with_one_process(rank)


@ranks(3)
def test_three_ranks_equal_one_process_with_the_global_batch(rank: int) -> None:
    check_equality_with_one_process(rank)


@ranks(2)
def test_every_optimizer_with_bf16_gradients_and_state(rank: int) -> None:
    mask = MaskSet.random(make_model(), density=0.3, pattern="run16", seed=0)
    for kind in OPTIMIZERS:

        def make(model: nn.Module, group: Any, kind: Any = kind) -> Any:
            model.to(torch.bfloat16).float()  # the same start for both
            return kind(
                model,
                mask,
                lr=1e-4,
                grad_dtype=torch.bfloat16,
                state_dtype=torch.bfloat16,
                stochastic_rounding=True,
                process_group=group,
            )

        model, alone = train(rank, make, "last")
        # Moments and gradients are rounded to bf16, so an update may differ as a whole: at most 4 lr in each step.
        assert_close(model, alone, STEPS * 4e-4 if kind is not SparseSGD else 1e-4)


@ranks(2)
def test_only_the_compact_gradients_are_sent_once_per_step(rank: int) -> None:
    mask = MaskSet.random(make_model(), density=0.3, seed=0)
    reduction.MAX_PIECE_BYTES = 4096
    sent: list[tuple[int, int]] = []
    in_backward: list[bool] = []
    all_reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((tensor.numel(), tensor.element_size()))
        in_backward.append(torch._C._current_graph_task_id() != -1)
        return all_reduce(tensor, *args, **kwargs)

    for dtype in (torch.float32, torch.bfloat16):
        model = make_model()
        optimizer = SparseAdamW(model, mask, grad_dtype=dtype, max_grad_norm=1.0, process_group=dist.group.WORLD)
        dist.all_reduce = counting
        try:
            for _, mine in batches(rank):
                sent.clear()
                in_backward.clear()
                with optimizer.no_sync():
                    loss_of(model, mine[0]).backward()
                assert not sent
                loss_of(model, mine[1]).backward()
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
                assert len(sent) > 2
                assert all(in_backward)  # overlapped with the pass
                assert sum(numel for numel, _ in sent) == mask.nnz
                assert {size for _, size in sent} == {dtype.itemsize}
        finally:
            dist.all_reduce = all_reduce


@ranks(2)
def test_gradients_that_a_rank_lacks_count_as_zero(rank: int) -> None:
    """Ranks use different layers in different orders, rank 1 has no backward pass in some steps."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(device())
    alone = copy.deepcopy(model)
    mask = MaskSet.random(model, density=0.5, seed=0)
    reduction.MAX_PIECE_BYTES = 4096
    optimizer = SparseSGD(model, mask, lr=0.1, process_group=dist.group.WORLD)
    single = SparseSGD(alone, mask, lr=0.1, process_group=False)
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        x = torch.randn(2, ROWS, WIDTH, generator=generator).to(device())
        orders = ([0, 1, 2, 3], [3, 1] if step % 2 else [])

        def run(layers: nn.ModuleList, of_rank: int, x: torch.Tensor = x, orders: Any = orders) -> torch.Tensor:
            y = x[of_rank]
            for i in orders[of_rank]:
                y = layers[i](y).tanh()
            return y.square().sum()

        if orders[rank]:
            run(model, rank).backward()
        optimizer.step()
        for r in (0, 1):
            if orders[r]:
                (run(alone, r) / 2).backward()
        single.step()
        optimizer.check_ranks()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_grad_scaler_skips_the_step_on_all_ranks(rank: int) -> None:
    model = make_model()
    mask = MaskSet.random(model, density=0.3, seed=0)
    optimizer = SparseAdamW(model, mask, amp_scaling=True, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler(device().type, init_scale=1024.0)
    for step in range(4):
        before = copy.deepcopy(model.state_dict())
        overflows = step == 1
        factor = float("inf") if overflows and rank == 1 else 1.0  # on one rank only
        with optimizer.no_sync():
            scaler.scale(loss_of(model, torch.ones(ROWS, WIDTH, device=device()) * (rank + 1))).backward()
        scaler.scale(factor * loss_of(model, torch.ones(ROWS, WIDTH, device=device()))).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert changed == (not overflows)
        optimizer.check_ranks()
    assert scaler.get_scale() == 512.0
    with optimizer.no_sync():
        scaler.scale(loss_of(model, torch.ones(ROWS, WIDTH, device=device()))).backward()
    with pytest.raises(RuntimeError, match=r"with a GradScaler, the last backward pass .* outside no_sync"):
        scaler.step(optimizer)


@ranks(3)
def test_ranks_that_differ_are_named(rank: int) -> None:
    model = make_model()
    mask = MaskSet.random(model, density=0.3, seed=0)
    group = dist.group.WORLD
    with pytest.raises(RuntimeError, match=r"the ranks differ: the mask is .* on rank 0, but .* on rank 1$"):
        SparseAdamW(model, MaskSet.random(model, density=0.3, seed=min(rank, 1)), process_group=group)
    with pytest.raises(RuntimeError, match=r"the ranks differ: lr of parameter group 0 is 0.1 on rank 0.*rank 2$"):
        SparseSGD(model, mask, lr=0.1 + (rank == 2), process_group=group)
    with pytest.raises(ValueError, match="runs 3 processes: pass process_group"):
        SparseAdamW(model, mask)
    with pytest.raises(ValueError, match="runs 3 processes: with grads='dense' the optimizer does not average"):
        SparseAdamW(model, mask, grads="dense")
    with pytest.raises(ValueError, match="grads is 'dense': use grads='compact'"):
        SparseAdamW(model, mask, grads="dense", process_group=group)
    optimizer = SparseAdamW(model, mask, process_group=group)
    with pytest.raises(RuntimeError, match="the ranks differ: the mask"):
        optimizer.set_mask(MaskSet.random(model, density=0.3, seed=rank))
    with torch.no_grad():
        model[2].weight[0, 0] += rank == 1
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' is digest \w+ on rank 0, but digest \w+ on rank 1$"):
        optimizer.check_ranks()
    optimizer.close()
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' is digest"):
        SparseAdamW(model, mask, process_group=group)


@ranks(2)
def test_masks_states_base_weights_and_dropped_gradients(rank: int) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    masks = [MaskSet.random(model, density=0.3, seed=seed) for seed in range(2)]
    optimizer = SparseSGD(model, masks[0], lr=0.1, momentum=0.9, process_group=dist.group.WORLD)
    single = SparseSGD(alone, masks[0], lr=0.1, momentum=0.9, process_group=False)
    for step, (batch, mine) in enumerate(batches(rank)):
        if step == 5:
            optimizer.set_mask(masks[1])
            single.set_mask(masks[1])
        if step == 10:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.close()
            optimizer = SparseSGD(model, masks[1], lr=0.1, momentum=0.9, process_group=dist.group.WORLD)
            optimizer.load_state_dict(state)
        loss_of(model, torch.ones(1, WIDTH, device=device())).backward()
        optimizer.zero_grad()  # drops a mean
        with torch.no_grad(), optimizer.base_weights():
            loss_of(model, batch)
        loss_of(model, torch.cat(mine)).backward()
        optimizer.step()
        loss_of(alone, batch).backward()
        single.step()
        optimizer.check_ranks()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.0, atol=10 * SGD_TOLERANCE)


@ranks(2)
def test_ddp_averages_dense_gradients_and_refuses_compact_ones(rank: int) -> None:
    model = make_model()
    mask = MaskSet.random(model, density=1.0)
    averaged = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    dense = SparseSGD(model, mask, lr=0.1, grads="dense", process_group=False)
    compact = SparseSGD(averaged, mask, lr=0.1, process_group=dist.group.WORLD)
    for _, mine in batches(rank):
        for forward, optimizer in ((wrapped, dense), (averaged, compact)):
            loss_of(forward, torch.cat(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
    # Two ranks: the halves of both gradients, and one addition, whose order does not matter.
    for p, q, start in zip(model.parameters(), averaged.parameters(), make_model().parameters(), strict=True):
        assert torch.equal(p, q) and not torch.equal(p, start)
    twice = nn.parallel.DistributedDataParallel(averaged)
    twice(torch.ones(1, WIDTH, device=device())).sum().backward()
    with pytest.raises(RuntimeError, match="as under DistributedDataParallel: do not wrap the model"):
        compact.step()


@ranks(2)
def test_a_pass_without_gradients_does_not_reduce_those_of_the_last_step(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(device())
    mask = MaskSet.random(model, density=1.0, pattern="tile64")
    optimizer = SparseSGD(model, mask, lr=1.0, tile_backward=True, process_group=dist.group.WORLD)
    x = torch.full((4, 64), 1.0 + rank, device=device(), requires_grad=True)
    model(x).sum().backward()
    optimizer.step()
    before = model[0].weight.detach().clone()
    loss = model(x).sum()
    model[0].weight.requires_grad_(False)
    loss.backward()
    model[0].weight.requires_grad_(True)
    optimizer.step()
    assert torch.equal(model[0].weight, before)  # the gradient is zero, and not that of the first step


@ranks(2)
def test_a_pass_that_fails_after_its_first_reductions_cannot_be_repeated(rank: int) -> None:
    model = make_model()
    reduction.MAX_PIECE_BYTES = 4096
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.3), process_group=dist.group.WORLD)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("this layer has no gradient")

    hidden = model[:2](torch.ones(1, WIDTH, device=device()))
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="this layer has no gradient"):
        model[2:](hidden).sum().backward()
    for repeat in (optimizer.step, optimizer.zero_grad, loss_of(model, torch.ones(1, WIDTH, device=device())).backward):
        with pytest.raises(RuntimeError, match=r"ended after \d+ of the \d+ reductions.*resume from a checkpoint"):
            repeat()


def loses_a_rank(rank: int, how: str) -> str:
    model = make_model()
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.3), process_group=dist.group.WORLD)
    for step in range(3):
        if rank == 1 and step == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        try:
            loss_of(model, torch.ones(1, WIDTH, device=device())).backward()
            optimizer.step()
        except RuntimeError as error:
            os._exit(7 if "rank 1 did not respond" in str(error) else 8)
    return "went on"


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_lost_is_named(how: str) -> None:
    code = -9 if how == "killed" else 7
    with pytest.raises(AssertionError, match=rf"rank \d ended with code {code}"):
        launch(loses_a_rank, 2, how, collective_timeout=3)


@pytest.mark.parametrize("how", ["remove", "free"])
@ranks(1, nccl=False)
def test_a_notifier_that_ends_inside_its_own_hook(rank: int, how: str) -> None:
    layer = nn.Linear(8, 8)

    def make(ready: Any = lambda group: None) -> Any:
        return reduction.backward_notifier([layer.weight, layer.bias], [0, 1], ready, lambda: None)

    def end(group: int) -> None:
        notifier = held.pop(1, None)
        if notifier is not None and how == "remove":
            notifier.remove()

    held = {0: make(), 1: make(end), 2: make()}
    for _ in range(2):
        layer(torch.ones(1, 8)).sum().backward()
    assert held.keys() == {0, 2}


@pytest.fixture(params=[False, True], ids=["", "python"])
def python(request: pytest.FixtureRequest) -> bool:
    """Whether Python code notifies of gradients, as without the extension."""
    return bool(request.param)


def use_python_notifier() -> None:
    backends.autograd_module = lambda: (None, "for a test")


@ranks(2)
def test_an_optimizer_with_a_process_group_is_freed(rank: int, python: bool) -> None:
    if python:
        use_python_notifier()
    model = make_model()
    mask = MaskSet.random(model, density=0.3, seed=0)
    for _ in range(2):
        optimizer = SparseAdamW(model, mask, process_group=dist.group.WORLD)
        loss_of(model, torch.ones(1, WIDTH, device=device())).backward()
        optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    loss_of(model, torch.ones(1, WIDTH, device=device())).backward()
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_reentrant_checkpointing_is_refused(rank: int, python: bool) -> None:
    if python:
        use_python_notifier()
    reduction.MAX_PIECE_BYTES = 4096
    for checkpointed in (2, 5):  # layers
        model = make_model()
        optimizer = SparseAdamW(model, MaskSet.random(model, density=0.3), process_group=dist.group.WORLD)
        x = torch.ones(1, WIDTH, device=device(), requires_grad=True)
        loss = loss_of(model[checkpointed:], checkpoint(model[:checkpointed], x, use_reentrant=True))
        with pytest.raises(RuntimeError, match=r"a backward pass inside another one.*use use_reentrant=False"):
            loss.backward()
        optimizer.close()
