"""Weight updates: what verl's checkpoint engine delta_sharded gets from the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch

pytest.importorskip("verl", reason="needs verl: make test-verl")

from test_engine import save_mask


def delta_run(rank: int, model: str, mask: str, engine_options: dict[str, Any]) -> Any:
    from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
    from verl_lab import engine, train, weights

    ranks = torch.distributed.get_world_size()
    built = engine(Path(model), "sparse_fsdp2", override={"mask": mask}, engine_options=engine_options)

    def sent() -> list[tuple[str, tuple[int, ...], torch.Tensor, torch.Tensor]]:
        """The changed elements of all ranks, on rank 0, as verl collects them."""
        found = []
        entries, _ = built.get_per_tensor_param_delta_shard()
        for slots, dtype, counts, positions, values, group in entries:
            assert dtype == "bfloat16" and positions.dtype == torch.int32 and counts.tolist() == [values.numel()]
            gathered = gather_slot_entries_to_rank0(positions, values, counts, group=group)
            if gathered is not None:
                found += [(name, shape, *pair) for (name, shape), pair in zip(slots, gathered, strict=True)]
        return found

    def exported() -> dict[str, torch.Tensor]:
        return {name: tensor.to(torch.bfloat16) for name, tensor in weights(built).items()}

    received = exported()
    built.prime_delta_snapshots()
    counts = []
    for step in range(3):
        train(built, range(step, step + 1), rank, ranks)
        changes = sent()
        for name, shape, positions, values in changes:
            assert received[name].shape == shape
            received[name].view(-1)[positions.long()] = values
        counts.append(sum(values.numel() for *_, values in changes))
        if rank == 0:
            assert all(torch.equal(received[name], tensor) for name, tensor in exported().items())
        else:
            exported()  # a collective
    counts.append(sum(values.numel() for *_, values in sent()))
    return counts, built.optimizer.mask.nnz


def check(model: Path, mask: Path, ranks: int, **engine_options: Any) -> None:
    (counts, nnz), *others = launch(delta_run, ranks, str(model), str(mask), engine_options)
    assert all(0 < count <= nnz for count in counts[:3])
    assert counts[3] == 0  # nothing has changed since
    assert all(sum(found) == 0 for found, _ in others)  # rank 0 has collected all


def test_a_rollout_that_applies_the_changes_has_the_weights(tmp_path: Path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    check(model, save_mask(model, 0.2), 2)


def test_replicated_shards_are_sent_once(tmp_path: Path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    check(model, save_mask(model, 0.2, "tile64"), 4, fsdp_size=2)
