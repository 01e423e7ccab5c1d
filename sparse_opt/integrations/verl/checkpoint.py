"""verl's checkpoints with the state of a sparse optimizer, for any number of ranks.

A folder has verl's own files but for the optimizer's: `model_world_size_N_rank_R.pt`, `extra_state_...`, and
`huggingface/`, so that verl's model merger works. The optimizer's state is in `sparse_optimizer`, a checkpoint of
`torch.distributed.checkpoint`, which does not depend on the number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from ...distributed import load_optimizer
from ...errors import ConfigError
from ...files import DamagedFile, one_line
from ...optim import SparseOptimizer
from ...pt_file import load_pt

FOLDER = "sparse_optimizer"


class SparseCheckpointManager(FSDPCheckpointManager):
    """verl's FSDPCheckpointManager with the optimizer's state in a checkpoint of `torch.distributed.checkpoint`."""

    _saving = False  # while verl's code runs, which would write the optimizer's state for this number of ranks

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
        return not self._saving and "optimizer" in self.checkpoint_save_contents

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
        self._saving = True
        try:
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        finally:
            self._saving = False
        if self.should_save_optimizer:
            dcp.save({"optimizer": self.optimizer.state_dict()}, checkpoint_id=Path(local_path) / FOLDER)
        dist.barrier()

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a checkpoint of any number of ranks into the model, the optimizer and the schedule.

        The states of the random generators are restored if the number of ranks is the same. The folder is not trusted:
        verl's own method would unpickle any object in it.

        Raises:
            ConfigError: the folder is not a checkpoint of this engine; or a file cannot be read, or has other objects
                than tensors and plain values.
            ValueError: it is of another model or mask.
        """
        if local_path is None:
            return
        folder = Path(local_path)
        saved_by = _n_ranks(folder)
        if self.should_load_optimizer and not (folder / FOLDER).is_dir():
            raise ConfigError(f"{folder} has no {FOLDER}: it is not a checkpoint of a sparse optimizer")
        if self.should_load_model:
            load_shards(self.model, folder, saved_by)
        if self.should_load_extra:
            same = saved_by == self.world_size
            extra = _load(folder / f"extra_state_world_size_{saved_by}_rank_{self.rank if same else 0}.pt")
            if same:
                self.load_rng_state(extra["rng"])
            if self.lr_scheduler is not None:
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


def _load(file: Path) -> dict[str, Any]:
    """Map a file of verl's into memory. Only tensors, numpy's arrays and plain values are unpickled."""
    words = np.zeros(1, dtype=np.uint32)  # as in the state of numpy's generator
    array: list[Any] = [words.__reduce__()[0], np.ndarray, np.dtype, type(words.dtype)]
    try:
        with torch.serialization.safe_globals(array):
            content: dict[str, Any] = load_pt(file, mmap=True)
    except (OSError, DamagedFile) as error:
        raise ConfigError(f"{file}: {one_line(error)}") from error
    return content


@torch.no_grad()
def load_shards(model: nn.Module, folder: Path, saved_by: int) -> None:
    """Copy the weights of a checkpoint of any number of ranks into a model's shards.

    Each rank reads the file of its number if the number of ranks is the same, otherwise those of all ranks, one after
    the other.

    Raises:
        ConfigError: a file cannot be read, or has other objects than tensors.
        ValueError: the checkpoint has other names or shapes.
    """
    own = model.state_dict()
    for rank in [dist.get_rank()] if saved_by == dist.get_world_size() else range(saved_by):
        saved = _load(folder / f"model_world_size_{saved_by}_rank_{rank}.pt")
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
