"""Nothing is imported, changed or active that was not asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import accelerate
import pytest
import torch
import transformers
import trl

from sparse_opt.integrations import factory, versions

THEIRS = (transformers.Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, accelerate.Accelerator)
LOADED = ("transformers", "trl", "accelerate", "peft", "datasets", "packaging")


def test_importing_loads_none_of_their_packages(tmp_path):
    look = (
        "import sys, sparse_opt, sparse_opt.integrations\n"
        "sparse_opt.integrations.SparseArguments()\n"
        f"print([m for m in {LOADED!r} if m in sys.modules])\n"
    )
    imported = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert imported.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["transformers", "trl"])
def test_a_missing_or_old_package_is_one_line(package, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    first = versions.FIRST[package]
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(
        ImportError, match=rf"wants {package} >= {first}, which is not installed: pip install"
    ) as caught:
        versions.require(package)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.0")
    with pytest.raises(
        ImportError, match=rf"wants {package} >= {first}, found 1.0.0: pip install '{package}>={first}'"
    ):
        versions.require(package)


def test_a_trainer_of_an_old_version_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.0")
    with pytest.raises(ImportError, match="wants transformers"):
        factory.sparse_trainer.__wrapped__(transformers.Trainer)


@pytest.mark.parametrize("kind", ["Trainer", "DPO"])
def test_their_trainers_are_as_they_were(lab, curve, kind):
    def snapshot():
        modules = [sys.modules[c.__module__] for c in THEIRS] + [trl.trainer.utils, torch.optim, torch.nn.utils]
        return [dict(vars(thing)) for thing in (*THEIRS, *modules)]

    before_run = lab(kind, max_steps=4)
    before_run.train()
    before = snapshot()
    lab(kind, mask=lab.random_mask(0.1), max_steps=4).train()
    assert snapshot() == before
    after_run = lab(kind, max_steps=4)
    after_run.train()
    assert [row["loss"] for row in curve(after_run)] == [row["loss"] for row in curve(before_run)]
    assert type(after_run.optimizer.optimizer) is torch.optim.AdamW
