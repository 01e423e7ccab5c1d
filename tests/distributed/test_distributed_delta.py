"""Delta logs that several ranks write: the files of a log of one device, and errors of rank 0 on every rank."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import BACKENDS, device, launch, ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from uneven import Uneven, content

from sparse_opt import DeltaLog, MaskSet, SparseAdamW
from sparse_opt.delta import encoder
from sparse_opt.distributed import full_state, on_rank_0
from sparse_opt.errors import DeltaLogError
from sparse_opt.mask_finding.find import find_from_log

pytestmark = pytest.mark.dist

STEPS = 3


def model_and_mask() -> tuple[Uneven, MaskSet]:
    torch.manual_seed(0)
    model = Uneven()
    model.register_buffer("count", torch.arange(4.0))
    return model, MaskSet.random(model, density=0.3, seed=1)


def changed(weight: Tensor, name: str, mask: MaskSet, step: int) -> Tensor:
    """The weight with its active elements moved, as after a step; in step 2 everything moves."""
    active = mask.bool(name) if step != 2 else torch.ones_like(weight, dtype=torch.bool)
    source = torch.Generator().manual_seed(step)
    return torch.where(active, weight + torch.randn(weight.shape, generator=source).to(weight.dtype), weight)


def fixed_run_id() -> mock._patch[object]:
    """The only content of a log that is random."""
    return mock.patch.object(encoder.secrets, "token_hex", lambda n: "ab" * n)


def append(log: DeltaLog | None, step: int, model: nn.Module) -> None:
    state = full_state(model)
    on_rank_0(lambda: log.append(step, state))


def close(log: DeltaLog | None) -> None:
    on_rank_0(lambda: log.close())


def log_steps(rank: int, folder: str, sharded: bool) -> None:
    model, mask = model_and_mask()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(device())
    if sharded:
        for part in (model.hidden, model.out, model):
            fully_shard(part)
    with fixed_run_id():
        state = full_state(model)
        log = on_rank_0(lambda: DeltaLog.create(folder, state, mask=mask))
        assert (log is None) == (rank > 0)
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    whole[name] = changed(whole[name], name, mask, step)
                    parameter.copy_(
                        distribute_tensor(whole[name].to(device()), parameter.device_mesh, parameter.placements)
                        if sharded
                        else whole[name]
                    )
            if step == STEPS:
                close(log)
                log = on_rank_0(lambda: DeltaLog.open(folder))
            append(log, step, model)
        close(log)


@BACKENDS
@pytest.mark.parametrize("sharded", [False, True])
def test_the_files_are_those_of_one_device(tmp_path: Path, sharded: bool, backend: str) -> None:
    model, mask = model_and_mask()
    with fixed_run_id(), DeltaLog.create(tmp_path / "one", model, mask=mask) as log:
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(changed(parameter, name, mask, step))
            log.append(step)
    n = 3 if sharded and backend == "gloo" else 2
    launch(log_steps, n, str(tmp_path / "ranks"), sharded, backend=backend)
    one, ranks = (
        {path.name: content(path.read_bytes()) for path in (tmp_path / folder).glob("*.safetensors")}
        for folder in ("one", "ranks")
    )
    assert len(one) == STEPS + 2  # the mask and step 0 too
    assert one == ranks
    masks = [find_from_log(DeltaLog.open(tmp_path / folder), sparsity=80).mask for folder in ("one", "ranks")]
    assert masks[0] == masks[1]


@pytest.mark.parametrize("sharded", [False, True])
@ranks(2, nccl=False)
def test_base_weights_are_step_0_and_no_later_one(rank: int, tmp_path: Path, sharded: bool) -> None:
    model, mask = model_and_mask()
    for part in (model.hidden, model.out, model) if sharded else ():
        fully_shard(part)
    optimizer = SparseAdamW(model, mask, lr=0.1, process_group=None if sharded else False)
    with optimizer.base_weights():
        state = full_state(model)
        log = on_rank_0(lambda: DeltaLog.create(tmp_path / "log", state))
        with pytest.raises(DeltaLogError, match="step 1: the model holds its base weights"):
            append(log, 1, model)
    append(log, 1, model)
    close(log)


@ranks(2)
def test_an_error_of_rank_0_is_raised_on_every_rank(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        DeltaLog.create(tmp_path / "taken", nn.Linear(3, 3)).close()
    dist.barrier()
    model = fully_shard(nn.Linear(3, 3).to(device()))
    state = full_state(model)
    with pytest.raises(DeltaLogError, match="holds a delta log" if rank == 0 else "rank 0: .*holds a delta log"):
        on_rank_0(lambda: DeltaLog.create(tmp_path / "taken", state))
    log = on_rank_0(lambda: DeltaLog.create(tmp_path / "new", state))
    with pytest.raises(DeltaLogError, match="step is 0, expected a step after 0"):
        append(log, 0, model)
    if rank == 0:
        (tmp_path / "new" / "writer.lock").unlink()
    dist.barrier()
    append(log, 1, model)  # fails in the background
    with pytest.raises(DeltaLogError, match="lock"):
        on_rank_0(lambda: log.flush())
    close(log)
