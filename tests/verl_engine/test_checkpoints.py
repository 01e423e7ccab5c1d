"""Checkpoints of the engine, and the weights before training as the reference."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import BACKENDS
from verl_launch import launch_verl

pytest.importorskip("verl", reason="needs verl: make test-verl")

from test_engine import save_mask

SAVED, LAST = 3, 6


def whole_or_resumed_run(rank: int, model: str, mask: str, folder: str, resumed: bool) -> Any:
    """Saves a checkpoint on its way, or continues from it."""
    from verl_lab import engine, train, weights

    built = engine(Path(model), "sparse_fsdp2", override={"mask": mask, "momentum": 0.9}, **SGD)
    ranks = torch.distributed.get_world_size()
    if resumed:
        built.load_checkpoint(folder)
    else:
        train(built, range(SAVED), rank, ranks)
        built.save_checkpoint(folder, global_step=SAVED)
    return train(built, range(SAVED, LAST), rank, ranks), weights(built), built.lr_scheduler.state_dict()


# A cosine schedule and momentum: both continue only if they were saved.
SGD = {
    "lr": 0.1,
    "optimizer_options": {"optimizer": "SGD", "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
}


@BACKENDS
@pytest.mark.parametrize("ranks", [2, 1, 4])
def test_continues_on_any_number_of_ranks(ranks, backend, saved):
    if backend == "nccl" and ranks > 2:
        pytest.skip("needs 4 CUDA GPUs; runs with gloo")
    model, mask, folder, (_, weights, schedule) = saved(backend)
    for _, found, its_schedule in launch_verl(whole_or_resumed_run, ranks, model, mask, folder, True, backend=backend):
        assert its_schedule == schedule
        for name, tensor in found.items():
            # Sums have no fixed order on a GPU.
            exactly = ranks == 2 and backend == "gloo"
            tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(tensor, weights[name], **tolerance)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns model, mask and checkpoint of a run on two ranks of a backend, and how rank 0 continued it."""
    from verl_lab import save_model

    @functools.cache
    def run(backend: str) -> tuple[Any, ...]:
        folder = tmp_path_factory.mktemp("run")
        model = save_model(folder / "model")
        mask = save_mask(model, 0.3)
        checkpoint = str(folder / "global_step_3")
        results = launch_verl(whole_or_resumed_run, 2, str(model), str(mask), checkpoint, False, backend=backend)
        return str(model), str(mask), checkpoint, results[0]

    return run


def refused_run(rank: int, model: str, mask: str, folder: str) -> str:
    from verl_lab import engine

    from sparse_opt.errors import ConfigError

    built = engine(Path(model), "sparse_fsdp2", override={"mask": mask, "momentum": 0.9}, **SGD)
    with pytest.raises(ConfigError) as raised:
        built.load_checkpoint(folder)
    return str(raised.value)


def test_a_folder_that_is_no_checkpoint_is_refused(saved, tmp_path):
    model, mask, *_ = saved("gloo")
    (message,) = launch_verl(refused_run, 1, model, mask, str(tmp_path))
    assert "fsdp_config.json" in message


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["extra_state_world_size_2_rank_0.pt", "model_world_size_2_rank_0.pt"])
def test_nothing_in_a_folder_is_unpickled(name, saved, tmp_path):
    model, mask, folder, _ = saved("gloo")
    copy = shutil.copytree(folder, tmp_path / "copy")
    torch.save(Touch(tmp_path / "run"), copy / name)
    (message,) = launch_verl(refused_run, 1, model, mask, str(copy))
    assert name in message and "\n" not in message
    assert not (tmp_path / "run").exists()


def reference_run(rank: int, model: str, mask: str) -> Any:
    from verl_lab import batch, engine, train, weights

    options = {"model_options": {"lora_rank": 1, "lora": {"merge": True}}}
    built = engine(Path(model), "sparse_fsdp2", override={"mask": mask}, lr=1e-2, **options)
    ranks = torch.distributed.get_world_size()

    def log_probs() -> torch.Tensor:
        with built.eval_mode():
            output = built.infer_batch(batch(99, rank, ranks))
        return output["model_output"]["log_probs"].values().clone()

    before = log_probs()
    train(built, range(2), rank, ranks)
    trained, held = log_probs(), weights(built)
    with built.disable_adapter():
        reference = log_probs()
    same = all(torch.equal(tensor, held[name]) for name, tensor in weights(built).items())
    return before, trained, reference, same, [name for name, _ in built.module.named_parameters() if "lora" in name]


@BACKENDS
def test_the_reference_is_the_model_before_training(backend, tmp_path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model")
    results = launch_verl(reference_run, 2, str(model), str(save_mask(model, 0.3)), backend=backend)
    for before, trained, reference, same, adapters in results:
        assert torch.equal(reference, before) and not torch.equal(trained, before)
        assert same and adapters == []
