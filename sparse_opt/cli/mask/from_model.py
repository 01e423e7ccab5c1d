"""The methods of `sparse-opt mask find` that use a model without a training run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparse_opt.trainers.pretrained import load_causal_lm, load_config_from, load_tokenizer_from, reading

from ... import mask_finding
from ...errors import ConfigError
from ...mask_finding.experts import FoundExperts
from ...mask_finding.find import find_from_model
from ...mask_finding.select import FoundMask
from ...masks.parameters import select_names
from ...progress import hide_progress_bars
from ...tensors import floating_parameters_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parameter_shapes(source: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a causal language model's floating-point parameters, tied ones once. Weights are not read.

    Raises:
        DataError: the model does not exist or is not a causal language model.
    """
    from transformers import AutoModelForCausalLM

    config = load_config_from(source)
    with torch.device("meta"), reading(f"a causal language model from {source}"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in floating_parameters_of(model).items()}


def chosen_shapes(args: Namespace) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parameters selected by --include, --exclude, --mlp_only and --routers.

    Raises:
        ConfigError: no parameter is selected.
        DataError: the model does not exist or is not a causal language model.
    """
    shapes = parameter_shapes(args.model_name)
    names = select_names(
        shapes, include=args.include, exclude=args.exclude, mlp_only=args.mlp_only, routers=args.routers
    )
    if not names:
        raise ConfigError(f"no tensor of {args.model_name} is chosen by include, exclude, mlp_only and routers")
    return {name: shapes[name] for name in names}


def find(args: Namespace, sparsity: float, device: torch.device, options: dict[str, Any]) -> FoundMask:
    """Find a mask from the initial model.

    Args:
        args: the options of `mask find`.
        options: options of `mask_finding.find_from_model`.
    """
    chosen_shapes(args)  # before the weights are read
    model, sequences, metadata = _load(args, device)
    return find_from_model(
        model, method=args.method, sparsity=sparsity, sequences=sequences, metadata=metadata, **options
    )


def find_experts(args: Namespace, device: torch.device) -> FoundExperts:
    """Find the mask of `mask find --method experts`."""
    model, sequences, metadata = _load(args, device)
    return mask_finding.find_experts(
        model,
        sequences,
        score=args.expert_score,
        top_p=args.top_p,
        n_experts=args.experts_per_layer,
        include=args.include,
        exclude=args.exclude,
        routers=args.routers,
        metadata=metadata,
        progress=True,
    )


def _load(args: Namespace, device: torch.device) -> tuple[nn.Module, list[Any], dict[str, str]]:
    """The model, the calibration sequences if the method has any, and the mask's metadata on both."""
    hide_progress_bars()
    model = load_causal_lm(args.model_name, _DTYPES[args.dtype]).to(device)
    metadata = {"model": args.model_name, "dtype": args.dtype}
    if args.method == "weight_magnitude":
        return model, [], metadata
    sequences = _load_sequences(args)
    metadata |= {name: str(getattr(args, name)) for name in ("dataset", "dataset_split", "max_length", "seed")}
    metadata |= {"n_samples": str(len(sequences)), "device": str(next(model.parameters()).device)}
    return model, sequences, metadata


def _load_sequences(args: Namespace) -> list[Any]:
    from sparse_opt.trainers.batches import load_examples

    tokenizer = load_tokenizer_from(args.model_name)
    examples = load_examples(
        "demonstration",
        args.dataset,
        args.dataset_split,
        tokenizer,
        max_length=args.max_length,
        subset_size=args.n_samples,
        seed=args.seed,
    )
    return [sequence for (sequence,) in examples]
