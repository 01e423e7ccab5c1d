"""Trainers in two processes: the same curves and weights as in one process with the same global batches.

Over gloo on CPUs, and over NCCL on two GPUs of a host.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from launch import device, launch, preload
from torch.distributed.tensor import DTensor
from trainer_lab import Lab, make_tokenizer, rows_of

from sparse_opt import DeltaLog, MaskSet, SparseAdamW
from sparse_opt.integrations import SparseArguments

pytestmark = pytest.mark.dist

# TRL's modules are imported when they are used.
preload("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer")

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
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
SHARDED = ["SFT", "GRPO with a reference", "Trainer", "DPO"]  # of CASES, with FSDP2


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
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {
        "curve": [row for row in trainer.state.log_history if "loss" in row],
        "weights": {name: p.detach().cpu().clone() for name, p in whole.items()},
    }


@contextmanager
def fsdp2() -> Iterator[None]:
    """What `accelerate launch --use_fsdp --fsdp_version 2` sets.

    accelerate shards models on GPUs only, although the code that shards them also runs on a CPU: inside, it takes
    processes on a CPU for processes on GPUs.
    """
    options = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    }
    init = PartialState.__init__

    def as_on_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with mock.patch.dict(os.environ, options), mock.patch.object(PartialState, "__init__", as_on_gpus):
        yield


def lab_of_rank(folder: Path, root: Path) -> Lab:
    """A lab on the CPU, or on the GPU of this rank."""
    torch.use_deterministic_algorithms(device().type == "cuda")  # comparisons of bits require it
    return Lab(folder, make_tokenizer(), root, device())


def train_all(rank: int, folder: Path, mask_file: Path, root: Path) -> dict[str, Any]:
    lab = lab_of_rank(folder, root)
    results = {}
    all_reduce, reduced = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    for case in CASES:
        reduced.clear()
        with mock.patch.object(dist, "all_reduce", counted):
            results[case] = outcome(trained(lab, case, mask_file, batch=2)) | {"reduced": sum(reduced)}
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = trained(lab, "DPO", mask_file, batch=2, log=root / "log", **saving)
    checkpoint = f"{trainer.args.output_dir}/checkpoint-3"
    results["saved"] = outcome(trainer)
    results["resumed"] = outcome(trained(lab, "DPO", mask_file, batch=2, resume=checkpoint))
    return {**results, "checkpoint": checkpoint}


def train_sharded(rank: int, folder: Path, mask_file: Path, root: Path) -> dict[str, Any]:
    lab = lab_of_rank(folder, root)
    results = {}
    with fsdp2():
        for case in SHARDED:
            log = root / "log" if case == SHARDED[-1] else None
            trainer = trained(lab, case, mask_file, batch=2, log=log, save_strategy="steps", save_steps=3)
            assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
            results[case] = outcome(trainer)
        checkpoint = f"{trainer.args.output_dir}/checkpoint-3"
        resumed = trained(lab, case, mask_file, batch=2, resume=checkpoint, log=log)  # and compared with the log
        results["resumed"] = outcome(resumed)
        trainer = trained(lab, "Trainer", mask_file, batch=2)
        trainer.train()  # accelerate prepares the sharded model again
        results["twice"] = outcome(trainer)
        _train_by_hand(lab, mask_file, rank)
    return results


def _train_by_hand(lab: Lab, mask_file: Path, rank: int) -> None:
    """The documented loop with accelerate's FSDP2 gives the bits of processes with the whole model."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## accelerate\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model, whole, accelerator = lab.model(), lab.model(), Accelerator()
    mask = MaskSet.load(mask_file, model)
    names = {"model": model, "mask": mask, "accelerator": accelerator, "SparseAdamW": SparseAdamW}
    built, _, rebound = code.partition("sparse.rebind")
    exec(built, names)
    optimizer = names["optimizer"]
    with pytest.raises(RuntimeError, match=r"'model.embed_tokens.weight' was replaced .* call rebind\(model\)"):
        optimizer.step()
    exec(f"sparse.rebind{rebound}", names)
    replicated = SparseAdamW(whole, mask, lr=1e-5, process_group=dist.group.WORLD)
    for step in range(3):
        tokens = torch.randint(5, 40, (2, 8), generator=torch.Generator().manual_seed(2 * step + rank))
        tokens = tokens.to(lab.device)
        for trained_model, its_optimizer in ((names["model"], optimizer), (whole, replicated)):
            accelerator.backward(trained_model(input_ids=tokens, labels=tokens).loss)
            its_optimizer.step()
            its_optimizer.zero_grad()
    for p, q in zip(names["model"].parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


def train_one(rank: int, folder: Path, mask_file: Path, root: Path, cases: list[str]) -> dict[str, dict[str, Any]]:
    """The outcomes of one process of a launcher, by case."""
    lab = lab_of_rank(folder, root)
    return {case: outcome(trained(lab, case, mask_file, batch=4)) for case in cases}


def resume_one(rank: int, folder: Path, mask_file: Path, root: Path, checkpoint: str) -> dict[str, Any]:
    return outcome(trained(lab_of_rank(folder, root), "DPO", mask_file, batch=4, resume=checkpoint))


def alone(lab: Lab, cases: list[str], mask_file: Path, root: Path) -> dict[str, dict[str, Any]]:
    """The outcomes of one process with the whole batches, by case; some steps are clipped."""
    if lab.device.type == "cpu":
        results = {case: outcome(trained(lab, case, mask_file, batch=4)) for case in cases}
    else:  # without a launcher the Trainer would run on all GPUs
        (results,) = launch(train_one, 1, lab.folder, mask_file, root, cases, timeout=600, backend="nccl")
    start = {name: p.cpu() for name, p in lab.model().named_parameters()}
    for result in results.values():
        assert len(result["curve"]) == STEPS
        assert max(row["grad_norm"] for row in result["curve"]) > MAX_GRAD_NORM
        assert max((p - start[name]).abs().max().item() for name, p in result["weights"].items()) > 1e-2
    return results


def assert_same(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    for row, other in zip(found["curve"], expected["curve"], strict=True):
        assert row["learning_rate"] == other["learning_rate"]
        assert row["loss"] == pytest.approx(other["loss"], abs=LOSS_TOLERANCE), case
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=NORM_TOLERANCE), case
    for name, p in expected["weights"].items():
        # Adam's step is up to the learning rate, 3e-3, whatever the gradient: rounding moves weights whose gradient is
        # rounding itself by more than it moves losses.
        torch.testing.assert_close(found["weights"][name], p, rtol=0, atol=1e-4, msg=f"{case}: {name}")


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, p in expected["weights"].items():
        assert torch.equal(found["weights"][name], p), name


def assert_logged(directory: Path, lab: Lab, expected: dict[str, Any]) -> None:
    with DeltaLog.open(directory) as log:
        assert list(log.steps) == list(range(STEPS + 1))
        first, last = log.load(0), log.load(STEPS)
    assert all(torch.equal(first[name], p.cpu()) for name, p in lab.model().named_parameters())
    assert all(torch.equal(last[name], p) for name, p in expected["weights"].items())


@pytest.fixture
def backend(lab: Lab) -> str:
    """Of the processes: gloo on the CPU, NCCL on GPUs."""
    if lab.device.type == "cpu":
        return "gloo"
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    return "nccl"


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_whole_batch(lab: Lab, backend: str, tmp_path: Path) -> None:
    mask = lab.random_mask(0.1)
    mask_file = mask.save(tmp_path / "mask.safetensors")
    limits: dict[str, Any] = {"timeout": 600, "collective_timeout": 300, "backend": backend}
    ranks = launch(train_all, 2, lab.folder, mask_file, tmp_path / "two", **limits)
    expected = alone(lab, list(CASES), mask_file, tmp_path / "one")
    for case, (kind, sparse, _) in CASES.items():
        assert_same(ranks[0][case], expected[case], case)
        assert_same_bits(ranks[1][case], ranks[0][case])
        if kind != "GRPO":  # TRL reduces statistics
            # The compact gradients once per step, and nothing else: the other micro-batches are inside no_sync().
            assert ranks[0][case]["reduced"] == (0 if sparse.get("grads") == "dense" else STEPS * mask.nnz), case
    for rank in (0, 1):
        assert_same_bits(ranks[rank]["saved"], ranks[0]["DPO"])  # saving changes nothing
        assert_same_bits(ranks[rank]["resumed"], ranks[0]["DPO"])
    (resumed,) = launch(resume_one, 1, lab.folder, mask_file, tmp_path / "resumed", ranks[0]["checkpoint"], **limits)
    assert_same(resumed, ranks[0]["DPO"], "resumed in one process")
    assert_logged(tmp_path / "two" / "log", lab, ranks[0]["DPO"])


@pytest.mark.slow
def test_two_processes_with_fsdp2_train_as_one(lab: Lab, backend: str, tmp_path: Path) -> None:
    mask_file = lab.random_mask(0.1).save(tmp_path / "mask.safetensors")
    limits: dict[str, Any] = {"timeout": 600, "collective_timeout": 300, "backend": backend}
    ranks = launch(train_sharded, 2, lab.folder, mask_file, tmp_path / "two", **limits)
    expected = alone(lab, SHARDED, mask_file, tmp_path / "one")
    for case in SHARDED:
        assert_same(ranks[0][case], expected[case], case)
    assert_same_bits(ranks[0]["resumed"], ranks[0][case])
    assert_logged(tmp_path / "two" / "log", lab, ranks[0][case])
    assert ranks[0]["twice"]["curve"][-1]["loss"] < ranks[0]["Trainer"]["curve"][0]["loss"]
