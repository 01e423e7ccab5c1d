"""Several GPUs over NCCL: the streams of FSDP2, and a dead rank is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import device, launch
from torch import nn
from torch.distributed.fsdp import fully_shard

from sparse_opt import MaskSet, SparseSGD

pytestmark = [
    pytest.mark.dist,
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs 2 CUDA GPUs, and torch sees {torch.cuda.device_count()}"
    ),
]

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
print("trained to the end")
"""
TIMEOUT = 20.0  # of the process group


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


def run_the_reference_between_forward_and_backward(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device())
    mask = MaskSet.random(model, density=0.5)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = SparseSGD(model, mask, lr=10.0)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(device())

    def gradient_norm(reference: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        if reference:
            with optimizer.base_weights():
                with torch.no_grad():
                    base.append(model(x))
                if x.is_cuda:
                    torch.cuda._sleep(2**30)  # the host launches the backward pass before the GPU restores the weights
        loss.backward()
        norm = optimizer.clip_grad_norm_(1e9)
        optimizer.zero_grad()
        return norm

    base: list[torch.Tensor] = []
    first = gradient_norm(True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = gradient_norm(False)
    assert not torch.equal(expected, first)  # the weights have changed, and their gradient
    for _ in range(3):
        assert torch.equal(gradient_norm(True), expected)
    assert all(torch.equal(outputs, base[0]) for outputs in base)


def test_a_backward_pass_under_fsdp2_gathers_the_weights_after_the_reference() -> None:
    launch(run_the_reference_between_forward_and_backward, 2, backend="nccl")


def test_torchrun_names_a_killed_rank(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    code, output = end_of(start(tmp_path, "nccl", "env://", *torchrun), 60.0)
    assert code != 0 and "trained to the end" not in output
    assert "rank      : 1 (local_rank: 1)" in output and "SIGKILL" in output, output
