"""find_from_log, method magnitude: what it keeps, refuses and records. The selection: test_find_selection.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.errors import DeltaLogError, MaskError
from sparse_opt.mask_finding.find import find_from_log, mask_file_name
from sparse_opt.masks.parameters import select_names

State = dict[str, Tensor]


def log_of(directory: Path, before: State, after: State, **metadata: str) -> DeltaLog:
    log = DeltaLog.create(directory, before, metadata=metadata)
    log.append(50, after)
    log.close()
    return log


def find_magnitude(log: DeltaLog, **options: Any) -> MaskSet:
    return find_from_log(log, **options).mask


def test_unchanged_elements_are_never_kept(tmp_path: Path) -> None:
    before = {"a": torch.zeros(100), "still": torch.zeros(100)}
    after = {"a": torch.zeros(100), "still": torch.zeros(100)}
    after["a"][[3, 97]] = torch.tensor([1.0, -2.0])
    # The bits of a zero changed, its value did not.
    after["still"][5] = -0.0
    log = log_of(tmp_path / "log", before, after)
    for pool in ("global", "tensor"):
        with pytest.warns(
            UserWarning, match=r"only 2 elements have a magnitude score above zero, 20 were requested: .* keeps 2"
        ):
            mask = find_magnitude(log, sparsity=90, min_tensor_keep=0.04, pool=pool)
        assert mask["a"].tolist() == [3, 97]
        assert mask["still"].tolist() == []
        assert mask.metadata["sparsity"] == "90.0"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_magnitude(log, sparsity=99.5, min_tensor_keep=0).nnz == 1


def test_a_step_without_changes_an_unknown_step_and_no_tensor_are_refused(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", {"w": torch.zeros(300)}, {"w": torch.ones(300)})
    with pytest.raises(MaskError, match="no element of step 0 has changed since step 0: it is the first logged step"):
        find_magnitude(log, sparsity=90, target_step=0)
    with pytest.raises(MaskError, match="no tensor of .* is chosen"):
        find_magnitude(log, sparsity=90, include=["v*"])
    with pytest.raises(DeltaLogError, match="step 7 is not logged"):
        find_magnitude(log, sparsity=90, target_step=7)


def test_target_step_and_metadata(tmp_path: Path) -> None:
    state = {"w": torch.zeros(10)}
    with DeltaLog.create(tmp_path / "log", state, metadata={"model": "org/name"}, keyframe_every=2) as log:
        for step in (10, 20, 30):
            state["w"][step // 10] = step
            log.append(step)
    early = find_magnitude(log, sparsity=80, target_step=20, min_tensor_keep=0)
    assert early["w"].tolist() == [1, 2]
    expected = {"method": "magnitude", "step": "20", "base_step": "0", "model": "org/name", "pool": "global"}
    assert early.metadata.items() >= expected.items()
    last = find_magnitude(log, sparsity=80)
    assert last["w"].tolist() == [2, 3]
    assert last.metadata["step"] == "30"
    assert MaskSet.load(last.save(tmp_path / mask_file_name(80, "magnitude", 30))).metadata == last.metadata


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mlp = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_parameters_take_part_and_buffers_do_not(tmp_path: Path) -> None:
    model = Block()
    with DeltaLog.create(tmp_path / "log", model) as log:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor += 3
            log.append(1)
    mask = find_magnitude(log, sparsity=50)
    assert mask.names == ("embed.weight", "mlp.weight", "mlp.bias", "norm.weight", "norm.bias")
    assert mask.resolve(model) == mask
    assert find_magnitude(log, sparsity=50, mlp_only=True).names == ("mlp.weight", "mlp.bias")


def test_select_names() -> None:
    names = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "h.0.attn.weight",
        "mlpx.weight",
    ]
    names += ["decoder.fc1.bias", "x.block_sparse_moe.w1", "MLP.weight"]
    assert select_names(names) == names
    assert select_names(names, include=["model.*"], exclude=["*norm*"]) == names[:1]
    assert select_names(names, mlp_only=True) == [names[0], names[4], names[5]]
    assert select_names(names, include=["*.weight", "*.w1"], mlp_only=True) == [names[0], names[5]]
    assert select_names(names, include=[]) == []
