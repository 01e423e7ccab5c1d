"""Tile masks in other people's trainers: their layers make the active tiles of the gradients, and runs are the same."""

from __future__ import annotations

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.integrations import SparseArguments

EPS = 2**-23
STEPS = 3


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_a_tile_mask_takes_the_tiles_in_their_trainers(lab, curve, kind):
    mask = MaskSet.random(lab.model(), density=0.5, pattern="tile64", seed=7)
    trainers = []
    for tile_backward in (True, False):
        torch.manual_seed(0)  # GRPO draws its completions
        trainer = lab(kind, mask=mask, sparse=SparseArguments(tile_backward=tile_backward), max_steps=STEPS)
        trainer.train()
        trainers.append(trainer)
    ours, theirs = trainers
    names = ours.sparse_optimizer.tiled_parameters
    assert any("proj" in name for name in names) and theirs.sparse_optimizer.tiled_parameters == ()
    assert {"model.embed_tokens.weight", "lm_head.weight"} & set(names)  # of the output layer, tied or not
    layers = {n: m for n, m in ours.model.named_modules() if n.endswith(("_proj", "lm_head"))}
    assert not any("forward" in vars(layer) for layer in layers.values())  # given back
    assert len(curve(ours)) == STEPS and any(row["grad_norm"] > 0.01 for row in curve(ours))
    for a, b in zip(curve(ours), curve(theirs), strict=True):
        # Sums of some hundred products in another order, and weights that Adam has moved by the learning rate, 3e-3,
        # also where a gradient is little more than its own rounding error: there neither the norm nor a loss feels it.
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1000 * EPS)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
