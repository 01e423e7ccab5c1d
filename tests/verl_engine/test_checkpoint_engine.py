"""The checkpoint engine sparse_opt: two processes train, and verl's loader for SGLang updates models in others."""

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import backends, device
from moe_models import moe_model
from verl_launch import launch_verl

pytest.importorskip("verl", reason="needs verl: make test-verl")

from test_engine import save_mask

from sparse_opt import MaskSet
from sparse_opt.errors import ForeignMessage, OutOfOrderMessage, WeightSyncError
from sparse_opt.integrations.verl.flushes import Change, ChangeReader, split_change, state_after
from sparse_opt.weight_sync import WeightSender

TRAINERS, UPDATES = 2, 4
HEADER = 1024  # bytes at most of the JSON in an update, whose share is small in models that are not tiny
MODULE = "sparse_opt.integrations.verl.checkpoint_engine"


class Manager:
    """verl's CheckpointEngineManager for workers that are not Ray's: calls the same methods in the same order.

    Args:
        worker: number of this process, those of the trainer first.
    """

    def __init__(self, folder: str, worker: int, options: dict[str, Any]) -> None:
        from verl.utils.import_utils import import_external_libs

        import_external_libs(MODULE)
        self.store = dist.FileStore(f"{folder}/store", -1)
        self.worker, self.update = worker, 0
        self.rollouts, self.bucket_size, self.timeout = (options[k] for k in ("rollouts", "bucket_size", "timeout"))
        self.restart()

    def restart(self) -> None:
        """Make the engine anew, as in a worker that verl has started."""
        from verl.checkpoint_engine import CheckpointEngineRegistry

        options = {"is_master": self.worker == 0} if self.worker < TRAINERS else {}
        self.engine = CheckpointEngineRegistry.new(
            "sparse_opt", bucket_size=self.bucket_size, timeout=self.timeout, **options
        )

    def join(self) -> bool:
        """Prepare an update; returns whether it has all weights."""
        self.update += 1
        found = self._gathered("metadata", self.engine.prepare())
        both = self.engine.build_topology(TRAINERS, self.rollouts, found) if self.worker == 0 else None
        of_trainers, of_rollouts = self._from_first("topology", both)
        arguments = of_trainers if self.worker < TRAINERS else of_rollouts
        index = self.worker if self.worker < TRAINERS else self.worker - TRAINERS
        own = {name: values[index] for name, values in arguments.items()}
        self.engine.init_process_group(**own)
        return own["whole"]

    def end(self) -> None:
        self.engine.finalize()
        self._gathered("end", None)

    def _gathered(self, what: str, value: Any) -> list[Any]:
        self.store.set(f"{what}/{self.update}/{self.worker}", pickle.dumps(value))
        keys = [f"{what}/{self.update}/{i}" for i in range(TRAINERS + self.rollouts)]
        return [pickle.loads(self.store.get(key)) for key in keys]

    def _from_first(self, what: str, value: Any) -> Any:
        if self.worker == 0:
            self.store.set(f"{what}/{self.update}", pickle.dumps(value))
        return pickle.loads(self.store.get(f"{what}/{self.update}"))


def trainer(rank: int, folder: str, options: dict[str, Any]) -> Any:
    """Train a step before each update; returns what was sent, and all weights in bf16 after each update."""
    from verl_lab import engine, train, weights

    built = engine(
        Path(options["model"]),
        "sparse_fsdp2",
        lr=options["lr"],
        override={"mask": options["mask"]},
        engine_options={"fsdp_size": options["fsdp_size"]},
    )
    manager = Manager(folder, rank, options)
    metrics, exported = [], []
    for step in range(UPDATES):
        train(built, range(step, step + 1), rank, TRAINERS)
        manager.join()
        tensors, _ = built.get_per_tensor_param()
        try:
            metrics.append(asyncio.run(manager.engine.send_weights(tensors, global_steps=step)))
        except WeightSyncError as error:
            metrics.append(str(error))
        manager.end()
        exported.append({name: tensor.to(torch.bfloat16) for name, tensor in weights(built).items()})
    return metrics, exported, built.optimizer.mask.nnz


