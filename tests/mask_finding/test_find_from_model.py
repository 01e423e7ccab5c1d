"""Scores of initial models against the formulas, worked out sequence by sequence with plain autograd."""

import math

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import __version__
from sparse_opt.errors import MaskError
from sparse_opt.mask_finding import find_from_model, find_mask
from sparse_opt.mask_finding.model_scores import calibrated_scores, weight_scores
from sparse_opt.tensors import canonical_names
from sparse_opt.trainers.batches import TokenSequence

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")


SEQUENCES = [
    TokenSequence([5, 9, 3, 40, 2], 2),
    TokenSequence([7, 7, 30], 0),
    TokenSequence([1, 2, 3, 4, 5, 6, 7, 8], 6),
]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def gradients(model: nn.Module) -> list[dict[str, Tensor]]:
    """Of each sequence's mean loss over its completion, as fp64 copies."""
    found = []
    for sequence in SEQUENCES:
        model.zero_grad()
        ids = torch.tensor([sequence.ids])
        start = max(sequence.prompt_length, 1)
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
        losses = [-logprobs[t - 1, sequence.ids[t]] for t in range(start, len(sequence.ids))]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        found.append({n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def scores_of(model: nn.Module, method: str, parameters: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    chosen = parameters_of(model) if parameters is None else parameters
    source = calibrated_scores(model, chosen, SEQUENCES, method)  # type: ignore[arg-type]
    return {name: source.bits(name).view(torch.float32).view(shape) for name, shape in source.shapes.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradient_scores(tiny_llama, tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied).eval()
    each = gradients(model)
    for name, found in scores_of(model, "fisher_gradient").items():
        expected = sum(g[name] ** 2 for g in each) / len(each)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-12)
    for name, found in scores_of(model, "snip").items():
        mean = sum(g[name] for g in each) / len(each)
        expected = (model.get_parameter(name).double() * mean).abs()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-9)


def test_the_model_is_left_as_it_was(tiny_llama) -> None:
    model = tiny_llama().train()
    names = list(parameters_of(model))
    model.get_parameter(names[1]).requires_grad_(False)
    kept = model.get_parameter(names[2])
    kept.grad = torch.ones_like(kept)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for method in ("snip", "fisher_gradient", "wanda"):
        scores_of(model, method, {names[4]: model.get_parameter(names[4])})
    assert model.training
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [names[1]]
    assert [n for n, p in model.named_parameters() if p.grad is not None] == [names[2]]
    assert torch.equal(kept.grad, torch.ones_like(kept))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def wanda_by_hand(model: nn.Module, layers: dict[str, nn.Module], out_first: bool) -> dict[str, Tensor]:
    """abs(w) * norm(x): each weight multiplied by its own input's norm, in fp64."""
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_hook(lambda m, args, out, name=name: inputs[name].append(args[0][0].double()))
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        for sequence in SEQUENCES:
            model(input_ids=torch.tensor([sequence.ids]))
    for hook in hooks:
        hook.remove()
    norms = {name: torch.cat(parts).norm(dim=0) for name, parts in inputs.items()}
    return {
        name: layer.weight.detach().double().abs() * (norms[name] if out_first else norms[name][:, None])  # type: ignore[operator,union-attr]
        for name, layer in layers.items()
    }


@pytest.mark.parametrize("kind", ["untied", "tied", "gpt2"])
def test_wanda_of_linear_layers(tiny_llama, kind: str) -> None:
    """Weights of GPT-2 are transposed. A tied output layer is an embedding too, which receives no input."""
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=16, n_layer=1, n_head=2)
        model = transformers.GPT2LMHeadModel(config).eval()
        layers = {n: m for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    else:
        model = tiny_llama(tie_word_embeddings=kind == "tied").eval()
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        if kind == "tied":
            del layers["lm_head"]
    found = scores_of(model, "wanda")
    assert set(found) == {f"{name}.weight" for name in layers}
    for name, expected in wanda_by_hand(model, layers, out_first=kind != "gpt2").items():
        torch.testing.assert_close(found[f"{name}.weight"].double(), expected, rtol=1e-5, atol=0)


def test_weight_magnitude_is_the_full_sort_of_absolute_weights(tiny_llama) -> None:
    model = tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=True)
    parameters = parameters_of(model)
    assert canonical_names(parameters) == {name: name for name in parameters}
    mask = find_mask(weight_scores(parameters), sparsity=90, min_tensor_keep=0).mask
    flat = torch.cat([p.detach().float().abs().view(-1) for p in parameters.values()])
    order = flat.sort(descending=True, stable=True).indices[: mask.nnz]
    expected = torch.zeros(len(flat), dtype=torch.bool)
    expected[order] = True
    assert torch.equal(torch.cat([mask.bool(name).view(-1) for name in mask.names]), expected)


def test_refusals(tiny_llama) -> None:
    model = tiny_llama()
    parameters = parameters_of(model)
    with pytest.raises(MaskError, match="method is 'fisher', expected one of snip, fisher_gradient, wanda"):
        calibrated_scores(model, parameters, SEQUENCES, "fisher")
    with pytest.raises(MaskError, match="found no calibration sequence, expected at least one for snip"):
        calibrated_scores(model, parameters, [], "snip")
    with pytest.raises(MaskError, match="calibration sequence 1 has 3 tokens and a prompt of 3, expected a completion"):
        calibrated_scores(model, parameters, [SEQUENCES[0], TokenSequence([1, 2, 3], 3)], "snip")
    norms = {name: p for name, p in parameters.items() if "norm" in name}
    with pytest.raises(MaskError, match="none of the 5 chosen tensors is the weight of a linear layer"):
        calibrated_scores(model, norms, SEQUENCES, "wanda")
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(math.nan)
    with pytest.raises(MaskError, match="the snip score of .* is NaN at"):
        find_mask(calibrated_scores(model, parameters, SEQUENCES, "snip"), sparsity=50)


@pytest.mark.parametrize("method", ["weight_magnitude", "snip", "fisher_gradient", "wanda"])
def test_find_from_model_selects_by_the_scores_of_the_method(tiny_llama, method: str) -> None:
    model = tiny_llama(tie_word_embeddings=True).eval()
    options = {"sparsity": 90.0, "pool": "tensor", "pattern": "run16"}
    found = find_from_model(
        model, method=method, sequences=SEQUENCES, exclude=["*norm*"], metadata={"dtype": "fp32"}, **options
    )
    chosen = {name: p for name, p in parameters_of(model).items() if "norm" not in name}
    if method == "weight_magnitude":
        scores = weight_scores(chosen)
    else:
        scores = calibrated_scores(model, chosen, SEQUENCES, method)  # type: ignore[arg-type]
    assert found.mask == find_mask(scores, **options).mask
    assert found.mask.pattern == "run16"
    assert found.mask.metadata == {
        "method": method,
        "sparsity": "90.0",
        "exclude": '["*norm*"]',
        "dtype": "fp32",
        "pool": "tensor",
        "min_tensor_keep": "0.0025",
        "made_by": f"sparse-opt {__version__}",
        # wanda leaves out the embedding, and so the output layer.
        **({} if method == "wanda" else {"tied": '{"lm_head.weight": "model.embed_tokens.weight"}'}),
    }
