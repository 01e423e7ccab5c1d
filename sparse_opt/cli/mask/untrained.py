"""The methods of `sparse-opt mask find` that use a model without a training run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_opt.trainers.run.progress import hide_progress_bars

from ... import __version__
from ...errors import ConfigError
from ...mask_finding.find import choice_metadata
from ...mask_finding.model_scores import ModelScores, calibrated_scores, weight_scores
from ...mask_finding.select import FoundMask, find_mask
from ...masks.mask_set import MaskSet
from ...masks.parameters import select_names
from ...tensors import canonical_names, named_parameters_of
from ..models import parameter_shapes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def find(
    args: Namespace,
    sparsity: float,
    device: torch.device,
    require: Callable[[Mapping[str, tuple[int, ...]]], None],
    arguments: dict[str, Any],
) -> FoundMask:
    """Find a mask for an untrained model.

    Args:
        args: the options of `mask find`.
        require: called with the chosen tensors before the search; raises if the caller cannot use them.
        arguments: arguments of `mask_finding.select.find_mask`.
    """
    hide_progress_bars()
    metadata = {
        "method": args.method,
        "sparsity": str(float(sparsity)),
        "model": args.model_name,
        **choice_metadata(args.include, args.exclude, args.mlp_only),
    }
    if args.method == "random":
        return _random(args, sparsity, require, metadata)
    model = _load_model(args.model_name, _DTYPES[args.dtype]).to(device)
    parameters = _parameters(model)
    names = chosen_names(args, parameters)
    chosen = {name: parameters[name] for name in names}
    require({name: tuple(p.shape) for name, p in chosen.items()})
    scores, made_with = _scores(args, model, chosen)
    return find_mask(scores, sparsity=sparsity, metadata={**metadata, "dtype": args.dtype, **made_with}, **arguments)


def _random(
    args: Namespace,
    sparsity: float,
    require: Callable[[Mapping[str, tuple[int, ...]]], None],
    metadata: dict[str, str],
) -> FoundMask:
    shapes = parameter_shapes(args.model_name)
    shapes = {name: shapes[name] for name in chosen_names(args, shapes)}
    require(shapes)
    mask = MaskSet.random(shapes, density=round((100 - sparsity) / 100, 12), pattern=args.pattern, seed=args.seed)
    mask.metadata.update({**metadata, "made_by": f"sparse-opt {__version__}"})
    return FoundMask(mask, threshold=None, capture=None, tensors={})


def chosen_names(args: Namespace, parameters: Mapping[str, object]) -> list[str]:
    """The parameters selected by --include, --exclude and --mlp_only; raises ConfigError if there are none."""
    names = select_names(parameters, include=args.include, exclude=args.exclude, mlp_only=args.mlp_only)
    if not names:
        raise ConfigError(f"no tensor of {args.model_name} is chosen by include, exclude and mlp_only")
    return names


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point parameters, tied ones once."""
    parameters = named_parameters_of(model)
    firsts = canonical_names(parameters)
    return {n: p for n, p in parameters.items() if firsts[n] == n and p.is_floating_point()}


def _scores(args: Namespace, model: nn.Module, parameters: Mapping[str, Tensor]) -> tuple[ModelScores, dict[str, str]]:
    """The scores, and a description of how they were computed."""
    if args.method == "weight_magnitude":
        return weight_scores(parameters), {}
    from sparse_opt.trainers.data.encoding import load_examples
    from sparse_opt.trainers.policy.pretrained import load_tokenizer_from

    tokenizer = load_tokenizer_from(args.model_name)
    examples, _ = load_examples(
        "demonstration",
        args.dataset,
        args.dataset_split,
        tokenizer,
        max_length=args.max_length,
        subset_size=args.n_samples,
        seed=args.seed,
    )
    sequences = [sequence for (sequence,) in examples]
    made_with = {
        "dataset": args.dataset,
        "dataset_split": args.dataset_split,
        "n_samples": str(len(sequences)),
        "max_length": str(args.max_length),
        "seed": str(args.seed),
        "device": str(next(model.parameters()).device),
    }
    return calibrated_scores(model, parameters, sequences, args.method, progress=True), made_with


def _load_model(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    from sparse_opt.trainers.policy.pretrained import load_pretrained

    return load_pretrained(AutoModelForCausalLM, name, "a causal language model", dtype=dtype)
