"""Scores of the initial model's elements, from its weights alone or from calibration sequences.

With w a weight, g its gradient and x the input that it multiplies:

| method | score | source |
|---|---|---|
| weight_magnitude | abs(w) | S. Han et al., https://arxiv.org/abs/1506.02626 |
| snip | abs(w * mean(g)) | N. Lee, T. Ajanthan, P. Torr, https://arxiv.org/abs/1810.02340 |
| fisher_gradient | mean(g^2), the diagonal Fisher | Y.-L. Sung et al., https://arxiv.org/abs/2111.09839 |
| wanda | abs(w) * norm(x), the 2-norm over all tokens | M. Sun et al., https://arxiv.org/abs/2306.11695 |

Means are over sequences. g is the gradient of one sequence's loss: the mean negative log-likelihood of its completion's
tokens, log-softmax in fp32, dropout off. The sequences go through the model one at a time, so nothing is padded.

wanda scores only the weights of linear layers, where every weight multiplies an input. A weight with another use, such
as an embedding tied to the output layer, is left out. The published method compares scores within each output row; here
they are compared as for all methods, in one pool or tensor by tensor.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from .. import quantised_layers
from ..errors import MaskError
from ..optim.quantised import probed

CalibrationMethod = Literal["snip", "fisher_gradient", "wanda"]
ModelMethod = Literal["weight_magnitude", "snip", "fisher_gradient", "wanda"]
CALIBRATION_METHODS: tuple[CalibrationMethod, ...] = ("snip", "fisher_gradient", "wanda")


class CalibrationSequence(Protocol):
    """Token ids of a prompt and its completion; the completion starts at `prompt_length`."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def prompt_length(self) -> int: ...


class ModelScores:
    """The scores of a model's parameters, computed on request: a `mask_finding.select.ScoreSource`.

    Args:
        score_name: for messages.
        parameters: name -> parameter, in the model's order.
        score: returns the floating-point scores >= 0, flat or shaped, of the parameter of a name.
    """

    def __init__(self, score_name: str, parameters: Mapping[str, Tensor], score: Callable[[str], Tensor]) -> None:
        self.score_name = score_name
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(p.shape) for name, p in parameters.items()}
        self._score = score

    def bits(self, name: str) -> Tensor:
        """Return the bits of one tensor's scores in float32: [numel] int32."""
        return self._score(name).float().contiguous().view(-1).view(torch.int32)


def weight_scores(parameters: Mapping[str, Tensor], model: nn.Module | None = None) -> ModelScores:
    """Return the scores abs(w) of each parameter; quantised weights of `model` are dequantised."""
    read = _reader(model, parameters)
    return ModelScores("weight_magnitude score", parameters, lambda name: read(name).abs())


