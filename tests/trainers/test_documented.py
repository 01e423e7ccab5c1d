"""docs/adding_a_loop.md: its loss and step run as they are, and its step learns."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from small_models import small
from transformers import LlamaConfig

from sparse_opt import MaskSet
from sparse_opt.trainers.batches import TokenSequence, collate_examples
from sparse_opt.trainers.models import make_masks_skippable
from sparse_opt.trainers.modes import sparse_training

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_loop.md"


def test_adding_a_loop():
    names: dict = {"__name__": "docs_adding_a_loop"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S):
        exec(compile(block, PAGE.name, "exec"), names)
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    model = small(LlamaConfig)
    make_masks_skippable(model)
    trained = sparse_training(model, MaskSet.random(model, density=0.2, seed=0), 1e-3)
    pairs = [[TokenSequence([i, 7, own], 2) for own in (20 + i, 40 + i)] for i in range(3, 9)]
    batch, mismatched = collate_examples(pairs, 0), collate_examples(names["mismatch"](pairs), 0)
    assert mismatched.input_ids[:, 2].tolist() == [24, 25, 26, 27, 28, 23]
    losses = [names["kto_step"](trained, batch, mismatched, beta=0.5)["loss"].item() for _ in range(20)]
    assert losses[0] == 0.5 and losses[-1] < 0.4
    assert torch.is_grad_enabled()
