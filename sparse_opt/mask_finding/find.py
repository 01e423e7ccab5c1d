"""Finds masks, from a log of states or from the initial model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Unpack

import torch
from torch import nn

from ..delta.state_log import StateLog, floating_parameters
from ..errors import MaskError
from ..masks.parameters import select_names
from ..tensors import canonical_names, floating_parameters_of, named_parameters_of
from .log_scores import LogMethod, LogScores, plan_scores
from .model_scores import CalibrationSequence, ModelMethod, calibrated_scores, weight_scores
from .select import FoundMask, SelectionOptions, find_mask, require_arguments


def find_from_log(
    log: StateLog,
    *,
    method: LogMethod = "magnitude",
    sparsity: float,
    target_step: int | None = None,
    momentum_window: int | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    routers: bool = False,
    device: torch.device | str = "cpu",
    **options: Unpack[SelectionOptions],
) -> FoundMask:
    """Find the mask of the elements that a method scores highest in a log of states.

    `mask_finding.log_scores` describes the methods' formulas and the steps they read, `find_mask` how elements are
    selected. The candidates are the floating-point parameters, tied ones once.

    Args:
        target_step, momentum_window: see `mask_finding.log_scores.plan_scores`.
        include, exclude, mlp_only: which tensors are used: see `select_names`.
        routers: whether the routers of experts are used too; they are frozen otherwise.
        device: where the scores are computed; every device gives the same mask.
        options: min_tensor_keep, pool, pattern and progress of `find_mask`.

    Returns:
        A mask over the chosen tensors. Its metadata: method, sparsity, step, base_step, steps_read (how many),
        log_digest (of the target state), base_digest, momentum_window for momentum, model where the log names one;
        include, exclude, mlp_only and routers where they were given; tied (JSON, further name -> name
        of the same tensor) where there are any; and those of `find_mask`.

    Raises:
        MaskError: as `mask_finding.log_scores.plan_scores` and `find_mask`; or no tensor is chosen.
        DeltaLogError: the log is damaged, or the step is not logged.
    """
    require_arguments(sparsity, options)
    plan = plan_scores(log, method, target_step=target_step, momentum_window=momentum_window)
    specs = floating_parameters(log)
    tied = log.layout.aliases
    names = _selected(specs, str(log.directory), include, exclude, mlp_only, routers, tied)
    metadata = {
        "method": method,
        "sparsity": str(float(sparsity)),
        "step": str(plan.step),
        "base_step": str(plan.steps[0]),
        "steps_read": str(len(plan.steps)),
        "log_digest": log.digest(plan.step),
        "base_digest": log.digest(plan.steps[0]),
        **({} if plan.window is None else {"momentum_window": str(plan.window)}),
        **choice_metadata(include, exclude, mlp_only, routers),
        **_tied_metadata(tied, names),
    }
    model = log.metadata.get("model")
    if model is not None:
        metadata["model"] = model
    scores = LogScores(log, plan, {name: specs[name] for name in names}, torch.device(device))
    return find_mask(scores, sparsity=sparsity, metadata=metadata, **options)


def find_from_model(
    model: nn.Module,
    *,
    method: ModelMethod,
    sparsity: float,
    sequences: Sequence[CalibrationSequence] = (),
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    routers: bool = False,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[SelectionOptions],
) -> FoundMask:
    """Find the mask of the elements that a method scores highest in the initial model, on the model's device.

    `mask_finding.model_scores` describes the methods, `find_mask` how elements are selected. The candidates are the
    floating-point parameters, tied ones once; wanda's are the weights of linear layers among them.

    Args:
        model: for `weight_magnitude` any module, for the other methods a causal language model: see
            `mask_finding.model_scores.calibrated_scores`.
        sequences: calibration data, at least one sequence, for the methods other than `weight_magnitude`.
        include, exclude, mlp_only: which tensors are used: see `select_names`.
        routers: whether the routers of experts are used too; they are frozen otherwise.
        metadata: strings for the mask; method, sparsity, the given include, exclude, mlp_only and routers, and
            those of `find_mask` are added.
        options: min_tensor_keep, pool, pattern and progress of `find_mask`.

    Raises:
        MaskError: as `calibrated_scores` and `find_mask`; or no tensor is chosen.
    """
    require_arguments(sparsity, options)
    parameters = floating_parameters_of(model)
    firsts = canonical_names(named_parameters_of(model))
    tied = {name: first for name, first in firsts.items() if name != first}
    names = _selected(parameters, "the model", include, exclude, mlp_only, routers, tied)
    chosen = {name: parameters[name] for name in names}
    if method == "weight_magnitude":
        scores = weight_scores(chosen, model)
    else:
        scores = calibrated_scores(model, chosen, sequences, method, progress=options.get("progress", False))
    choice = choice_metadata(include, exclude, mlp_only, routers) | _tied_metadata(tied, scores.shapes)
    made = {"method": method, "sparsity": str(float(sparsity)), **choice}
    return find_mask(scores, sparsity=sparsity, metadata={**(metadata or {}), **made}, **options)


def choice_metadata(
    include: Sequence[str] | None, exclude: Sequence[str] | None, mlp_only: bool, routers: bool
) -> dict[str, str]:
    """Return the selection of tensors as mask metadata; empty if all were selected."""
    patterns = {"include": include, "exclude": exclude}
    chosen = {key: json.dumps(list(value)) for key, value in patterns.items() if value is not None}
    flags = {"mlp_only": mlp_only, "routers": routers}
    return chosen | {name: "true" for name, given in flags.items() if given}


def _tied_metadata(tied: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return `tied`, JSON of further name -> name in the mask, if there is any."""
    listed = {further: first for further, first in tied.items() if first in names}
    return {"tied": json.dumps(listed)} if listed else {}


def _selected(
    names: Collection[str],
    source: str,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    mlp_only: bool,
    routers: bool,
    tied: Mapping[str, str],
) -> list[str]:
    selected = select_names(names, include=include, exclude=exclude, mlp_only=mlp_only, routers=routers, tied=tied)
    if not selected:
        raise MaskError(f"no tensor of {source} is chosen by include, exclude, mlp_only and routers")
    return selected
