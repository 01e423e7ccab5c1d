"""SparseFSDPEngine: verl's FSDP2 engine with an optimizer that trains the active elements of a mask."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ...errors import ConfigError
from ...optim import SparseOptimizer
from .checkpoint import SparseCheckpointManager
from .options import STRATEGY, build_optimizer, require_supported, set_strategy


class ExportedWeights(Iterator[tuple[str, Tensor]]):
    """All weights by name, gathered one after the other; a collective of the trainer's ranks.

    verl passes this to a checkpoint engine, and the engine that trains to its own `delta_sharded` only.

    Attributes:
        engine: that trains these weights.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], engine: SparseFSDPEngine) -> None:
        self._tensors, self.engine = iter(tensors), engine

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._tensors)


@EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=["cuda", "cpu"])
class SparseFSDPEngine(FSDPEngineWithLMHead):
    """verl's `FSDPEngineWithLMHead` under FSDP2, of whose weights the optimizer trains the active elements of a mask.

    Model, batches, losses, sharding and the schedule are verl's. What differs:

    - the optimizer is built from the sharded model with its names, and averages compact gradients over the mesh, in the
      last micro-batch of a step;
    - the norm and the clipping are those of the active gradients;
    - checkpoints hold the optimizer's state for any number of ranks (checkpoint.py);
    - the checkpoint engine sparse_opt (checkpoint_engine.py) sends the active values that have changed;
    - with `model.lora_rank` above 0, with which verl computes the reference in the actor, there are no adapters: the
      reference is the weights before training, from the optimizer's `base_weights()`.

    Raises:
        ConfigError: an option is not supported or missing; the message names it.
    """

    optimizer: SparseOptimizer
    checkpoint_manager: FSDPCheckpointManager

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ) -> None:
        if not engine_config.forward_only:
            require_supported(engine_config)
        if model_config.lora_rank > 0 and not model_config.lora.get("merge", False):
            raise ConfigError(
                f"model.lora_rank is {model_config.lora_rank}: with strategy {STRATEGY} it asks for the reference in "
                "the actor, without adapters; set model.lora.merge=True, so that the rollout expects whole weights"
            )
        engine_config = copy.copy(engine_config)
        set_strategy(engine_config, "fsdp2")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._is_lora = False

    def initialize(self) -> None:
        """Build the model, the optimizer and the schedule."""
        super().initialize()
        if self.optimizer is not None:
            self.checkpoint_manager = SparseCheckpointManager.like(self.checkpoint_manager)

    def _build_optimizer(self, module: nn.Module) -> SparseOptimizer:
        return build_optimizer(module, self.optimizer_config)

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        # Compact gradients are added up on each rank, and averaged once; FSDP has no gradients to reduce.
        if is_last_micro_batch:
            yield
        else:
            with self.optimizer.no_sync():
                yield

    def optimizer_step(self) -> float:
        """Clip the active gradients and update the active elements, unless the norm is not finite.

        Returns:
            The norm of the active gradients of all ranks before clipping.
        """
        norm = self.optimizer.clip_grad_norm_(self.optimizer_config.clip_grad)
        value = norm.item()
        if norm.isfinite():
            self.optimizer.step()
        else:
            print(f"the norm of the active gradients is {value}: no update in this step")
            self.optimizer.zero_grad()
        return float(value)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The context in which verl computes the reference in the actor: the weights before training."""
        return self.optimizer.base_weights()

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """All weights by name, as verl's engine exports them, for rollouts and for checkpoint engines."""
        tensors, adapters = super().get_per_tensor_param(**kwargs)
        return (tensors if self.optimizer is None else ExportedWeights(tensors, self)), adapters