class Rollout(torch.nn.Module):
    """A model with the method by which vLLM and SGLang load weights; its weights are zeros, as with dummy weights."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.model.to(device().type)
        for parameter in self.model.parameters():
            parameter.data.zero_()

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def rollout(rank: int, folder: str, options: dict[str, Any]) -> Any:
    """Apply the updates; returns whether each had all weights, and all weights after each.

    The worker `restart` starts anew before its last update. The worker `stuck` does not receive its second update.
    """
    from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

    if device().type == "cuda":  # the trainers have the first GPUs
        torch.cuda.set_device(TRAINERS + rank)
    manager = Manager(folder, TRAINERS + rank, options)
    model = Rollout(options["model"])
    whole, received, flushes = [], [], []
    for update in range(UPDATES):
        if update == UPDATES - 1 and options["restart"] == rank:
            manager.restart()
            model = Rollout(options["model"])
        whole.append(manager.join())
        stuck, ends = (update, options["stuck"]) == (1, rank), []
        try:
            for named, is_last in () if stuck else manager.engine.receive_weights(global_steps=update):
                apply_delta(model, named)
                ends.append(is_last)
        except WeightSyncError:
            assert options["stuck"] is not None
            ends = []
        assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
        flushes.append(len(ends))
        manager.end()
        tensors = model.model.named_parameters(remove_duplicate=False)
        received.append({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors})
    return whole, received, flushes


def run(tmp_path: Path, model: Path, mask: Path, backend: str = "gloo", **given: Any) -> tuple[list[Any], list[Any]]:
    """The results of the trainers and of the rollout workers, which run at the same time in other process groups."""
    options = {"model": str(model), "mask": str(mask), "rollouts": 1, "bucket_size": 2**20, "restart": None, "lr": 1e-2}
    options |= {"stuck": None, "timeout": 60.0, "fsdp_size": -1, **given}
    with ThreadPoolExecutor(2) as pool:
        trainers = pool.submit(launch_verl, trainer, TRAINERS, str(tmp_path), options, backend=backend)
        rollouts = pool.submit(launch_verl, rollout, options["rollouts"], str(tmp_path), options, backend=backend)
        return trainers.result(), rollouts.result()


def assert_same_bits(exported: list[Any], received: list[Any]) -> None:
    for expected, found in zip(exported, received, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)


@backends(4)
@pytest.mark.parametrize(("pattern", "tied"), [("element", True), ("tile64", False)], ids=["tied", "tiles"])
def test_rollouts_have_the_weights_and_active_values_are_sent_once(pattern, tied, backend, tmp_path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model", tied=tied)
    # Buckets of 64 KiB: several flushes of all weights, and of changes.
    # Without tied weights, the trainers hold replicas of the shards.
    options = {"rollouts": 2, "bucket_size": 2**16, "fsdp_size": -1 if tied else 1}
    trained, rolled = run(tmp_path, model, save_mask(model, 0.2, pattern), backend, **options)
    (metrics, exported, nnz), _ = trained
    for whole, received, flushes in rolled:
        assert whole == [True, False, False, False]
        assert flushes[0] > 1
        assert_same_bits(exported, received)
    for update in metrics[1:]:
        share = update["checkpoint_engine/changed_ratio"]
        nbytes = update["checkpoint_engine/payload_mbytes"] * 2**20 - HEADER
        assert 0 < share <= 1
        assert nbytes <= min(2.01, 0.125 + 2.1 * share) * nnz + 8
    assert metrics[0]["checkpoint_engine/payload_mbytes"] > metrics[1]["checkpoint_engine/payload_mbytes"]


@backends(4)
def test_a_rollout_worker_that_restarts_gets_all_weights(backend, tmp_path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    ((_, exported, _), _), rolled = run(tmp_path, model, save_mask(model, 0.2), backend, rollouts=2, restart=1)
    for whole, received, _ in rolled:
        assert whole == [True, False, False, True]
        assert_same_bits(exported, received)


@backends(4)
def test_an_update_after_one_that_a_rollout_worker_did_not_receive_has_all_weights(backend, tmp_path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    mask = save_mask(model, 0.2)
    ((metrics, exported, _), _), rolled = run(tmp_path, model, mask, backend, rollouts=2, stuck=1, timeout=3.0)
    assert "a broadcast of weights has failed at rank 0 of the 3 members" in metrics[1]
    for whole, received, _ in rolled:
        assert whole == [True, False, True, False]
        assert_same_bits(exported[2:], received[2:])


def refused(rank: int) -> str:
    from sparse_opt.errors import ConfigError
    from sparse_opt.integrations.verl.checkpoint_engine import SparseCheckpointEngine

    with pytest.raises(ConfigError) as raised:
        asyncio.run(SparseCheckpointEngine(bucket_size=1).send_weights(iter([("w", torch.zeros(1))])))
    return str(raised.value)


def test_weights_of_another_engine_are_refused():
    assert "strategy=sparse_fsdp2" in launch_verl(refused, 1)[0]


@pytest.fixture
def sender():
    """Weights of two dtypes, and their sender."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (96, 130), "b": (70, 64)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["a"] = weights["a"].bfloat16()
    mask = MaskSet.random(weights, density=0.4, pattern="run16", seed=2)
    return weights, WeightSender(weights, mask)


