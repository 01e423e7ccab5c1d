"""Several GPUs over NCCL: replicate and FSDP2 train as one GPU does on the global batch; a dead rank is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_opt import MaskSet, SparseAdamW, SparseSGD

STEPS, ROWS, WIDTH = 200, 16, 256
SGD_LR = 0.05
N_GPUS = torch.cuda.device_count()


def need_gpus(n: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(N_GPUS < n, reason=f"needs {n} CUDA GPUs, and torch sees {N_GPUS}")


pytestmark = [pytest.mark.gpu, need_gpus(2)]


def make_model(device: torch.device, dtype: torch.dtype, *, linear: bool) -> nn.Module:
    """Three matrices with GELU between them, or one matrix; the same weights in each call."""
    torch.manual_seed(0)
    if linear:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).to(device, dtype)
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(2 * WIDTH, WIDTH)).to(device, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, dims=1)).square().mean()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_and_compare(rank: int, layout: str, pattern: str, dtype: torch.dtype, linear: bool) -> dict[str, Any]:
    """Train on all ranks, and a second model on this rank with the batches of all; return how they differ."""
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    n = dist.get_world_size()
    model, alone = (make_model(device, dtype, linear=linear) for _ in range(2))
    start = [p.detach().clone() for p in model.parameters()]
    mask = MaskSet.random(model, density=0.25, pattern=pattern, seed=0)
    optimizer_class: Any = SparseSGD if linear else SparseAdamW
    lr = SGD_LR if linear else 1e-3
    single = optimizer_class(alone, mask, lr=lr, process_group=False)
    group = dist.group.WORLD
    if layout == "fsdp2":
        mesh, group = init_device_mesh(device.type, (n,)), None
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_class(model, mask, lr=lr, process_group=group)
    generator = torch.Generator().manual_seed(1)
    largest_gradient = 0.0
    for _ in range(STEPS):
        batches = torch.randn(n, ROWS, WIDTH, generator=generator).to(device, dtype)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("pattern", ["element", "tile64"])
@pytest.mark.parametrize("layout", ["replicate", "fsdp2"])
def test_two_ranks_have_the_bits_of_one_device(layout, pattern, dtype):
    # The tolerance is 0. The sum of two numbers does not depend on their order, and a factor of 1/2 is exact unless the
    # result is subnormal, so that (a + b) / 2 and a / 2 + b / 2 have the same bits.
    for found in launch(train_and_compare, 2, layout, pattern, dtype, False, backend="nccl"):
        assert found["same_bits_on_all_ranks"]
        assert found["same_bits_as_alone"], found["difference"]
        assert found["changed"] > 0.9 * found["nnz"]


@need_gpus(4)
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


TRAINING = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from sparse_opt import MaskSet, SparseAdamW

backend, timeout, store = sys.argv[1], float(sys.argv[2]), sys.argv[3]
rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", rank)
    torch.cuda.set_device(rank)
dist.init_process_group(backend, timeout=timedelta(seconds=timeout), init_method=store, rank=rank, world_size=n)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).to(device)
optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), max_grad_norm=1.0, process_group=dist.group.WORLD)
for step in range(1000):
    if step == 5 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.grad_norm.item()
print("finished")
"""
TIMEOUT = 20.0  # of the process group
ENDS_WITHIN = 180.0  # a process whose collectives have failed


def start(folder: Path, backend: str, store: str, *launcher: str, **variables: str) -> subprocess.Popen[str]:
    """Start the training above in the background, and kill its second process."""
    script = folder / "training.py"
    script.write_text(TRAINING)
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), backend, str(TIMEOUT), store],
        env={**os.environ, "OMP_NUM_THREADS": "1", **paths, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """The exit code and the output of a process that ends within `seconds`."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    return process.returncode, output


def check_that_torchrun_names_a_killed_rank(folder: Path, backend: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    code, output = end_of(start(folder, backend, "env://", *torchrun), 60.0)
    assert code != 0 and "finished" not in output
    assert "rank      : 1 (local_rank: 1)" in output and "SIGKILL" in output, output


def check_that_a_rank_names_a_killed_one(folder: Path, backend: str) -> None:
    store = f"file://{folder}/store"
    ranks = [start(folder, backend, store, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    assert end_of(ranks[1], 60.0)[0] == -9
    killed = time.monotonic()
    lines: list[tuple[float, str]] = []
    assert ranks[0].stdout is not None
    timer = threading.Timer(ENDS_WITHIN, ranks[0].kill)
    timer.start()
    for line in ranks[0].stdout:
        lines.append((time.monotonic() - killed, line))
    timer.cancel()
    output = "".join(f"{seconds:6.1f} s {line}" for seconds, line in lines)
    code = ranks[0].wait()
    # The message comes before the group's timeout. When the process ends after it is up to NCCL's watchdog.
    named = [seconds for seconds, line in lines if "rank 1 did not respond" in line]
    assert named and named[0] < TIMEOUT, output
    assert code not in (0, -signal.SIGKILL) and "finished" not in output, output


def test_torchrun_names_a_killed_rank(tmp_path):
    check_that_torchrun_names_a_killed_rank(tmp_path, "nccl")


def test_a_rank_names_a_killed_one(tmp_path):
    check_that_a_rank_names_a_killed_one(tmp_path, "nccl")
