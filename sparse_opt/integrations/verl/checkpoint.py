"""verl's checkpoints with the state of a sparse optimizer, for any number of ranks.

A folder has verl's own files but for the optimizer's: `model_world_size_N_rank_R.pt`, `extra_state_...`, and
`huggingface/`, so that verl's model merger works. The optimizer's state is in `sparse_optimizer`, a checkpoint of
`torch.distributed.checkpoint`, which does not depend on the number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from ...distributed import load_optimizer
from ...errors import ConfigError
from ...optim import SparseOptimizer

FOLDER = "sparse_optimizer"


class SparseCheckpointManager(FSDPCheckpointManager):
    """verl's FSDPCheckpointManager with the optimizer's state in a checkpoint of `torch.distributed.checkpoint`."""

    _own_files = False  # while verl's code runs, which would write the optimizer's state for this number of ranks

    @classmethod
    def like(cls, manager: FSDPCheckpointManager) -> SparseCheckpointManager:
        """A manager of the same model, optimizer and options as verl's."""
        return cls(
            model=manager.model,
            optimizer=manager.optimizer,
            lr_scheduler=manager.lr_scheduler,
            processing_class=manager.processing_class,
            checkpoint_config=manager.checkpoint_config,
            trust_remote_code=manager.trust_remote_code,
        )

    @property
    def should_save_optimizer(self) -> bool:
        return not self._own_files and "optimizer" in self.checkpoint_save_contents

    @property
    def should_load_optimizer(self) -> bool:
        return not self._own_files and "optimizer" in self.checkpoint_load_contents

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write a checkpoint to `local_path`. All ranks must call it."""
        if local_path is None:
            return
        self._own_files = True
        try:
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        finally:
            self._own_files = False
        if self.should_save_optimizer:
            dcp.save({"optimizer": self.optimizer.state_dict()}, checkpoint_id=Path(local_path) / FOLDER)
        dist.barrier()

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a checkpoint of any number of ranks into the model, the optimizer and the schedule.

        The states of the random generators are restored if the number of ranks is the same.

        Raises:
            ConfigError: the folder is not a checkpoint of this engine.
            ValueError: it is of another model or mask.
        """
        if local_path is None:
            return
        folder = Path(local_path)
        saved_by = _n_ranks(folder)
        if self.should_load_optimizer and not (folder / FOLDER).is_dir():
            raise ConfigError(f"{folder} has no {FOLDER}: it is not a checkpoint of a sparse optimizer")
        if saved_by == self.world_size:
            self._own_files = True
            try:
                super().load_checkpoint(local_path, hdfs_path, del_local_after_load=False)
            finally:
                self._own_files = False
        else:
            if self.should_load_model:
                load_shards(self.model, folder, saved_by)
            if self.should_load_extra and self.lr_scheduler is not None:
                extra = torch.load(folder / f"extra_state_world_size_{saved_by}_rank_0.pt", weights_only=False)
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        if self.should_load_optimizer:
            load_optimizer(cast(SparseOptimizer, self.optimizer), folder / FOLDER)
        dist.barrier()


def _n_ranks(folder: Path) -> int:
    """The number of ranks that have saved a checkpoint."""
    file = folder / "fsdp_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["world_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} is not a checkpoint of verl's FSDP engines: {file.name}: {error}") from error


@torch.no_grad()
def load_shards(model: nn.Module, folder: Path, saved_by: int) -> None:
    """Copy the weights of a checkpoint of another number of ranks into a model's shards.

    Each rank reads the files of all ranks, one after the other.

    Raises:
        ValueError: the checkpoint has other names or shapes.
    """
    own = model.state_dict()
    for rank in range(saved_by):
        saved = torch.load(
            folder / f"model_world_size_{saved_by}_rank_{rank}.pt", map_location="cpu", mmap=True, weights_only=False
        )
        if saved.keys() != own.keys():
            raise ValueError(f"{folder} has other weights: {sorted(saved.keys() ^ own.keys())[0]!r}")
        for name, tensor in own.items():
            if saved[name].shape != tensor.shape:
                raise ValueError(f"{folder}: {name!r} is {list(saved[name].shape)}, expected {list(tensor.shape)}")
            if tensor.dim() == 0:
                tensor.copy_(saved[name])
                continue
            source, first = _rows(saved[name], rank)
            target, begin = _rows(tensor, dist.get_rank())
            low, high = max(first, begin), min(first + len(source), begin + len(target))
            if low < high:
                target[low - begin : high - begin].copy_(source[low - first : high - first])


def _rows(tensor: Tensor, rank: int) -> tuple[Tensor, int]:
    """Return the rows of a tensor that a rank stores, and the number of the first one."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    dtensor: Any = tensor
    shards = dtensor.device_mesh.mesh.shape[-1]
    shard = int((dtensor.device_mesh.mesh == rank).nonzero()[0, -1])
    rows = -(-tensor.shape[0] // shards)  # fully_shard cuts rows as torch.chunk does
    return dtensor._local_tensor, min(shard * rows, tensor.shape[0])
