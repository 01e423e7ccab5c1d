"""verl's own checkpoint engine delta_sharded with the sparse engine, whose weights it compares as any others."""

from pathlib import Path

import pytest
import torch
from launch import BACKENDS, device
from verl_launch import launch_verl

pytest.importorskip("verl", reason="needs verl: make test-verl")

from test_engine import save_mask


def delta_run(rank: int, model: str, mask: str) -> tuple[list[int], int]:
    from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
    from verl_lab import engine, train, weights

    built = engine(Path(model), "sparse_fsdp2", override={"mask": mask})

    def exported() -> dict[str, torch.Tensor]:
        return {name: tensor.to(torch.bfloat16) for name, tensor in weights(built).items()}

    received = exported()
    built.prime_delta_snapshots()
    counts = []
    for step in range(2):
        train(built, range(step, step + 1), rank, 2)
        count = 0
        for slots, _, n, positions, values, group in built.get_per_tensor_param_delta_shard()[0]:
            gathered = gather_slot_entries_to_rank0(positions, values, n.to(device()), group=group)
            for (name, _), (at, new) in zip(slots, gathered or (), strict=False):
                received[name].view(-1)[at.long().cpu()] = new.cpu()
                count += new.numel()
        counts.append(count)
        expected = exported()
        assert rank > 0 or all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    return counts, built.optimizer.mask.nnz


@BACKENDS
def test_a_rollout_that_applies_the_changes_has_the_weights(backend, tmp_path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    (counts, nnz), _ = launch_verl(delta_run, 2, str(model), str(save_mask(model, 0.2)), backend=backend)
    assert all(0 < count <= nnz for count in counts)
