"""Direct Preference Optimization (https://arxiv.org/abs/2305.18290), dense or sparse.

The policy learns to prefer the chosen completion of each pair over the rejected one, held near a reference by beta. The
reference is the policy as training starts. Dense training keeps it as a second, frozen model; sparse training has it in
the policy itself, because `SparseAdamW.base_weights` swaps the active elements' start values in and out.

Left out: other losses than the sigmoid, a separate reference model, evaluation and resuming.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sparse_opt.errors import ConfigError
from sparse_opt.optim import SparseAdamW

from .config import option
from .logprobs import completion_logprobs
from .loop import TrainingRun
from .models import frozen_copy
from .options import TrainingOptions


@dataclass(kw_only=True)
class DPOConfig(TrainingOptions):
    """Train a causal language model on preference pairs by DPO, dense or under a mask."""

    beta: float = option(0.1, "strength of the pull towards the reference policy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigError(f"option 'beta' is {self.beta}: wanted more than 0")


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sigmoid loss of each pair, equation 7 of the paper: -log sigmoid(beta * h).

    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected). While the policy is the reference, h is 0 and
    the loss ln 2.

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: [B] fp32, log-probability sums over the completions.
        beta: strength of the pull towards the reference.

    Returns:
        losses [B]; and without gradient the implicit rewards beta * (policy - ref) of the chosen completions [B] and of
        the rejected ones [B].
    """
    chosen_rewards = beta * (policy_chosen - ref_chosen)
    rejected_rewards = beta * (policy_rejected - ref_rejected)
    losses = -F.logsigmoid(chosen_rewards - rejected_rewards)
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


def train(config: DPOConfig) -> dict[str, Any]:
    """Run DPO and return its summary: first and last metrics, median times, bytes, and where the files are.

    Writes `output_dir/metrics.jsonl` as it goes and the model to `output_dir/final` at the end.

    Raises:
        SparseOptError: in one of its kinds, before training, for options, data, model or mask that do not fit; during
            training for a loss that is not finite.
    """
    with TrainingRun(config, "dpo", "preference") as run:
        policy, optimizer = run.model, run.optimizer
        reference_weights: Callable[[], AbstractContextManager[None]]
        if isinstance(optimizer, SparseAdamW):
            reference, reference_weights = policy, optimizer.base_weights
        else:
            reference, reference_weights = frozen_copy(policy), nullcontext

        for step in run.steps():
            batches = run.batches(step)

            with run.time("reference"), torch.no_grad(), reference_weights():
                ref_logprobs = [completion_logprobs(reference, batch) for batch in batches]

            losses, chosen_rewards, rejected_rewards = [], [], []
            with run.time("forward_backward"):
                for batch, ref in zip(batches, ref_logprobs, strict=True):
                    policy_chosen, policy_rejected = completion_logprobs(policy, batch).chunk(2)
                    ref_chosen, ref_rejected = ref.chunk(2)
                    loss, chosen, rejected = dpo_loss(
                        policy_chosen, policy_rejected, ref_chosen, ref_rejected, config.beta
                    )
                    # The mean over all pairs of the step, whatever number of forward passes they are spread over.
                    (loss.sum() / config.examples_per_step).backward()
                    losses.append(loss.detach())
                    chosen_rewards.append(chosen)
                    rejected_rewards.append(rejected)

            with run.time("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

            chosen, rejected = torch.cat(chosen_rewards), torch.cat(rejected_rewards)
            run.log(
                step,
                n_tokens=sum(batch.n_tokens for batch in batches),
                loss=torch.cat(losses).mean(),
                rewards_chosen=chosen.mean(),
                rewards_rejected=rejected.mean(),
                margin=(chosen - rejected).mean(),
                accuracy=(chosen > rejected).float().mean(),
            )
        return run.finish()
