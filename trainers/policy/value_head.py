"""The critic of PPO: one linear layer on the policy's last hidden states, with an optimizer of its own.

Policy and critic share all layers below the heads, as in TRL 0.8.6's AutoModelForCausalLMWithValueHead: the value loss
also trains the policy's weights (in mode sparse only those in the mask). The head is fp32 and dense in every mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparse_opt.files import write_safetensors

from ..data.encoding import TokenBatch
from .dense.adamw import DenseAdamW
from .logprobs import token_logprobs_and_states
from .optimizers import make_scheduler

if TYPE_CHECKING:
    from ..options import TrainingOptions

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """[..., H] hidden states of any floating-point dtype -> [...] values, fp32.

    Uses torch's default initialisation, which is generated on the CPU from `seed` alone, and no dropout.
    """

    def __init__(self, hidden_size: int, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.summary = nn.Linear(hidden_size, 1, device="cpu", dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """One value for each state."""
        values: Tensor = self.summary(hidden.float()).squeeze(-1)
        return values

    @classmethod
    def of(cls, model: Any, seed: int) -> ValueHead:
        """A head for the inputs of the model's output layer, on the model's device."""
        output = model.get_output_embeddings()
        return cls(output.weight.shape[1], seed).to(output.weight.device)


def logprobs_and_values(
    model: nn.Module, head: ValueHead, batch: TokenBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the value of the state that each token was chosen in: both [B, T - first_trained] fp32.

    One forward pass gives both. Both are 0 at tokens that are not trained.
    """
    logprobs, states = token_logprobs_and_states(model, batch, temperature)
    values = head(states)
    return logprobs, torch.where(batch.completion_mask[:, batch.first_trained :], values, 0.0)


class ValueHeadTrainer:
    """A value head, its AdamW and its learning rate, which follows the run's schedule.

    Args:
        learning_rate: peak learning rate of the head.
    """

    def __init__(self, head: ValueHead, config: TrainingOptions, learning_rate: float):
        self.head = head
        self.optimizer = DenseAdamW(
            head.parameters(),
            lr=learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
        self.scheduler = make_scheduler(config, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The state saved in a checkpoint."""
        return {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict()`, bit for bit."""
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def save(self, folder: Path) -> Path:
        """Write `value_head.safetensors`, fp32, with the tensor names of TRL 0.8.6."""
        path = folder / VALUE_HEAD_FILE
        tensors = {f"v_head.{name}": tensor.cpu().contiguous() for name, tensor in self.head.state_dict().items()}
        write_safetensors(path, tensors, {"format": "pt"})
        return path
