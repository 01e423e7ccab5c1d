from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_opt import MaskSet
from sparse_opt.cli.quickstart import checks as quickstart_checks
from sparse_opt.cli.quickstart import data as quickstart_data
from sparse_opt.cli.quickstart import timing
from sparse_opt.errors import SparseOptError
from sparse_opt.trainers.run.lock import RunLock

TINY = ("--sft_steps", 2, "--dpo_steps", 3, "--n_questions", 66, "--device", "cpu")


def test_questions_are_about_different_pairs_and_answered_right():
    rows = quickstart_data.preferences(4005, random.Random(0))
    assert len({frozenset((row["chosen"], row["rejected"])) for row in rows}) == 4005
    for row in rows:
        assert int(row["chosen"]) > int(row["rejected"])
        assert row["chosen"] in row["prompt"] and row["rejected"] in row["prompt"]
    demonstrations = quickstart_data.demonstrations(rows, random.Random(1))
    assert all(d["completion"] in (row["chosen"], row["rejected"]) for d, row in zip(demonstrations, rows, strict=True))
    n_right = sum(d["completion"] == row["chosen"] for d, row in zip(demonstrations, rows, strict=True))
    # A fair coin 4005 times: 2002 with standard deviation 32.
    assert abs(n_right - 2002) < 5 * 32


@pytest.mark.slow
def test_end_to_end_twice_over_the_same_folder(sparse_opt, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    folder = tmp_path / "quickstart"
    text = sparse_opt("quickstart", "--output_dir", folder, *TINY)
    assert text.code == 0, text.err
    first = json.loads((folder / "quickstart.json").read_text())
    runs = first["runs"]
    assert first["finished"]
    assert first["rebuilt"] == {"step": 3, "elements_compared": first["n_weights"], "elements_different": 0}
    assert runs["dense"]["loss_first"] == pytest.approx(0.6931472, abs=1e-6)
    assert runs["sparse"]["trained_weights"] == round(0.1 * first["n_weights"])
    assert runs["sparse"]["gradient_bytes"] == 4 * runs["sparse"]["trained_weights"]
    assert runs["dense"]["gradient_bytes"] == 4 * first["n_weights"]
    assert 0 < runs["sparse"]["changed_weights"] <= runs["sparse"]["trained_weights"]
    assert runs["dense"]["changed_weights"] > runs["sparse"]["trained_weights"]
    for file in first["files"].values():
        assert file in text.out
    for label in ("preference accuracy", "step time", "optimizer state", "gradients"):
        assert label in text.out
    MaskSet.load(first["files"]["mask"])
    # Not in the user's home.
    assert list((folder / "cache").rglob("*.arrow"))

    (folder / "mine.txt").write_text("keep")
    again = sparse_opt("quickstart", "--output_dir", folder, *TINY, "--json")
    assert again.code == 0, again.err
    assert "starting again" in again.err
    assert (folder / "mine.txt").read_text() == "keep"
    assert without_times(json.loads(again.out)) == without_times(first)


def without_times(results):
    for run in results["runs"].values():
        for name in ("step_time_s", "optimizer_time_s"):
            assert run.pop(name) > 0
    return results


@pytest.mark.parametrize("content", ["folder/mine.txt", "folder"], ids=["not empty", "a file"])
def test_refuses_a_folder_that_is_not_its_own(sparse_opt, tmp_path, content):
    path = tmp_path / content
    path.parent.mkdir(exist_ok=True)
    path.write_text("keep")
    line = sparse_opt("quickstart", "--output_dir", tmp_path / "folder", *TINY).failed_in_one_line(2)
    assert str(tmp_path / "folder") in line
    assert path.read_text() == "keep"
    assert len(list(tmp_path.rglob("*"))) == content.count("/") + 1


@pytest.mark.parametrize("words", [("--sft_steps", 0), ("--n_questions", 5000), ("--device", "tpu:x"), ("--sed", 1)])
def test_refuses_options_before_it_writes(sparse_opt, tmp_path, words):
    sparse_opt("quickstart", "--output_dir", tmp_path / "new", *words).failed_in_one_line(2)
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_place_that_cannot_be_written(sparse_opt, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # As root every folder can be written: let it be refused as another user would see it.
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    line = sparse_opt("quickstart", "--output_dir", tmp_path / "new", *TINY).failed_in_one_line(2)
    assert f"'output_dir': {tmp_path / 'new'} cannot be created in {tmp_path}: Permission denied" in line
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_folder_that_another_is_writing_to(sparse_opt, tmp_path):
    with RunLock(tmp_path / "new"):
        line = sparse_opt("quickstart", "--output_dir", tmp_path / "new", *TINY).failed_in_one_line(2)
    assert f"'output_dir': another run is writing to {tmp_path / 'new'}" in line


def test_refuses_a_backend_that_cannot_run_before_it_writes(sparse_opt, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "fastest")
    assert "'fastest'" in sparse_opt("quickstart", "--output_dir", tmp_path / "new", *TINY).failed_in_one_line(1)
    assert list(tmp_path.iterdir()) == []


def checkpoint(folder, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_checks_find_what_they_look_for(tmp_path):
    weights = {"w": torch.tensor([[0.0, 1.0], [2.0, float("nan")]]), "v": torch.ones(3)}
    start = checkpoint(tmp_path / "start", weights)
    same = checkpoint(tmp_path / "same", weights)
    negative_zero = {"w": torch.tensor([[-0.0, 1.0], [2.0, float("nan")]]), "v": torch.ones(3)}
    other = checkpoint(tmp_path / "other", negative_zero)
    fewer = checkpoint(tmp_path / "fewer", {"w": weights["w"]})
    assert load_file(other / "model.safetensors")["w"][0, 0].signbit()

    assert quickstart_checks.same_bits(start, same) == 7
    with pytest.raises(SparseOptError, match="w differs in 1 elements"):
        quickstart_checks.same_bits(start, other)
    with pytest.raises(SparseOptError, match="v is in one"):
        quickstart_checks.same_bits(start, fewer)

    assert quickstart_checks.n_changed(start, other) == 1
    quickstart_checks.changed_inside_only(MaskSet({"w": torch.tensor([0])}, {"w": (2, 2)}), start, other)
    for mask in (MaskSet({"w": torch.tensor([1])}, {"w": (2, 2)}), MaskSet({"v": torch.tensor([0])}, {"v": (3,)})):
        with pytest.raises(SparseOptError, match="w: 1 elements outside the mask changed"):
            quickstart_checks.changed_inside_only(mask, start, other)

    quickstart_checks.first_loss_is_ln2({"mode": "sparse", "first": {"loss": 0.6931472}})
    for loss in (0.6932, float("nan")):
        with pytest.raises(SparseOptError, match="sparse DPO: the first step's loss is"):
            quickstart_checks.first_loss_is_ln2({"mode": "sparse", "first": {"loss": loss}})
