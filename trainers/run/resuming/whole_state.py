"""The whole state of a run, as one process saves it: gathered from all ranks if they shard the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sparse_opt.analysis.update_statistics import Masters
from sparse_opt.distributed import full_optimizer_state_dict, full_state
from sparse_opt.optim import SparseOptimizer

from ...policy.whole_model import Outline, gather
from ...ranks import Ranks
from .checkpoints import Stateful


class WholeState:
    """Gathers the model and the states of a run on rank 0. Sharded or not, all ranks must call its methods.

    Args:
        model: the model that is trained.
        outline: made before the model was sharded; None if it is not.
    """

    def __init__(self, ranks: Ranks, model: Any, outline: Outline | None):
        self._ranks, self._model, self._outline = ranks, model, outline

    @property
    def live_model(self) -> Any:
        """The model that is trained."""
        return self._model

    def model(self) -> Any:
        """An ordinary model with the current weights on rank 0: the model itself if it is not sharded."""
        return self._model if self._outline is None else self._outline.gather(self._model)

    def states(self, kept: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
        """The state of each object on rank 0, in the format of one process; without content on the other ranks."""
        if self._outline is None:
            return {name: thing.state_dict() for name, thing in kept.items()} if self._ranks.is_main else {}
        return {
            name: full_optimizer_state_dict(thing) if isinstance(thing, SparseOptimizer) else gather(thing.state_dict())
            for name, thing in kept.items()
        }

    def masters(self, optimizer: Any) -> Masters:
        """The optimizer's master copies of weights, on rank 0; empty without them, and for adapters."""
        if hasattr(self._model, "peft_config"):
            return {}
        if isinstance(optimizer, SparseOptimizer):
            if not optimizer.master_weights:
                return {}
            state = optimizer.state_dict() if self._outline is None else full_optimizer_state_dict(optimizer)
            if not self._ranks.is_main:
                return {}
            names = [name for group in state["param_groups"] for name in group["param_names"]]
            return {names[i]: (entry["indices"], entry["master"]) for i, entry in state["state"].items()}
        if optimizer.masters is None:
            return {}
        names = [name for name, weight in self._model.named_parameters() if weight.requires_grad]
        copies = gather(optimizer.masters)
        return {name: (None, copy) for name, copy in zip(names, copies, strict=True) if self._ranks.is_main}

    def logged(self) -> nn.Module | Mapping[str, Tensor]:
        """The content of a delta log, on rank 0: the model; of a model with adapters, which alone change, these."""
        if not hasattr(self._model, "peft_config"):
            return full_state(self._model)
        adapters = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        gathered: dict[str, Tensor] = gather(adapters)
        return gathered
