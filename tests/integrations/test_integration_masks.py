"""Masks in other people's trainers: drawn by the trainer, of tiles, and with clipping that finds no gradients."""

import warnings

import pytest
import torch

from sparse_opt import MaskSet, RandomMask, SparseAdamW
from sparse_opt.errors import MaskError
from sparse_opt.integrations import SparseArguments


@pytest.mark.parametrize("model_init", [False, True], ids=["model", "model_init"])
def test_a_trainer_draws_the_mask(lab, model_init):
    given = {"model": None, "model_init": lambda: lab.model()} if model_init else {}
    trainer = lab("Trainer", mask=RandomMask(0.2, "run16", seed=5), max_steps=1, given=given)
    trainer.train()
    expected = MaskSet.random(lab.model(), density=0.2, pattern="run16", seed=5)
    assert trainer.sparse_mask == trainer.sparse_optimizer.mask == expected
    assert trainer.sparse_optimizer.mask.pattern == "run16"


def test_a_number_is_the_density_of_single_elements(lab):
    assert lab("SFT", mask=0.1).sparse_mask == MaskSet.random(lab.model(), density=0.1)
    with pytest.raises(MaskError, match="less than one unit of tile64 in each tensor; use pool='global'"):
        lab("Trainer", mask=RandomMask(0.001, "tile64"))
    with pytest.raises(TypeError, match="mask is a bool, expected a MaskSet, a RandomMask, a density, a path"):
        lab("Trainer", mask=True)


def test_a_trainer_whose_clipping_finds_no_gradients_warns_once(lab):
    model = lab.model()
    optimizer = SparseAdamW(model, lab.random_mask(0.1), lr=1e-3)
    trainer = lab("Trainer", model=model, max_steps=3, given={"optimizers": (optimizer, None)})
    message = r"Trainer\._run_epoch, which calls SparseAdamW.step\(\), .*max_grad_norm=.*sparse_trainer"
    with pytest.warns(UserWarning, match=message) as caught:
        trainer.train()
    assert sum("clip_grad_norm_" in str(warning.message) for warning in caught) == 1
    assert all(row["grad_norm"] == 0 for row in trainer.state.log_history if "grad_norm" in row)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_sparse_trainer_clips_and_does_not_warn(lab, max_grad_norm):
    trainer = lab("Trainer", mask=0.1, max_steps=2, max_grad_norm=max_grad_norm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert not [warning for warning in caught if "clip_grad_norm_" in str(warning.message)]
    assert all(row["grad_norm"] > 0 for row in trainer.state.log_history if "grad_norm" in row)


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
