"""A small run of 200 steps under a mask, logged at every step, which resumes from its last checkpoint.

    python run_driver.py FOLDER [KILLED_AT]

Kills itself right after step KILLED_AT was handed to the log.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from sparse_opt import DeltaLog, MaskSet, SparseAdamW
from sparse_opt.delta.digest import StateDigest

STEPS, CHECKPOINT_EVERY = 200, 50


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(50, 24), nn.Flatten(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 50)]
    return nn.Sequential(*layers).to(torch.bfloat16)


def make_mask(model: nn.Module) -> MaskSet:
    return MaskSet.random(model, density=0.2, seed=1)


def train(model: nn.Module, folder: Path | None = None) -> Iterator[int]:
    """Yields each step that was taken; from a folder's checkpoint on, where there is one."""
    optimizer = SparseAdamW(model.named_parameters(), make_mask(model), lr=3e-4, master_weights=True)
    first, checkpoint = 1, None if folder is None else folder / "checkpoint.pt"
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    for step in range(first, STEPS + 1):
        source = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 50, (16, 5), generator=source)
        loss = nn.functional.cross_entropy(model(tokens[:, :4]).float(), tokens[:, 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step
        if checkpoint is not None and step % CHECKPOINT_EVERY == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, checkpoint.with_suffix(".aside"))
            os.replace(checkpoint.with_suffix(".aside"), checkpoint)


def main(folder: Path, killed_at: int | None) -> None:
    torch.set_num_threads(1)
    model = make_model()
    if (folder / "log").exists():
        log = DeltaLog.open(folder / "log", model)
    else:
        log = DeltaLog.create(folder / "log", model, mask=make_mask(model), keyframe_every=60)
    for step in train(model, folder):
        if step > log.last_step:
            log.append(step)
        else:
            # Taken again since the checkpoint: the log has it already.
            digests = StateDigest.start([model.state_dict()[name] for name in log.layout.names]).result()
            if log.layout.state_digest(digests) != log.digest(step):
                sys.exit(f"step {step} came out otherwise")
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    log.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
