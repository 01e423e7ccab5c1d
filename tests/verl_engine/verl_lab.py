"""What the tests of the verl engine share: a tiny model, batches as verl's SFT trainer makes them, and engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils
from verl.workers.engine import BaseEngine
from verl.workers.utils.losses import sft_loss

from sparse_opt.bench.verl.world import make_engine

VOCABULARY = 64
BATCH = 8  # sequences in the batch of a step, of all ranks


def model_config(*, tied: bool = False) -> LlamaConfig:
    """A Llama of 140 thousand weights; some matrices have rows that 2 and 3 ranks cannot share equally."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=131,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


def save_model(folder: Path, *, tied: bool = False) -> Path:
    """Write the model of `model_config` with random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(model_config(tied=tied)).save_pretrained(folder)
    return folder


def engine(
    model: Path,
    strategy: str,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    clip_grad: float = 1.0,
    override: dict[str, Any] | None = None,
    engine_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    optimizer_options: dict[str, Any] | None = None,
    contents: Sequence[str] = ("model", "optimizer", "extra"),
) -> BaseEngine:
    """An initialized engine of a saved model, in fp32 and without compilation."""
    return make_engine(
        model,
        strategy,
        engine={
            "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            "use_torch_compile": False,
            "use_no_sync_for_gradient_accumulation": True,
            **(engine_options or {}),
        },
        optimizer={
            "lr": lr,
            "weight_decay": weight_decay,
            "clip_grad": clip_grad,
            "override_optimizer_config": override,
            "total_training_steps": 100,
            **(optimizer_options or {}),
        },
        network={
            "enable_gradient_checkpointing": False,
            "use_remove_padding": False,
            "override_config": {"attn_implementation": "eager"},
            **(model_options or {}),
        },
        saved=contents,
    )


def batch(step: int, rank: int, ranks: int, micro_batch_size: int = 2) -> TensorDict:
    """The rank's part of the batch of a step: sequences of different lengths, in verl's layout without padding."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, 12, (BATCH,), generator=generator).tolist()
    tokens = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]
    own = tokens[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]

    def nested(rows: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tensors = {
        "input_ids": nested(own),
        "position_ids": nested([torch.arange(len(row)) for row in own]),
        "loss_mask": nested([(torch.arange(len(row)) >= 2).long() for row in own]),
    }
    return tensordict_utils.get_tensordict(
        tensor_dict=tensors,
        non_tensor_dict={
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": micro_batch_size,
            "temperature": 1.0,
            "global_batch_size": BATCH,
            "pad_mode": "no_padding",
            "pad_token_id": 0,
            "use_fused_kernels": False,
        },
    )


def loss(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """verl's loss of supervised training."""
    return sft_loss(config=None, model_output=model_output, data=data, dp_group=dp_group)


def train(built: BaseEngine, steps: range, rank: int, ranks: int) -> list[tuple[float, float]]:
    """Train as verl's TrainingWorker does; returns the loss of this rank and the norm of each step."""
    found = []
    with built.train_mode():
        for step in steps:
            output = built.train_batch(batch(step, rank, ranks), loss)
            built.lr_scheduler_step()
            found.append((float(sum(output["loss"])), output["metrics"]["grad_norm"]))
    return found


def weights(built: BaseEngine) -> dict[str, Tensor]:
    """All weights, as verl exports them to a rollout, on the CPU."""
    tensors, _ = built.get_per_tensor_param()
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors}
