"""verl's training engines, and the data and the loss of an actor update. Needs verl and a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import verl  # noqa: F401  # registers the engines
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.utils.losses import ppo_loss

from sparse_opt.integrations.verl.options import set_strategy

from ..distributed.variants import Training


def make_engine(
    model: Path,
    strategy: str,
    *,
    engine: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    network: Mapping[str, Any],
    saved: Sequence[str] = (),
) -> BaseEngine:
    """Build and initialize an engine for a model without a tokenizer; a collective.

    Args:
        model: folder of a Hugging Face checkpoint.
        strategy: fsdp2, or sparse_fsdp2.
        engine, optimizer, network: options of verl's FSDPEngineConfig, FSDPOptimizerConfig and HFModelConfig.
        saved: the contents of its checkpoints.
    """
    config = FSDPEngineConfig(strategy="fsdp2", **engine)
    set_strategy(config, strategy)  # verl's class refuses strategies of others, and verl's FSDPActorConfig does this
    built = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(path=str(model), load_tokenizer=False, **network),
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(**optimizer),
        checkpoint_config=CheckpointConfig(save_contents=list(saved), load_contents=list(saved)),
    )
    built.initialize()
    return built


@dataclass
class EngineTraining(Training):
    """An engine that makes actor updates; `model` and `optimizer` are the engine's.

    Attributes:
        grad_norm: of the last update, before it was clipped.
    """

    engine: BaseEngine
    loss: Any  # verl's loss function
    grad_norm: float = 0.0

    def step(self, micro_batches: Sequence[Any]) -> None:
        """One actor update on a batch, which the engine divides into micro-batches; verl's TrainingWorker does this."""
        (batch,) = micro_batches
        with self.engine.train_mode():
            output = self.engine.train_batch(batch, self.loss)
            self.engine.lr_scheduler_step()
        self.grad_norm = float(output["metrics"]["grad_norm"])

    @torch.no_grad()
    def log_probs(self, batch: Any) -> Tensor:
        """The log-probabilities of the responses' tokens under the present weights, [B, response] fp32 on the CPU."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(batch)
        response = len(batch["responses"][0])
        # The value at a token is that of the next one.
        rows = [row[-response - 1 : -1].float().cpu() for row in output["model_output"]["log_probs"].unbind()]
        return torch.stack(rows)


def make_loss(micro_batch_size: int) -> Any:
    """verl's clipped policy loss with its default options: the mean over all tokens of responses."""
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=micro_batch_size)
    return partial(ppo_loss, config=config)


def make_batch(
    *,
    n: int,
    length: int,
    vocab: int,
    ranks: int,
    micro_batch_size: int,
    fused_kernels: bool = False,
    seed: int,
    old_log_probs: Tensor | None = None,
) -> Any:
    """A rank's part of a batch of prompts and responses with advantages, in verl's layout without padding.

    The first half of each sequence is its prompt. Token ids and advantages are random, and follow from the seed.

    Args:
        n: sequences of this rank.
        fused_kernels: whether the model computes log-probabilities in fused kernels (`use_fused_kernels`).
        old_log_probs: [n, response], of the policy that has generated the responses; None: zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (n, length), generator=generator)
    advantages = torch.randn(n, 1, generator=generator)
    prompt = length // 2
    response = length - prompt
    ones = torch.ones(n, response)
    columns = {
        "input_ids": tokens,
        "prompts": tokens[:, :prompt],
        "responses": tokens[:, prompt:],
        "position_ids": torch.arange(length).expand(n, -1),
        "loss_mask": ones.long(),
        "response_mask": ones.long(),
        "old_log_probs": torch.zeros(n, response) if old_log_probs is None else old_log_probs,
        "advantages": advantages * ones,
    }
    return tensordict_utils.get_tensordict(
        tensor_dict={
            name: torch.nested.as_nested_tensor([row.clone() for row in rows], layout=torch.jagged)
            for name, rows in columns.items()
        },
        non_tensor_dict={
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": micro_batch_size,
            "temperature": 1.0,
            "global_batch_size": n * ranks,
            "pad_mode": "no_padding",
            "pad_token_id": 0,
            "use_fused_kernels": fused_kernels,
            "calculate_entropy": False,
        },
    )