def _reader(model: nn.Module | None, parameters: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    layers = {} if model is None else quantised_layers.find(model)
    return lambda name: layers[name].dequantised() if name in layers else parameters[name].detach()


def calibrated_scores(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    sequences: Sequence[CalibrationSequence],
    method: CalibrationMethod,
    *,
    progress: bool = False,
) -> ModelScores:
    """Compute the scores of a causal language model's parameters on calibration sequences (see the module).

    The model's training mode, `requires_grad` and gradients are restored. Extra memory: snip and fisher_gradient take
    one fp32 sum per scored element, and one parameter's gradient at a time; wanda one fp64 sum per input.

    Args:
        model: called with `input_ids=` [1, T] int64, returns `.logits` [1, T, V].
        parameters: name -> parameter of the model, those to score, tied ones once.
        sequences: each with a completion of one token or more.
        progress: show a bar on a terminal.

    Raises:
        MaskError: another method; no sequence, or one without a completion; for wanda, no parameter that is a linear
            layer's weight.
    """
    if method not in CALIBRATION_METHODS:
        raise MaskError(f"method is {method!r}, expected one of {', '.join(CALIBRATION_METHODS)}")
    if not sequences:
        raise MaskError(f"found no calibration sequence, expected at least one for {method}")
    for i, sequence in enumerate(sequences):
        if len(sequence.ids) - max(sequence.prompt_length, 1) < 1:
            raise MaskError(
                f"calibration sequence {i} has {len(sequence.ids)} tokens and a prompt of {sequence.prompt_length}, "
                "expected a completion token that can be predicted"
            )
    shown = tqdm(sequences, desc=method, unit="sequence", leave=False, disable=None if progress else True)
    training = model.training
    model.eval()
    try:
        if method == "wanda":
            return _wanda(model, parameters, shown)
        return _of_gradients(model, parameters, shown, method, len(sequences))
    finally:
        model.train(training)


def _of_gradients(
    model: nn.Module, parameters: Mapping[str, Tensor], sequences: Any, method: str, n_sequences: int
) -> ModelScores:
    squared, read = method == "fisher_gradient", _reader(model, parameters)
    layers = quantised_layers.find(model)
    quantised = {name: layers[name] for name in parameters if name in layers}
    plain = {name: p for name, p in parameters.items() if name not in quantised}
    stored = plain | {name: layer.weight for name, layer in quantised.items()}
    sums = {
        name: torch.zeros(p.shape, dtype=torch.float32, device=stored[name].device) for name, p in parameters.items()
    }

    def add(name: str, gradient: Tensor) -> None:
        gradient = gradient.float()
        sums[name].add_(gradient.square() if squared else gradient)

    def collect(name: str) -> Callable[[Tensor], None]:
        def add_and_free(parameter: Tensor) -> None:
            assert parameter.grad is not None  # called right after it was computed
            add(name, parameter.grad)
            # Freed immediately, so that the model's gradients never exist together.
            parameter.grad = None

        return add_and_free

    with _gradients_of(model, plain), probed(model, {name: functools.partial(add, name) for name in quantised}):
        hooks = [p.register_post_accumulate_grad_hook(collect(name)) for name, p in plain.items()]
        try:
            for sequence in sequences:
                _loss(model, sequence).backward()
        finally:
            for hook in hooks:
                hook.remove()

    def score(name: str) -> Tensor:
        mean = sums[name] / n_sequences
        return mean if squared else (read(name).float() * mean).abs_()

    return ModelScores(f"{method} score", parameters, score)


@contextlib.contextmanager
def _gradients_of(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager inside which only these parameters require grad, and no gradients exist at entry."""
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    chosen = {id(p) for p in parameters.values()}
    for parameter, _, _ in before:
        parameter.requires_grad_(id(parameter) in chosen)
        parameter.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, required, gradient in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient


def _loss(model: nn.Module, sequence: CalibrationSequence) -> Tensor:
    ids = torch.tensor([list(sequence.ids)], dtype=torch.int64, device=next(model.parameters()).device)
    start = max(sequence.prompt_length, 1)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
    return F.cross_entropy(logits.float(), ids[0, start:])


def _wanda(model: nn.Module, parameters: Mapping[str, Tensor], sequences: Any) -> ModelScores:
    layers = _linear_layers(model)
    quantised, read = quantised_layers.find(model), _reader(model, parameters)
    stored = {name: quantised[name].weight if name in quantised else p for name, p in parameters.items()}
    chosen = {name: p for name, p in stored.items() if id(p) in layers}
    if not chosen:
        raise MaskError(
            f"none of the {len(parameters)} chosen tensors is the weight of a linear layer, as wanda expects"
        )
    norms: dict[int, Tensor] = {}

    def collect(key: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            squares = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double().square().sum(dim=0)
            norms[key] = norms[key] + squares if key in norms else squares

        return add

    hooks = [layer.register_forward_pre_hook(collect(key)) for key in map(id, chosen.values()) for layer in layers[key]]
    try:
        with torch.no_grad(), probed(model, {}):
            for sequence in sequences:
                device = next(model.parameters()).device
                ids = torch.tensor([list(sequence.ids)], dtype=torch.int64, device=device)
                model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()

    def score(name: str) -> Tensor:
        weight = read(name).float().abs()
        if id(chosen[name]) not in norms:  # no sequence used the layer, which may be an expert
            return torch.zeros_like(weight)
        norm = norms[id(chosen[name])].sqrt().float()
        # A Conv1D keeps its weight as [in, out].
        return weight * (norm[:, None] if _is_conv1d(layers[id(chosen[name])][0]) else norm)

    return ModelScores("wanda score", {name: parameters[name] for name in chosen}, score)


def _linear_layers(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return id of a weight -> the linear layers that multiply by it, for weights without any other use."""
    layers: dict[int, list[nn.Module]] = {}
    others = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight" and (isinstance(module, nn.Linear) or _is_conv1d(module)):
                layers.setdefault(id(parameter), []).append(module)
            else:
                others.add(id(parameter))
    return {key: found for key, found in layers.items() if key not in others}


def _is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, GPT-2's linear layer; False if transformers is not imported."""
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    return pytorch_utils is not None and isinstance(module, pytorch_utils.Conv1D)
