"""The engine against verl's own FSDP2 engine, on two processes with gloo, and on two GPUs with NCCL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import BACKENDS
from verl_launch import launch_verl

pytest.importorskip("verl", reason="needs verl: make test-verl")

STEPS = range(20)


def save_mask(model: Path, density: float, pattern: str = "element") -> Path:
    from transformers import AutoModelForCausalLM

    from sparse_opt import MaskSet

    shapes = AutoModelForCausalLM.from_pretrained(model)
    return MaskSet.random(shapes, density=density, pattern=pattern, seed=3).save(model.parent / "mask.safetensors")


def sparse_run(rank: int, model: str, mask: str, options: dict[str, Any]) -> Any:
    from verl_lab import engine, train, weights

    ranks = torch.distributed.get_world_size()
    built = engine(Path(model), "sparse_fsdp2", override={"mask": mask}, **options)
    return train(built, STEPS, rank, ranks), weights(built)


def masked_run(rank: int, model: str, mask: str, options: dict[str, Any]) -> Any:
    """verl's engine with gradients that are multiplied by the mask before they are clipped."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    from verl_lab import engine, train, weights

    from sparse_opt import MaskSet

    ranks = torch.distributed.get_world_size()
    built = engine(Path(model), "fsdp2", **options)
    active = MaskSet.load(mask)
    whole_step = built.optimizer_step

    def step() -> float:
        for name, param in built.module.named_parameters():
            if param.grad is not None:
                keep = active.bool(name) if name in active else torch.zeros(param.shape, dtype=torch.bool)
                keep = keep.to(param.grad.to_local())
                param.grad.mul_(distribute_tensor(keep, param.device_mesh, param.placements))
                assert isinstance(param.grad, DTensor)
        return whole_step()

    built.optimizer_step = step
    return train(built, STEPS, rank, ranks), weights(built)


def start(model: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).state_dict()


def assert_same(found: Any, expected: Any, model: Path, backend: str) -> None:
    """Compare losses, norms and weights of two runs on the same ranks.

    On a CPU both run the same kernels, and the weights differ by the rounding of sums. On a GPU sums have no fixed
    order, which changes a gradient by about 1e-6 of its addends, and AdamW's update of an element whose addends cancel
    by as much as the update. If the gradients of elements are spread evenly over the size of their addends, the norm of
    these differences is sqrt(4e-6) of the norm of the updates. A gradient that is not averaged over the ranks is off by
    half of it or more.
    """
    before = start(str(model))
    for (losses, tensors), (expected_losses, expected_tensors) in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-4, atol=1e-5)
        assert tensors.keys() == expected_tensors.keys()
        for name, tensor in tensors.items():
            if backend == "nccl":
                change = (expected_tensors[name] - before[name]).norm()
                assert (tensor - expected_tensors[name]).norm() <= 0.01 * change, name
            else:
                torch.testing.assert_close(
                    tensor, expected_tensors[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
                )


@BACKENDS
@pytest.mark.parametrize(
    ("density", "pattern", "tied", "options"),
    [(0.2, "element", False, {}), (0.2, "tile64", True, {}), (1.0, "element", False, {"weight_decay": 0.1})],
    ids=["untied", "tied-tiles", "all-elements"],
)
def test_trains_like_verls_engine_with_masked_gradients(density, pattern, tied, options, backend, tmp_path):
    from verl_lab import save_model

    model = save_model(tmp_path / "model", tied=tied)
    arguments = str(model), str(save_mask(model, density, pattern)), options
    found, expected = (launch_verl(run, 2, *arguments, backend=backend) for run in (sparse_run, masked_run))
    assert_same(found, expected, model, backend)
