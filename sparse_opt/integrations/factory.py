"""`sparse_trainer`: make a subclass of a trainer class that trains under a mask."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

# Methods of the trainer class that SparseTrainer overrides.
_HIDDEN = ("create_optimizer", "_clip_grad_norm", "_get_grad_norm")
# The supported TRL trainers.
_TRL_TRAINERS = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")


@functools.cache
def sparse_trainer(trainer_class: type) -> Any:
    """A subclass of `trainer_class` that uses `SparseAdamW`; repeated calls with a class return the same subclass.

    Its constructor takes the arguments of `trainer_class` and two more, by keyword:

    - `mask`: a `MaskSet`, a mask file, a dictionary of bool tensors, or a `RandomMask`, which is drawn for the model; a
      number is the density of a `RandomMask` of single elements.
    - `sparse`: `SparseArguments`; None for the defaults.

    Gradients are kept compact, and are clipped and logged by the norm over active elements. The Trainer provides the
    learning-rate schedule, the parameter groups (with its own choice of decayed parameters), accumulation, checkpoints
    and resuming. DPO, and GRPO with beta > 0, load no reference model: the policy computes the reference
    log-probabilities inside `SparseAdamW.base_weights()`. A `ref_model` that is passed to DPO is used unchanged.

    The trainer has two more attributes: `sparse_optimizer`, the SparseAdamW (None before training), and
    `base_weights()`, a context in which the model holds the weights at the start of the run.

    Args:
        trainer_class: transformers.Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, or a subclass of one.

    Raises:
        TypeError: another class, or one that overrides how the optimizer is made or gradients are clipped.
        ImportError: transformers or TRL is missing or too old; the message names the versions.
    """
    require("transformers")
    from transformers import Trainer

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"trainer_class is {_shown(trainer_class)}, expected a subclass of transformers.Trainer")
    from . import trainer

    if issubclass(trainer_class, trainer.SparseTrainer):
        raise TypeError(f"{_shown(trainer_class)} is already a sparse trainer")
    for owner in trainer_class.__mro__[: trainer_class.__mro__.index(Trainer)]:
        hidden = [name for name in _HIDDEN if name in vars(owner)]
        if hidden:
            raise TypeError(
                f"{_shown(owner)} overrides {hidden[0]}, which sparse_trainer overrides, too: remove it; "
                "get_decay_parameter_names selects weight decay, create_scheduler makes the schedule"
            )
    base = trainer.SparseTrainer
    theirs = next((c for c in trainer_class.__mro__ if c.__module__.startswith("trl.")), None)
    if theirs is not None:
        require("trl")
        if not (theirs.__module__.startswith("trl.trainer.") and theirs.__name__ in _TRL_TRAINERS):
            raise TypeError(
                f"{_shown(theirs)} is not supported, expected a subclass of {', '.join(_TRL_TRAINERS)} or of "
                "transformers.Trainer"
            )
        from . import references

        base = {"DPOTrainer": references.SparseDPOTrainer, "GRPOTrainer": references.SparseGRPOTrainer}.get(
            theirs.__name__, base
        )
    return type(f"Sparse{trainer_class.__name__}", (base, trainer_class), {"__module__": __name__})


def _shown(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if isinstance(thing, type) else repr(thing)


# transformers: the oldest version that the tests pass with.
# TRL: the first version with the fused LM head, through which DPO and GRPO call their reference.
MINIMUM_VERSIONS = {"transformers": "5.15.0", "trl": "1.16.0"}


def require(package: str) -> None:
    """Raise a one-line ImportError if `package` is missing or older than its version in `MINIMUM_VERSIONS`."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"sparse_opt.integrations needs {package} >= {MINIMUM_VERSIONS[package]}, which is not installed: "
            "pip install 'sparse-opt[integrations]'"
        ) from None
    from packaging.version import Version  # a dependency of transformers

    if Version(found) < Version(MINIMUM_VERSIONS[package]):
        raise ImportError(
            f"sparse_opt.integrations needs {package} >= {MINIMUM_VERSIONS[package]}, found {found}: "
            f"pip install '{package}>={MINIMUM_VERSIONS[package]}'"
        )
