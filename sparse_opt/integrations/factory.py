"""`sparse_trainer`: a subclass of someone's trainer that trains under a mask."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any

# What stands in front of a class hides these of its own.
_HIDDEN = ("create_optimizer", "_clip_grad_norm", "_get_grad_norm")
# TRL's trainers whose reference model, or the lack of one, is known here.
_TRL_TRAINERS = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")


@functools.cache
def sparse_trainer(trainer_class: type) -> Any:
    """A subclass of `trainer_class` that steps with `SparseAdamW`; the same one for the same class.

    Its constructor takes what `trainer_class` takes, and two more, by keyword:

    - `mask`: a `MaskSet`, a mask file, or a dictionary of bool tensors.
    - `sparse`: `SparseArguments`; None for the defaults.

    Gradients are kept compact, clipped and logged by the norm over active elements; the learning-rate schedule, the
    parameter groups (weight decay on what the Trainer decays), accumulation, checkpoints and resuming are the
    Trainer's. DPO, and GRPO with beta > 0, load no reference model: its log-probabilities are the policy's own, inside
    `SparseAdamW.base_weights()`. A `ref_model` that is passed to DPO is used as it is.

    The trainer has two more attributes: `sparse_optimizer`, the SparseAdamW (None before training), and
    `base_weights()`, inside which the model holds the weights that the run started from.

    Args:
        trainer_class: transformers.Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, or a subclass of one.

    Raises:
        TypeError: another class, or one that makes its optimizer or clips gradients in a way of its own.
        ImportError: transformers or TRL is missing, or of a version that lacks what is overridden; names the versions.
    """
    require("transformers")
    from transformers import Trainer

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"sparse_trainer takes a subclass of transformers.Trainer, not {_shown(trainer_class)}")
    from . import trainer

    if issubclass(trainer_class, trainer.SparseTrainer):
        raise TypeError(f"{_shown(trainer_class)} is a sparse trainer already")
    for owner in trainer_class.__mro__[: trainer_class.__mro__.index(Trainer)]:
        hidden = [name for name in _HIDDEN if name in vars(owner)]
        if hidden:
            raise TypeError(
                f"{_shown(owner)} overrides {hidden[0]}, which sparse_trainer does itself: leave it out; weight decay "
                "goes by get_decay_parameter_names, the schedule by create_scheduler"
            )
    base = trainer.SparseTrainer
    theirs = next((c for c in trainer_class.__mro__ if c.__module__.startswith("trl.")), None)
    if theirs is not None:
        require("trl")
        if not (theirs.__module__.startswith("trl.trainer.") and theirs.__name__ in _TRL_TRAINERS):
            raise TypeError(
                f"{_shown(theirs)} has a loss and a reference that are not covered here; {', '.join(_TRL_TRAINERS)} are"
            )
        from . import references

        base = {"DPOTrainer": references.SparseDPOTrainer, "GRPOTrainer": references.SparseGRPOTrainer}.get(
            theirs.__name__, base
        )
    return type(f"Sparse{trainer_class.__name__}", (base, trainer_class), {"__module__": __name__})


def _shown(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if isinstance(thing, type) else repr(thing)


# transformers: the first with Trainer._clip_grad_norm and Trainer._get_grad_norm, by its source.
# TRL: the first with the fused LM head, through which DPO and GRPO call their reference.
FIRST = {"transformers": "5.3.0", "trl": "1.16.0"}


def require(package: str) -> None:
    """Raises ImportError, in one line, where `package` is missing or older than `FIRST` says."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"sparse_opt.integrations wants {package} >= {FIRST[package]}, which is not installed: "
            "pip install 'sparse-opt[integrations]'"
        ) from None
    from packaging.version import Version  # transformers depends on it

    if Version(found) < Version(FIRST[package]):
        raise ImportError(
            f"sparse_opt.integrations wants {package} >= {FIRST[package]}, found {found}: "
            f"pip install '{package}>={FIRST[package]}'"
        )
