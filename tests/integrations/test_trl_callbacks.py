"""The callbacks of `sparse-opt train` in other trainers, and the reward `exact_match`."""

import json
from pathlib import Path

import pytest
import torch

from sparse_opt.integrations import SparseArguments
from sparse_opt.integrations.trl.margins import MarginsCallback
from sparse_opt.integrations.trl.memory import MemoryCallback
from sparse_opt.integrations.trl.rewards import exact_match
from sparse_opt.integrations.trl.update_statistics import UpdateStatisticsCallback


def rows(trainer, name):
    return [json.loads(line) for line in Path(trainer.args.output_dir, name).read_text().splitlines()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_and_memory_of_any_trainer(lab, dtype):
    mask = lab.random_mask(0.1, without=("norm",))
    ends = {}
    for kind in ("dense", "sparse"):
        given = {"mask": mask, "sparse": SparseArguments(master_weights=True)} if kind == "sparse" else {}
        trainer = lab("Trainer", model=lab.model(dtype), max_steps=3, **given)
        trainer.add_callback(MemoryCallback())
        trainer.add_callback(UpdateStatisticsCallback(2))
        trainer.train()
        assert [row["step"] for row in rows(trainer, "update_statistics.jsonl")] == [2, 3]
        assert all(row["ranks"][0]["peak_host_memory_bytes"] > 0 for row in rows(trainer, "memory.jsonl"))
        ends[kind] = rows(trainer, "update_statistics.jsonl")[-1]
    n_weights = ends["sparse"]["n_weights"]
    assert 0 < ends["sparse"]["share_changed"] <= mask.nnz / n_weights < ends["dense"]["share_changed"]


def test_margins_of_a_dense_and_a_sparse_dpo_trainer(lab):
    for mask in (None, lab.random_mask(0.3)):
        trainer = lab("DPO", mask=mask, max_steps=3)
        trainer.add_callback(MarginsCallback(trainer))
        trainer.train()
        found = rows(trainer, "logs/margins/margins_log.jsonl")
        logged = [row["rewards/margins"] for row in trainer.state.log_history if "rewards/margins" in row]
        assert [row["mean"] for row in found] == pytest.approx(logged, rel=1e-5, abs=1e-9)
        assert [row["n"] for row in found] == [4, 4, 1]  # of 9 rows


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("2 + 5 = 7", "7", 1.0),
        ("<think>8</think> It is 7.0", "7", 1.0),
        ("<think>7</think>", "7", 0.0),
        ("1,234", "1234", 1.0),
        ("7 or 8", "7", 0.0),
        (" yes ", "yes", 1.0),
        ("yes, it is", "yes", 0.0),
        ([{"role": "assistant", "content": "-0.5"}], -0.5, 1.0),
        ("99999999999999999999999", "99999999999999999999998", 0.0),
        ("7", None, None),
    ],
)
def test_exact_match(completion, answer, reward):
    assert exact_match(completions=[completion], answer=[answer]) == [reward]