def change(weights: dict[str, torch.Tensor], every: int) -> None:
    for tensor in weights.values():
        tensor.view(-1)[::every] += 1


@pytest.mark.parametrize("every", [1, 97], ids=["values", "bitmap"])
def test_changes_have_the_positions_and_values_of_an_update(every, sender):
    weights, sends = sender
    received = {name: tensor.clone() for name, tensor in weights.items()}
    reader = ChangeReader(torch.device("cpu"))
    reader.start(sends.mask_message())
    for _ in range(2):
        change(weights, every)
        message = sends.update().wait()
        assert any(name.endswith("values" if every == 1 else "bitmap") for name in message.tensors)
        found = reader.changes(message)
        assert [name for name, *_ in found] == ["a", "b"]
        for name, shape, positions, values in found:
            assert shape == weights[name].shape and positions.dtype == torch.int32
            received[name].view(-1)[positions.long()] = values
    active = {name: sends.mask.bool(name) for name in weights}
    assert all(torch.equal(received[name][active[name]], weights[name][active[name]]) for name in weights)
    assert reader.state == state_after(message)


def test_updates_out_of_order_and_of_other_masks_are_refused(sender):
    weights, sends = sender
    reader = ChangeReader(torch.device("cpu"))
    with pytest.raises(OutOfOrderMessage, match="before the first mask"):
        reader.changes(sends.update().wait())
    reader.start(sends.mask_message())
    change(weights, 1)
    missed = sends.update().wait()
    with pytest.raises(OutOfOrderMessage, match="the receiver has version 1"):
        reader.changes(sends.update().wait())
    with pytest.raises(ForeignMessage, match="mask"):
        reader.changes(replace(missed, mask_digest="0"))
    with pytest.raises(OutOfOrderMessage, match="digest 0,"):
        reader.changes(replace(missed, base_digest="0"))
    assert reader.changes(missed)


def test_the_group_is_kept_while_its_members_stay():
    from sparse_opt.integrations.verl.checkpoint_engine import Member, SparseCheckpointEngine

    build = SparseCheckpointEngine.build_topology
    first, others = build(2, 2, [Member(None, "h:1"), Member(), Member(), Member()])
    assert (first["rank"], others["rank"], first["size"], others["address"]) == ([0, -1], [1, 2], [3, 3], ["h:1"] * 2)
    assert first["whole"] == [True, True]
    key = first["key"][0]

    def members(*ranks: int, size: int, state: str = "s") -> list[Member]:
        return [Member("s", "h:1", (key, 0, size)), Member()] + [Member(state, "", (key, r, size)) for r in ranks]

    first, others = build(2, 2, members(1, 2, size=3))
    assert {*first["key"], *others["key"]} == {key} and not any(first["whole"] + others["whole"])
    for changed, workers in ((members(2, 1, size=3), 2), (members(1, size=3), 1)):
        first, others = build(2, workers, changed)
        assert key not in first["key"] + others["key"] and not any(first["whole"])
    assert build(2, 2, members(1, 2, size=3, state="older"))[0]["whole"] == [True, True]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])  # verl sends the experts of gpt_oss together
def test_changes_of_fused_experts_have_the_names_and_shapes_that_verl_sends(family):
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    from sparse_opt.integrations.verl.rollout_weights import rollout_tensors

    model = moe_model(family)

    def sent() -> dict[str, torch.Tensor]:
        weights = unfuse_moe_params(model.named_parameters(), model.config.model_type)
        return {name: tensor.detach().clone() for name, tensor in weights}

    received, tensors = sent(), rollout_tensors(model)
    changes = []
    for name, indices in MaskSet.random(model, density=0.1, seed=1).indices.items():
        parameter = model.get_parameter(name).data
        parameter.view(-1)[indices.long()] += 1
        values = parameter.view(-1)[indices.long()]
        changes += split_change(Change(name, tuple(parameter.shape), indices.to(torch.int32), values), *tensors[name])
    for name, shape, positions, values in changes:
        assert received[name].shape == shape
        received[name].view(-1)[positions.long()] = values
    expected = sent()
    assert expected.keys() == received.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
