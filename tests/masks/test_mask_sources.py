"""Masks of other tools: `.pt` dictionaries, tensors in memory, PEFT's adapters; and the page that says so, run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.errors import MaskError

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
peft = pytest.importorskip("peft", reason="needs peft: pip install 'sparse-opt[bench]'")

PAGE = Path(__file__).parents[2] / "docs" / "from_peft.md"
UP = "model.layers.0.mlp.up_proj.weight"


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, **{**sizes, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).to(dtype)


def adapted_llama(config: Any, seed: int = 0) -> Any:
    """With values that are not 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(llama(seed), config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
    return adapted


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def refusal(call: Callable[[], object], kind: type[Exception] = MaskError) -> str:
    with pytest.raises(kind) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's blocks have made, run from top to bottom in the folder that the page describes."""
    folder = tmp_path_factory.mktemp("from_peft")
    llama().save_pretrained(folder / "model")
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
    assert MaskSet.load(folder / "shira.safetensors", llama()) == mask
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
    before = state(llama())
    after = state(adapted.merge_and_unload())
    for name, value in before.items():
        changed = after[name] != value
        assert torch.equal(changed, mask.bool(name) if name in mask else torch.zeros_like(changed)), name
    assert mask.resolve(llama()) == mask


def test_one_of_several_shira_adapters(page: dict[str, Any]) -> None:
    adapted = adapted_llama(peft.ShiraConfig(r=1, target_modules=["k_proj"], random_seed=0))
    adapted.add_adapter("second", peft.ShiraConfig(r=2, target_modules=["up_proj"], random_seed=0))
    assert page["mask_of_shira"](adapted).nnz == 2 * (16 + 32)
    assert page["mask_of_shira"](adapted, "second").nnz == 2 * 2 * (72 + 32)
    assert refusal(lambda: page["mask_of_shira"](adapted, "third"), ValueError) == (
        "no layer has a SHiRA adapter named 'third'"
    )
    lora = adapted_llama(peft.LoraConfig(r=1, target_modules=["k_proj"]))
    assert "no layer has a SHiRA adapter" in refusal(lambda: page["mask_of_shira"](lora), ValueError)


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
    before, after = state(llama()), state(adapted.merge_and_unload())
    assert set(mask.names) == {name for name, value in before.items() if not torch.equal(after[name], value)}
    for name in mask.names:
        change = (after[name].double() - before[name].double()).abs()
        chosen = mask.bool(name)
        assert int(chosen.sum()) == round(0.1 * chosen.numel())
        # `before + change` was rounded: to half a unit of weights below 1.
        assert change[chosen].min() >= change[~chosen].max() - 2 * 2**-25
    other = adapted_llama(peft.ShiraConfig(r=1, target_modules=["k_proj"]))
    assert "no layer has a LoRA adapter named 'default'" in refusal(
        lambda: page["mask_of_lora"](other, 0.1), ValueError
    )


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def test_lora_on_conv1d(page: dict[str, Any]) -> None:
    model = gpt2()
    config = peft.LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    name = "transformer.h.0.attn.c_attn.weight"
    before = state(model)[name]
    adapted = peft.get_peft_model(model, config)
    mask = page["mask_of_lora"](adapted, density=0.25)
    assert mask.shapes == {name: (8, 24)}
    change = (state(adapted.merge_and_unload())[name] - before).abs()
    assert change.max() > 0.01
    chosen = mask.bool(name)
    assert int(chosen.sum()) == 48
    assert change[chosen].min() >= change[~chosen].max() - 4 * 2**-24  # sums rounded, of weights below 4


# Files and memory


def sources(masks: dict[str, Tensor], folder: Path) -> dict[str, Callable[[], MaskSet]]:
    """The ways in which bool tensors arrive."""
    torch.save(masks, folder / "plain.pt")
    torch.save({"masks": masks}, folder / "masks.pth")
    return {
        "memory": lambda: MaskSet.from_bool(masks),
        "plain": lambda: MaskSet.load(folder / "plain.pt"),
        "under masks": lambda: MaskSet.load(folder / "masks.pth"),
    }


def random_bools(shapes: dict[str, tuple[int, ...]], density: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.rand(shape, generator=generator) < density for name, shape in shapes.items()}


def test_all_sources_agree(tmp_path: Path) -> None:
    masks = random_bools({"w": (5, 7), "b": (7,), "scalar": (), "none": (0, 3)})
    transposed = {**masks, "w": masks["w"].t().contiguous().t()}
    assert not transposed["w"].is_contiguous()
    expected = {name: values.flatten().nonzero().flatten().tolist() for name, values in masks.items()}
    for given in (masks, transposed):
        for source, load in sources(given, tmp_path).items():
            mask = load()
            assert {name: mask[name].tolist() for name in mask.names} == expected, source
            assert mask.shapes == {name: tuple(values.shape) for name, values in masks.items()}


def test_what_is_no_mask_in_memory() -> None:
    values = torch.ones(2, 3, dtype=torch.bool)
    for given, message in [
        ({3: values}, "a mask has the name 3, expected a parameter's name"),
        ({"w": values.to_sparse()}, "mask of w is torch.sparse_coo, expected a dense tensor with values"),
        ({"w": values.to("meta")}, "mask of w is on the meta device, expected a dense tensor with values"),
    ]:
        assert refusal(lambda given=given: MaskSet.from_bool(given)) == message
    text = refusal(lambda: MaskSet.from_bool({"w": values}, metadata={"step": 50}))
    assert text == "mask metadata 'step' is 50, expected a string"
