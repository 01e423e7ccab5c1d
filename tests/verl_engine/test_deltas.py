"""Weight updates: what verl's checkpoint engine delta_sharded gets from the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import BACKENDS, device
from verl_launch import launch_verl

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
            assert positions.device.type == values.device.type == device().type
            assert dtype == "bfloat16" and positions.dtype == torch.int32 and counts.tolist() == [values.numel()]
            gathered = gather_slot_entries_to_rank0(positions, values, counts.to(device()), group=group)
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
            received[name].view(-1)[positions.long().cpu()] = values.cpu()
        counts.append(sum(values.numel() for *_, values in changes))
        if rank == 0:
            assert all(torch.equal(received[name], tensor) for name, tensor in exported().items())
        else:
            exported()  # a collective
    counts.append(sum(values.numel() for *_, values in sent()))
    return counts, built.optimizer.mask.nnz


def check(model: Path, mask: Path, ranks: int, backend: str, **engine_options: Any) -> None:
    results = launch_verl(delta_run, ranks, str(model), str(mask), engine_options, backend=backend)
    (counts, nnz), *others = results
    assert all(0 < count <= nnz for count in counts[:3])
    assert counts[3] == 0  # nothing has changed since
    assert all(sum(found) == 0 for found, _ in others)  # rank 0 has collected all


@BACKENDS
def test_a_rollout_that_applies_the_changes_has_the_weights(backend: str, tmp_path: Path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    check(model, save_mask(model, 0.2), 2, backend)


@BACKENDS
def test_a_rank_without_active_elements_takes_part(backend: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM
    from verl_lab import save_model

    from sparse_opt import MaskSet

    model = save_model(tmp_path / "model")
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    first_rows = torch.arange(weights[name].numel() // 2 - weights[name].shape[1], dtype=torch.int32)  # of rank 0
    mask = MaskSet({name: first_rows}, {name: weights[name].shape}).save(tmp_path / "mask.safetensors")
    check(model, mask, 2, backend)


def test_replicated_shards_are_sent_once(tmp_path: Path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    check(model, save_mask(model, 0.2, "tile64"), 4, "gloo", fsdp_size=2)


def entries_on_meta(rank: int) -> list[tuple[str, str, int]]:
    """The entries of a rank that sends nothing: of plain parameters rank 0 sends everything."""
    import verl_lab
    from transformers import LlamaForCausalLM

    from sparse_opt import MaskSet, SparseAdamW
    from sparse_opt.integrations.verl.deltas import ChangedValues

    if rank == 0:
        return []
    with torch.device("meta"):
        model = LlamaForCausalLM(verl_lab.model_config())
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1), process_group=False)
    entries = ChangedValues(optimizer, model).entries()
    return [(positions.device.type, values.device.type, values.numel()) for *_, positions, values, _ in entries]


def test_a_rank_that_sends_nothing_has_its_entries_on_the_device_of_the_parameters():
    # meta, because a tensor on the CPU would be noticed only where the parameters are on another device.
    _, found = launch_verl(entries_on_meta, 2)
    assert found and set(found) == {("meta", "meta", 0)}
