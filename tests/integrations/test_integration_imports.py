"""Nothing is imported, changed or active without a request; and the code in docs/integrations.md and README.md runs."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers
from trl import SFTTrainer

from sparse_opt import DeltaLog
from sparse_opt.integrations import factory

LOADED = ("transformers", "trl", "accelerate", "peft", "datasets", "packaging", "vllm")


def test_importing_loads_none_of_their_packages(tmp_path):
    look = (
        "import sys, sparse_opt.integrations, sparse_opt.integrations.vllm.plugin\n"
        "sparse_opt.integrations.SparseArguments()\n"
        f"print([m for m in {LOADED!r} if m in sys.modules])\n"
    )
    imported = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert imported.stdout.strip() == "[]"


@pytest.mark.parametrize(("package", "trainer"), [("transformers", transformers.Trainer), ("trl", SFTTrainer)])
def test_a_missing_or_old_package_is_one_line(package, trainer, monkeypatch):
    minimum, version = factory.MINIMUM_VERSIONS[package], metadata.version

    def missing(name):
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    needed = f"needs {package} >= {minimum}"
    with pytest.raises(ImportError, match=f"{needed}, which is not installed: pip install") as caught:
        factory.sparse_trainer.__wrapped__(trainer)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.0" if name == package else version(name))
    with pytest.raises(ImportError, match=f"{needed}, found 1.0.0: pip install '{package}>={minimum}'"):
        factory.sparse_trainer.__wrapped__(trainer)


# In a process of its own, that looks at their modules before ours is imported.
UNCHANGED = """
import sys
import accelerate, torch, transformers, trl
import trl.trainer.utils

classes = transformers.Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, accelerate.Accelerator
modules = [sys.modules[c.__module__] for c in classes] + [trl.trainer.utils, torch.optim, torch.nn.utils]
before = [dict(vars(thing)) for thing in (*classes, *modules)]

import sparse_opt
from sparse_opt.integrations import sparse_trainer

ours = [sparse_trainer(c) for c in classes[:4]]
import sparse_opt.integrations.callback, sparse_opt.integrations.references, sparse_opt.integrations.trainer

after = [dict(vars(thing)) for thing in (*classes, *modules)]
for a, b in zip(before, after):
    # What Python adds to a class that has subclasses, and names of submodules that someone imported.
    changed = [name for name in a if name not in b or a[name] is not b[name]]
    changed += [name for name in b if name not in a and not hasattr(b[name], "__path__")]
    assert not changed, changed
print("unchanged", len(ours))
"""


@pytest.mark.slow
def test_their_classes_and_modules_are_unchanged(tmp_path):
    looked = subprocess.run([sys.executable, "-c", UNCHANGED], cwd=tmp_path, capture_output=True, text=True)
    assert looked.stdout.strip() == "unchanged 4", looked.stderr


@pytest.mark.parametrize("kind", ["Trainer", "DPO"])
def test_the_original_trainers_train_as_before(lab, curve, kind):
    before = lab(kind, max_steps=4)
    before.train()
    lab(kind, mask=lab.random_mask(0.1), max_steps=4).train()
    after = lab(kind, max_steps=4)
    after.train()
    assert [row["loss"] for row in curve(after)] == [row["loss"] for row in curve(before)]
    assert type(after.optimizer.optimizer) is torch.optim.AdamW


def test_a_model_that_was_trained_is_a_model_like_any_other(lab, weights):
    model, untouched = lab.model(), lab.model()
    ours = lab("SFT", mask=lab.random_mask(0.1, without=("embed_tokens",)), model=model, max_steps=2)
    ours.train()
    assert all(p.requires_grad and not p._post_accumulate_grad_hooks for p in model.parameters())
    untouched.load_state_dict(model.state_dict())
    ends = []
    for m in (model, untouched):  # `ours` is alive
        lab("SFT", model=m, max_steps=4).train()
        ends.append(weights(m))
    assert all(torch.equal(p, ends[1][n]) for n, p in ends[0].items())
    assert not torch.equal(ends[0]["model.embed_tokens.weight"], weights(lab.model())["model.embed_tokens.weight"])
    lab("SFT", mask=lab.random_mask(0.1), model=model, max_steps=1).train()


PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
BLOCKS = {
    heading: code
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for heading, code in [
        (section.partition("\n")[0], "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)))
    ]
    if code
}


def test_every_trainer_has_its_block():
    assert list(BLOCKS) == ["Trainer", "SFT, DPO, GRPO", "Delta log"]


@pytest.mark.parametrize("kind", ["Trainer", "DPO"])
def test_its_integration_runs(lab, monkeypatch, tmp_path, kind):
    lab(kind)
    lab.random_mask(0.1).save(tmp_path / "mask.safetensors")
    monkeypatch.chdir(tmp_path)
    names = {"tokenizer": lab.tokenizer, "model": lab.model()}
    names |= {"args": lab.args(kind, max_steps=10), "rows": lab.rows(kind)}
    exec(BLOCKS["Trainer" if kind == "Trainer" else "SFT, DPO, GRPO"], names)
    assert names["trainer"].state.global_step == 10
    assert names["trainer"].sparse_optimizer.mask.nnz < 0.11 * lab.model().num_parameters()
    if kind == "DPO":
        exec(BLOCKS["Delta log"], names)
        assert names["state"].keys() == dict(lab.model().state_dict()).keys()
        assert DeltaLog.open("delta_logs").steps == (0, 10)


def test_the_readmes_trainer_runs(lab, monkeypatch, tmp_path):
    (code, *_) = re.findall(
        r"```python\n(.*?)```", (PAGE.parents[1] / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in lab.rows("DPO")))
    args = {"max_steps": 2, "use_cpu": lab.device.type == "cpu", "bf16": False, "report_to": [], "max_length": 64}
    code = code.replace('"MODEL"', repr(str(lab.folder))).replace("0.025", "0.5").replace('"out", ', '"out", **args, ')
    names = {"args": args}
    exec(code, names)
    assert names["trainer"].state.global_step == 2
    assert names["trainer"].sparse_optimizer.mask.pattern == "tile64"
