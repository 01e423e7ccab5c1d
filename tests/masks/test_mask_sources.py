"""Masks of PEFT's adapters and of wrapped models: docs/from_peft.md, run."""

from __future__ import annotations

import re
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
# Two matrices of different shapes.
LINEAR = ("model.layers.1.self_attn.k_proj.weight", UP)


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
    again = peft.PeftModel.from_pretrained(llama(), folder / "shira_again")
    assert page["mask_of_shira"](again) == mask
    merged = state(again.merge_and_unload())
    for name, expected in page["model"].named_parameters():
        # W0 + (W - W0) in fp32: the difference, and then the sum, rounded.
        torch.testing.assert_close(merged[name], expected.detach(), rtol=2**-23, atol=2**-24 * 0.5)
    names = [name for name, _ in page["model"].named_parameters()]
    assert set(page["opt"].mask.names) == set(names)


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


def trained_under(mask: MaskSet, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of `llama(0)` with other values, unlike in size, at the mask's positions."""
    model = llama(0, dtype)
    generator = torch.Generator().manual_seed(4)
    trained = state(model)
    for name in mask.names:
        at = mask[name].long()
        factors = torch.randn(at.numel(), generator=generator) * 2.0 ** torch.randint(
            -6, 7, at.shape, generator=generator
        )
        flat = trained[name].view(-1)
        flat[at] = (flat[at].float() * factors).to(dtype)
    return trained


@pytest.mark.filterwarnings("ignore:Argument self.mask_type")
@pytest.mark.parametrize("density", [0.03, 0.1], ids=str)
def test_a_mask_of_uneven_counts_as_a_shira_adapter(page: dict[str, Any], tmp_path: Path, density: float) -> None:
    """In bf16, where merging has to give the very bits."""
    model = llama(0, torch.bfloat16)
    mask = MaskSet.random({name: model.get_parameter(name) for name in LINEAR}, density=density)
    trained = trained_under(mask, torch.bfloat16)
    page["shira_of_mask"](model, trained, mask).save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(llama(0, torch.bfloat16), tmp_path / "adapter")
    positions = page["mask_of_shira"](loaded)
    rank = max(-(-mask[name].numel() // sum(mask.shapes[name])) for name in LINEAR)
    for name in LINEAR:
        assert torch.isin(mask[name], positions[name]).all()
        assert positions[name].numel() == rank * sum(mask.shapes[name])
    merged = state(loaded.merge_and_unload())
    assert merged.keys() == trained.keys()
    for name, expected in trained.items():
        assert torch.equal(merged[name].view(torch.int16), expected.view(torch.int16)), name
    assert not torch.equal(merged[UP], llama(0, torch.bfloat16).get_parameter(UP))


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


# Wrappers


def data_parallel(model: nn.Module) -> nn.Module:
    """Names as DistributedDataParallel has them, without a process group."""
    return nn.ModuleDict({"module": model})


@pytest.mark.parametrize(
    "wrapped",
    [data_parallel, lambda model: data_parallel(torch.compile(model))],
    ids=["module.", "module._orig_mod."],
)
def test_wrapped_models_have_names_of_their_own(page: dict[str, Any], wrapped: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    outside = dict(wrapped(model).named_parameters())
    assert not outside.keys() & dict(model.named_parameters()).keys()
    mask = MaskSet.random({name: tuple(parameter.shape) for name, parameter in outside.items()}, density=0.3)
    with pytest.raises(MaskError, match=f"{next(iter(outside))} is not a parameter of the model"):
        mask.resolve(model)
    plain = page["without_wrappers"](mask)
    assert (plain.pattern, plain.metadata) == (mask.pattern, mask.metadata)
    opt = SparseAdamW(model.named_parameters(), plain, lr=0.1)
    assert [opt.mask[name].tolist() for name in plain.names] == [mask[name].tolist() for name in mask.names]


def test_wrappers_inside_a_name(page: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), torch.compile(nn.Linear(6, 3)))
    mask = MaskSet.random(model, density=0.5)
    assert "1._orig_mod.weight" in mask
    assert page["without_wrappers"](mask).names == ("0.weight", "0.bias", "1.weight", "1.bias")
