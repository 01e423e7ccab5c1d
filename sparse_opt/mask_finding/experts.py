"""Finds the mask of the experts that calibration sequences use most, as in expert-specialized fine-tuning (ESFT).

With K experts chosen for a token, and g the weights by which their outputs are multiplied:

| score | of expert e in a layer |
|---|---|
| tokens | tokens that are routed to e / (tokens * K): ESFT-Token |
| weights | sum of g of e over all tokens / sum of all g: ESFT-Gate |

Both are shares, which add up to 1 in each layer. ESFT divides the sum of g by the number of tokens, which is the same
where a model normalizes the weights of the chosen experts. In each layer the experts of the highest shares are chosen
until these add up to `top_p`.

Source: Z. Wang et al., https://arxiv.org/abs/2407.01906, section 3.3, and https://github.com/deepseek-ai/ESFT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .. import __version__
from ..errors import MaskError
from ..masks.experts import experts_by_layer
from ..masks.mask_set import MaskSet
from ..masks.parameters import layer_of, select_names
from ..tensors import floating_parameters_of
from .find import choice_metadata
from .model_scores import CalibrationSequence

ExpertScore = Literal["tokens", "weights"]
EXPERT_SCORES: tuple[ExpertScore, ...] = get_args(ExpertScore)
# The thresholds of the paper.
TOP_P: dict[ExpertScore, float] = {"tokens": 0.2, "weights": 0.1}


@dataclass(frozen=True)
class RoutingShares:
    """How calibration sequences were routed.

    Attributes:
        tokens, weights: layer -> [experts] float64 on the CPU, the scores of the module's table.
    """

    tokens: Mapping[int, Tensor]
    weights: Mapping[int, Tensor]


@dataclass(frozen=True)
class FoundExperts:
    """A mask of whole experts.

    Attributes:
        experts: layer -> numbers of the chosen experts, ascending.
        shares: of all experts.
    """

    mask: MaskSet
    experts: Mapping[int, Sequence[int]]
    shares: RoutingShares


def find_experts(
    model: nn.Module,
    sequences: Sequence[CalibrationSequence],
    *,
    score: ExpertScore = "tokens",
    top_p: float | None = None,
    n_experts: int | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    routers: bool = False,
    metadata: Mapping[str, str] | None = None,
    progress: bool = False,
) -> FoundExperts:
    """Find the mask of the experts that calibration sequences use most in each layer (see the module).

    Args:
        model: see `routing_shares`.
        sequences: calibration data, at least one sequence.
        top_p: experts are chosen until their shares add up to it; 0.2 for tokens and 0.1 for weights by default.
        n_experts: in place of `top_p`, the number of experts in each layer.
        include, exclude: which parameters are used: see `select_names`.
        routers: whether the routers of these layers are trained too.
        metadata: strings for the mask; method, score, top_p or n_experts, and made_by are added.
        progress: show a bar on a terminal.

    Raises:
        MaskError: as `routing_shares` and `choose_experts`; or no parameter of experts is chosen.
    """
    if score not in EXPERT_SCORES:
        raise MaskError(f"score is {score!r}, expected {' or '.join(EXPERT_SCORES)}")
    if top_p is None and n_experts is None:
        top_p = TOP_P[score]
    _require_size(top_p, n_experts)
    parameters = floating_parameters_of(model)
    names = select_names(parameters, include=include, exclude=exclude)
    shapes = {name: tuple(parameters[name].shape) for name in names}
    layers = experts_by_layer(shapes)
    if not layers:
        raise MaskError("no parameter of experts is chosen by include and exclude")
    shares = routing_shares(model, sequences, progress=progress)
    of_score = shares.tokens if score == "tokens" else shares.weights
    chosen = choose_experts(
        {layer: of for layer, of in of_score.items() if layer in layers}, top_p=top_p, n_experts=n_experts
    )
    mask = MaskSet.experts(shapes, chosen, routers=routers)
    size = {"top_p": str(top_p)} if n_experts is None else {"n_experts": str(n_experts)}
    made = {"method": "experts", "expert_score": score, **size, "made_by": f"sparse-opt {__version__}"}
    mask.metadata |= {**(metadata or {}), **choice_metadata(include, exclude, False, routers), **made}
    return FoundExperts(mask, chosen, shares)


def routing_shares(
    model: nn.Module, sequences: Sequence[CalibrationSequence], *, progress: bool = False
) -> RoutingShares:
    """Count where a model's routers send the tokens of calibration sequences, prompts included.

    A forward pre-hook reads the arguments of each module `experts` of fused weights: hidden states, [T, K] indices and
    [T, K] weights, as transformers 5 calls it. The sequences go through the model one at a time, in eval mode.

    Args:
        model: called with `input_ids=` [1, T] int64.

    Raises:
        MaskError: there is no sequence, or no module of fused experts, or one is called in another way; names it.
    """
    if not sequences:
        raise MaskError("found no calibration sequence, expected at least one to score experts")
    modules = {name: module for name, module in model.named_modules() if _is_fused(name, module)}
    if not modules:
        raise MaskError("the model has no fused experts, a module 'experts' with parameters [experts, ...]")
    sums: dict[int, tuple[Tensor, Tensor]] = {}

    def collect(name: str, n_experts: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        layer = layer_of(name)
        if layer is None:
            raise MaskError(f"{name} has no layer number in its name")

        def add(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            indices, weights = _routing(name, arguments)
            # An index of n_experts is of a token that this process does not compute.
            tokens = torch.bincount(indices, minlength=n_experts)[:n_experts].double()
            weighted = torch.bincount(indices, weights.double(), minlength=n_experts)[:n_experts]
            before = sums.get(layer, (0, 0))
            sums[layer] = before[0] + tokens, before[1] + weighted

        return add

    hooks = [
        module.register_forward_pre_hook(collect(name, next(module.parameters(recurse=False)).shape[0]))
        for name, module in modules.items()
    ]
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            for sequence in tqdm(
                sequences, desc="experts", unit="sequence", leave=False, disable=None if progress else True
            ):
                model(input_ids=torch.tensor([list(sequence.ids)], dtype=torch.int64, device=device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    shares = {layer: [(sum_ / sum_.sum()).cpu() for sum_ in of] for layer, of in sorted(sums.items())}
    return RoutingShares({layer: of[0] for layer, of in shares.items()}, {layer: of[1] for layer, of in shares.items()})


def choose_experts(
    shares: Mapping[int, Tensor], *, top_p: float | None = None, n_experts: int | None = None
) -> dict[int, list[int]]:
    """Return the experts of the highest shares in each layer, ascending; of equal shares the lower number first.

    Args:
        shares: layer -> [experts].
        top_p: as few experts as have together this share, above 0 and at most 1.
        n_experts: in place of `top_p`, the number of experts in each layer.

    Raises:
        MaskError: both or neither are given, or one is out of range.
    """
    _require_size(top_p, n_experts)
    chosen = {}
    for layer, of in shares.items():
        if n_experts is not None and not 1 <= n_experts <= of.numel():
            raise MaskError(f"n_experts is {n_experts}, expected 1 to {of.numel()}, the experts of layer {layer}")
        order = of.argsort(descending=True, stable=True)
        count = n_experts
        if top_p is not None:
            # Experts are added while those before them have less than top_p.
            before = of[order].cumsum(0) - of[order]
            count = max(1, int((before < top_p).count_nonzero()))
        chosen[layer] = sorted(order[:count].tolist())
    return chosen


def _require_size(top_p: float | None, n_experts: int | None) -> None:
    if (top_p is None) == (n_experts is None):
        raise MaskError(f"top_p is {top_p} and n_experts {n_experts}, expected one of the two")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise MaskError(f"top_p is {top_p}, expected above 0, at most 1")


def _is_fused(name: str, module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return name.rpartition(".")[2] == "experts" and any(p.dim() >= 3 for p in parameters)


def _routing(name: str, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the flat indices and weights of the chosen experts, of the arguments of a module of experts."""
    if len(arguments) == 3:
        _, indices, weights = arguments
        if isinstance(indices, Tensor) and not indices.is_floating_point() and indices.shape == weights.shape:
            return indices.reshape(-1), weights.detach().reshape(-1)
    raise MaskError(f"{name} is not called with hidden states, expert indices [T, K] and weights [T, K]")
