"""Masks of other tools: `.pt` dictionaries, tensors in memory, PEFT's adapters; and the page that says so, run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
from tiny_llama import make_llama

peft = pytest.importorskip("peft", reason="needs peft: pip install 'sparse-opt[bench]'")

PAGE = Path(__file__).parents[2] / "docs" / "from_peft.md"


def adapted_llama(config: Any, seed: int = 0) -> Any:
    """With values that are not 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(make_llama(seed), config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
    return adapted


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's blocks have made, run from top to bottom in the folder that the page describes."""
    folder = tmp_path_factory.mktemp("from_peft")
    make_llama().save_pretrained(folder / "model")
    adapted_llama(peft.ShiraConfig(r=2, target_modules="all-linear", random_seed=3)).save_pretrained(
        folder / "shira_adapter"
    )
    adapted_llama(peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder / "lora_adapter")
    text = PAGE.read_text(encoding="utf-8")
    found: dict[str, Any] = {"folder": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start(1))
            exec(compile("\n" * line + match[1], str(PAGE), "exec"), found)
    return found


# The page


def test_the_page_makes_what_it_says(page: dict[str, Any]) -> None:
    folder, mask = page["folder"], page["mask"]
    assert MaskSet.load(folder / "shira.safetensors", make_llama()) == mask
    # Each layer: q, o 32 x 32; k, v 16 x 32; gate, up, down 72 x 32; the output layer is left alone.
    assert mask.nnz == 2 * 2 * (2 * (32 + 32) + 2 * (16 + 32) + 3 * (72 + 32))
    assert page["opt"].mask == mask


# SHiRA


def test_a_shira_adapters_positions_and_names(page: dict[str, Any]) -> None:
    adapted = adapted_llama(peft.ShiraConfig(r=1, target_modules=["k_proj", "up_proj"], random_seed=0))
    mask = page["mask_of_shira"](adapted)
    assert mask.names == (
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    )
    before = state(make_llama())
    after = state(adapted.merge_and_unload())
    for name, value in before.items():
        changed = after[name] != value
        assert torch.equal(changed, mask.bool(name) if name in mask else torch.zeros_like(changed)), name
    assert mask.resolve(make_llama()) == mask


def test_sparse_adamw_trains_as_shira_does(page: dict[str, Any]) -> None:
    adapted = adapted_llama(peft.ShiraConfig(r=3, target_modules="all-linear", random_seed=1))
    twin = adapted_llama(peft.ShiraConfig(r=3, target_modules="all-linear", random_seed=1))
    mask = page["mask_of_shira"](twin)
    model = twin.merge_and_unload().requires_grad_(True)
    started = state(model)
    hyper: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}
    values = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    theirs = torch.optim.AdamW(values, **hyper)
    ours = SparseAdamW(model.named_parameters(), mask, max_grad_norm=1.0, **hyper)
    generator = torch.Generator().manual_seed(0)
    n_steps = 25
    for _ in range(n_steps):
        ids = torch.randint(0, 97, (2, 12), generator=generator)
        adapted(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        theirs.step()
        theirs.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        ours.step()
        ours.zero_grad()
    expected = state(adapted.merge_and_unload())
    # Each step rounds weights below 1 by 2^-25 at most. Gradients, clipped to norm 1 and below 2^-4 each, are sums
    # rounded by some 2^-28; an update lr * m / (v^.5 + eps) takes at most lr / eps of what they are off.
    atol = n_steps * (2**-25 + hyper["lr"] / hyper["eps"] * 2**-28)
    moved = 0.0
    for name, weight in state(model).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=atol)
        moved = max(moved, float((weight - started[name]).abs().max()))
    assert moved > 1000 * atol


# LoRA


def test_the_elements_that_lora_changed_most(page: dict[str, Any]) -> None:
    adapted = adapted_llama(peft.LoraConfig(r=2, lora_alpha=8, target_modules=["k_proj", "up_proj"]))
    mask = page["mask_of_lora"](adapted, density=0.1)
    before, after = state(make_llama()), state(adapted.merge_and_unload())
    assert set(mask.names) == {name for name, value in before.items() if not torch.equal(after[name], value)}
    for name in mask.names:
        change = (after[name].double() - before[name].double()).abs()
        chosen = mask.bool(name)
        assert int(chosen.sum()) == round(0.1 * chosen.numel())
        # `before + change` was rounded: to half a unit of weights below 1.
        assert change[chosen].min() >= change[~chosen].max() - 2 * 2**-25
    other = adapted_llama(peft.ShiraConfig(r=1, target_modules=["k_proj"]))
    with pytest.raises(ValueError, match="no layer has a LoRA adapter named 'default'"):
        page["mask_of_lora"](other, 0.1)
