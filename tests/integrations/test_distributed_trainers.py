"""Trainers in two processes: the same curves and weights as in one process with the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from trainer_lab import Lab, make_tokenizer, rows_of

from sparse_opt import DeltaLog
from sparse_opt.integrations import SparseArguments

STEPS = 8
MAX_GRAD_NORM = 0.3
EPS = 2**-23
# Losses of order one, of weights that differ by one rounding of each step, because gradients are summed in another
# order; a loss sums some 100 products of them: sqrt(100) roundings a step.
LOSS_TOLERANCE = STEPS * 10 * EPS
# Squares of some 3,000 gradients, each with roundings of its own, and the weights' error.
NORM_TOLERANCE = 60 * EPS + LOSS_TOLERANCE

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Trainer": ("Trainer", {}, {}),
    "DPO, dense gradients": ("DPO", {"grads": "dense"}, {}),
    "SFT": ("SFT", {}, {}),
    "DPO": ("DPO", {}, {"gradient_accumulation_steps": 3}),
    "GRPO with a reference": ("GRPO", {}, {"beta": 0.3}),
}


def seeded_completions(trainer: Any) -> None:
    """Let GRPO's completions depend on the prompt alone, because each process samples with a seed of its own."""

    def complete(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        made = []
        for i, prompt in enumerate(prompt_ids):
            generator = torch.Generator().manual_seed(1000 * sum(prompt) + i % trainer.num_generations)
            made.append(torch.randint(5, 40, (6,), generator=generator).tolist())
        return made, None

    trainer._generate_single_turn = complete


def trained(
    lab: Lab, case: str, mask: Any, *, batch: int, resume: str | None = None, log: Path | None = None, **changes: Any
) -> Any:
    kind, sparse, options = CASES[case]
    rows = rows_of(kind, 24)  # in steps of 8, or 12: whole batches for one process and for two
    trainer = lab(
        kind,
        mask=mask,
        sparse=SparseArguments(**sparse, delta_log_dir=log),
        given={"train_dataset": rows},
        max_steps=STEPS,
        max_grad_norm=MAX_GRAD_NORM,
        per_device_train_batch_size=2 * batch if kind == "GRPO" else batch,
        **{**options, **changes},
    )
    if kind == "GRPO":
        seeded_completions(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "curve": [row for row in trainer.state.log_history if "loss" in row],
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def train_all(rank: int, folder: Path, mask_file: Path, root: Path) -> dict[str, Any]:
    lab = Lab(folder, make_tokenizer(), root, torch.device("cpu"))
    results = {}
    all_reduce, reduced = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    for case in CASES:
        reduced.clear()
        dist.all_reduce = counted
        results[case] = outcome(trained(lab, case, mask_file, batch=2)) | {"reduced": sum(reduced)}
        dist.all_reduce = all_reduce
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = trained(lab, "DPO", mask_file, batch=2, log=root / "log", **saving)
    checkpoint = f"{trainer.args.output_dir}/checkpoint-3"
    results["whole"] = outcome(trainer)
    results["resumed"] = outcome(trained(lab, "DPO", mask_file, batch=2, resume=checkpoint))
    return {**results, "checkpoint": checkpoint}


def test_two_processes_train_as_one_with_the_whole_batch(lab: Lab, tmp_path: Path) -> None:
    if lab.device.type != "cpu":
        pytest.skip("the two processes run on the CPU")
    mask = lab.random_mask(0.1)
    mask_file = mask.save(tmp_path / "mask.safetensors")
    ranks = launch(train_all, 2, lab.folder, mask_file, tmp_path / "two", timeout=300)
    start = dict(lab.model().named_parameters())
    for case in CASES:
        alone = outcome(trained(lab, case, mask_file, batch=4))
        assert len(alone["curve"]) == STEPS
        assert max(row["grad_norm"] for row in alone["curve"]) > MAX_GRAD_NORM, case  # some steps are clipped
        for row, other in zip(ranks[0][case]["curve"], alone["curve"], strict=True):
            assert row["learning_rate"] == other["learning_rate"]
            assert row["loss"] == pytest.approx(other["loss"], abs=LOSS_TOLERANCE), case
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=NORM_TOLERANCE), case
        if CASES[case][0] != "GRPO":  # TRL reduces statistics
            # The compact gradients once per step, and nothing else: the other micro-batches are inside no_sync().
            compact = CASES[case][1].get("grads") != "dense"
            assert ranks[0][case]["reduced"] == (STEPS * mask.nnz if compact else 0), case
        moved = 0.0
        for name, p in alone["weights"].items():
            assert torch.equal(ranks[0][case]["weights"][name], ranks[1][case]["weights"][name]), (case, name)
            # Adam's step is up to the learning rate, 3e-3, whatever the gradient: rounding moves weights whose gradient
            # is rounding itself by more than it moves losses.
            torch.testing.assert_close(ranks[0][case]["weights"][name], p, rtol=0, atol=1e-4, msg=f"{case}: {name}")
            moved = max(moved, (p - start[name]).abs().max().item())
        assert moved > 1e-2, case

    whole = ranks[0]["whole"]["weights"]
    for rank in (0, 1):
        for name, p in whole.items():
            assert torch.equal(p, ranks[rank]["DPO"]["weights"][name]), name  # saving changes nothing
            assert torch.equal(p, ranks[rank]["resumed"]["weights"][name]), name
    resumed = trained(lab, "DPO", mask_file, batch=4, resume=ranks[0]["checkpoint"])
    for name, p in resumed.model.named_parameters():
        torch.testing.assert_close(p.detach(), whole[name], rtol=0, atol=1e-4, msg=name)
    with DeltaLog.open(tmp_path / "two" / "log") as delta_log:
        assert list(delta_log.steps) == list(range(STEPS + 1))
        state = delta_log.load(STEPS)
    assert all(torch.equal(state[name], p) for name, p in whole.items())
