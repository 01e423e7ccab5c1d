"""The code in docs/integrations.md, and that of TRL in README.md, runs as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparse_opt import DeltaLog

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
