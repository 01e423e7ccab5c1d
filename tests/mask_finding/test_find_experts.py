"""The experts that calibration data use, against the routers' own outputs."""

import pytest
import torch
from moe_models import FAMILIES, moe_model, tokens_of
from torch import nn

from sparse_opt import MaskSet
from sparse_opt.errors import MaskError
from sparse_opt.mask_finding import find_experts, find_from_model
from sparse_opt.mask_finding.experts import choose_experts, routing_shares
from sparse_opt.trainers.batches import TokenSequence

SEQUENCES = [TokenSequence(tokens_of(step, 10 + 7 * step)[0].tolist(), 1) for step in range(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_are_those_of_the_routers_outputs(family: str) -> None:
    model = moe_model(family).train()
    found = routing_shares(model, SEQUENCES)
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())
    model.eval()
    routed: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, module in model.named_modules():
        if "Router" in type(module).__name__:
            of = routed.setdefault(int(name.split(".")[2]), [])
            module.register_forward_hook(lambda m, args, out, of=of: of.append(out[1:]))
    with torch.no_grad():
        for sequence in SEQUENCES:
            model(input_ids=torch.tensor([sequence.ids]))
    assert set(found.tokens) == set(routed) == ({1} if family == "deepseek" else {0, 1})
    for layer, outputs in routed.items():
        weights, indices = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        for shares, of_choice in ((found.tokens, torch.ones_like(weights)), (found.weights, weights)):
            sums = torch.stack([of_choice[indices == e].double().sum() for e in range(len(shares[layer]))])
            # The order of fp64 additions differs.
            torch.testing.assert_close(shares[layer], sums / sums.sum(), rtol=1e-12, atol=1e-15)


def test_as_few_experts_as_have_top_p() -> None:
    shares = {0: torch.tensor([0.1, 0.4, 0.1, 0.4]).double(), 3: torch.tensor([0.05, 0.9, 0.05, 0.0]).double()}
    assert choose_experts(shares, top_p=0.2) == {0: [1], 3: [1]}
    assert choose_experts(shares, top_p=0.5) == {0: [1, 3], 3: [1]}
    assert choose_experts(shares, top_p=0.92) == {0: [0, 1, 2, 3], 3: [0, 1]}
    assert choose_experts(shares, n_experts=2) == {0: [1, 3], 3: [0, 1]}
    for wrong, message in [
        ({}, "expected one of the two"),
        ({"top_p": 0.2, "n_experts": 1}, "expected one of the two"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"n_experts": 5}, "n_experts is 5, expected 1 to 4, the experts of layer 0"),
    ]:
        with pytest.raises(MaskError, match=message):
            choose_experts(shares, **wrong)


@pytest.mark.parametrize("score", ["tokens", "weights"])
def test_the_mask_is_that_of_the_chosen_experts(score: str) -> None:
    model = moe_model("qwen3")
    found = find_experts(model, SEQUENCES, score=score, top_p=0.5, exclude=["*.layers.0.*"], routers=True)  # type: ignore[arg-type]
    assert found.experts == choose_experts({1: getattr(found.shares, score)[1]}, top_p=0.5)
    assert found.mask.metadata["expert_score"] == score and found.mask.metadata["top_p"] == "0.5"
    expected = MaskSet.experts(model, found.experts, routers=True)
    assert {name: found.mask[name].tolist() for name in found.mask.names} == {
        name: expected[name].tolist() for name in expected.names if ".layers.1." in name
    }


def test_models_without_fused_experts_are_refused(tiny_llama) -> None:
    with pytest.raises(MaskError, match="no parameter of experts"):
        find_experts(tiny_llama(), SEQUENCES)
    with pytest.raises(MaskError, match="no calibration sequence"):
        find_experts(moe_model("qwen3"), [])

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Module()])
            self.layers[0].experts = Experts()

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            made: torch.Tensor = self.layers[0].experts(input_ids)
            return made

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.ones(2, 3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(MaskError, match=r"layers.0.experts is not called with hidden states, expert indices"):
        find_experts(Other(), SEQUENCES)


def test_routers_are_candidates_only_if_asked_for() -> None:
    model = moe_model("gpt_oss")
    names = [find_from_model(model, method="weight_magnitude", sparsity=50.0, routers=r).mask.names for r in (0, 1)]  # type: ignore[arg-type]
    assert {name for name in names[1] if name not in names[0]} == {
        f"model.layers.{layer}.mlp.router.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }
