"""200 steps on several ranks equal those of one device on the global batch, under replicate and FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import BACKENDS, device, launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_opt import MaskSet, SparseAdamW, SparseSGD

pytestmark = pytest.mark.dist

STEPS, ROWS = 200, 16
WIDTHS = {"gloo": 64, "nccl": 256}  # by backend; a step on a CPU takes as long as its collectives
SGD_LR = 0.05
N_GPUS = torch.cuda.device_count()
NEEDS_2_GPUS = [pytest.mark.gpu, pytest.mark.skipif(N_GPUS < 2, reason="needs 2 CUDA GPUs")]


def make_model(dtype: torch.dtype, *, linear: bool) -> nn.Module:
    """Three matrices with GELU between them, or one matrix; the same weights in each call."""
    torch.manual_seed(0)
    width = WIDTHS[dist.get_backend()]
    if linear:
        return nn.Sequential(nn.Linear(width, width, bias=False)).to(device(), dtype)
    layers = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 2 * width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(2 * width, width)).to(device(), dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, dims=1)).square().mean()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_and_compare(rank: int, layout: str, pattern: str, dtype: torch.dtype, linear: bool) -> dict[str, Any]:
    """Train on all ranks, and a second model on this rank with the batches of all; return how they differ."""
    n, width = dist.get_world_size(), WIDTHS[dist.get_backend()]
    model, alone = (make_model(dtype, linear=linear) for _ in range(2))
    start = [p.detach().clone() for p in model.parameters()]
    mask = MaskSet.random(model, density=0.25, pattern=pattern, seed=0)
    optimizer_class: Any = SparseSGD if linear else SparseAdamW
    lr = SGD_LR if linear else 1e-3
    single = optimizer_class(alone, mask, lr=lr, process_group=False)
    group = dist.group.WORLD
    if layout == "fsdp2":
        mesh, group = init_device_mesh(device().type, (n,)), None
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_class(model, mask, lr=lr, process_group=group)
    generator = torch.Generator().manual_seed(1)
    largest_gradient = 0.0
    for _ in range(STEPS):
        batches = torch.randn(n, ROWS, width, generator=generator).to(device(), dtype)
        loss_of(model, batches[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for batch in batches:
            (loss_of(alone, batch) / n).backward()
        gradients = [single.compact_grad(p).abs().max().item() for p in alone.parameters() if p.requires_grad]
        largest_gradient = max(largest_gradient, *gradients)
        single.step()
        single.zero_grad()
    optimizer.check_ranks()
    trained = [full(p.detach()) for p in model.parameters()]
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, [p.cpu() for p in trained])
    return {
        "same_bits_on_all_ranks": all(map(torch.equal, everyone[0], everyone[rank])),
        "same_bits_as_alone": all(map(torch.equal, trained, alone.parameters())),
        "difference": max((p - q).abs().max().item() for p, q in zip(trained, alone.parameters(), strict=True)),
        "changed": sum(int((p != q).sum()) for p, q in zip(trained, start, strict=True)),
        "nnz": mask.nnz,
        "largest_gradient": largest_gradient,
        "largest_weight": max(p.abs().max().item() for p in alone.parameters()),
    }


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        ("element", torch.float32),
        ("tile64", torch.bfloat16),
        pytest.param("element", torch.bfloat16, marks=NEEDS_2_GPUS),
        pytest.param("tile64", torch.float32, marks=NEEDS_2_GPUS),
    ],
)
@pytest.mark.parametrize("layout", ["replicate", "fsdp2"])
@BACKENDS
def test_two_ranks_have_the_bits_of_one_device(layout, pattern, dtype, backend):
    # The tolerance is 0. The sum of two numbers does not depend on their order, and a factor of 1/2 is exact unless the
    # result is subnormal, so that (a + b) / 2 and a / 2 + b / 2 have the same bits.
    for found in launch(train_and_compare, 2, layout, pattern, dtype, False, backend=backend):
        assert found["same_bits_on_all_ranks"]
        assert found["same_bits_as_alone"], found["difference"]
        assert found["changed"] > 0.9 * found["nnz"]


@pytest.mark.gpu
@pytest.mark.skipif(N_GPUS < 4, reason="needs 4 CUDA GPUs")
@pytest.mark.parametrize("layout", ["replicate", "fsdp2"])
def test_four_ranks_equal_one_device(layout):
    # SGD on a quadratic function: w <- w - lr (H w - b + e), where e is by how much the two sums of four gradients
    # differ: each has three roundings of partial sums, at most G = max |gradient| of a rank, so |e| <= 6 G 2^-24. The
    # largest gradient of the mean bounds that of a rank up to a factor, taken as 4. The store of w rounds by at most
    # |w| 2^-24 on each side, and the gradient's own products round the differing weights alike to first order. As
    # lr |H| < 2, the map shrinks differences, so that those of all steps add up at most.
    for found in launch(train_and_compare, 4, layout, "element", torch.float32, True, backend="nccl"):
        per_step = (SGD_LR * 6 * 4 * found["largest_gradient"] + 2 * found["largest_weight"]) * 2.0**-24
        assert found["same_bits_on_all_ranks"]
        assert found["difference"] <= STEPS * per_step
        assert found["changed"] > 0.9 * found["nnz"]
