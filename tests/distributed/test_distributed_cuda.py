"""A dead rank over NCCL is named by the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

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

rank, timeout, store = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank)
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=timedelta(seconds=timeout), init_method=store, rank=rank, world_size=2)
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
ENDS_WITHIN = 180.0  # a process whose collectives have failed


def test_a_rank_names_a_killed_one(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(rank), str(TIMEOUT), f"file://{tmp_path}/store"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    first, second = start(0), start(1)
    second.communicate(timeout=60.0)
    assert second.returncode == -signal.SIGKILL
    killed = time.monotonic()
    lines: list[tuple[float, str]] = []
    timer = threading.Timer(ENDS_WITHIN, first.kill)
    timer.start()
    for line in first.stdout or ():
        lines.append((time.monotonic() - killed, line))
    timer.cancel()
    output = "".join(f"{seconds:6.1f} s {line}" for seconds, line in lines)
    code = first.wait()
    # The message comes before the group's timeout. When the process ends after it is up to NCCL's watchdog.
    named = [seconds for seconds, line in lines if "rank 1 did not respond" in line]
    assert named and named[0] < TIMEOUT, output
    assert code not in (0, -signal.SIGKILL) and "trained to the end" not in output, output
