"""One mode of the end-to-end benchmark, in a process of its own.

    python -m sparse_opt.bench.training.baseline.run JOB RESULT

The losses, log-probabilities and rollouts are the trainers'. The step has these sections:

| section | |
|---|---|
| rollout | GRPO: completions by `model.generate`, and their log-probabilities by a forward pass |
| reference | log-probabilities under the initial weights, without gradient |
| forward | log-probabilities under the policy, and the loss |
| backward | gradients; in mode sparse each is gathered and freed at once; in mode tiles only active tiles |
| clip | the global norm of the gradients, and clipping |
| step | the optimizer's update, and freeing the gradients |

On a GPU a section's time is that between two events on its stream, including waiting for the host. A step
does not synchronize with the GPU between its start and its end, except that a rollout waits for its tokens. DPO's
batches are on the device before the first step.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW, set_l2_fetch_granularity
from sparse_opt.errors import SparseOptError
from sparse_opt.trainers.data.encoding import TokenBatch, TokenSequence, collate, load_examples
from sparse_opt.trainers.data.order import ShuffledOrder
from sparse_opt.trainers.dpo import dpo_loss
from sparse_opt.trainers.grpo import group_advantages, grpo_loss
from sparse_opt.trainers.options import TrainingOptions
from sparse_opt.trainers.policy.adapters import add_lora, add_shira
from sparse_opt.trainers.policy.logprobs import completion_logprobs, token_logprobs
from sparse_opt.trainers.policy.models import compile_layers, frozen_copy, load_policy, load_tokenizer
from sparse_opt.trainers.rollouts import GenerateEngine, Sampling, rollout
from sparse_opt.trainers.run.timing import StepTimer

from ...common.harness import job_main

Mode = Literal["dense", "sparse", "tiles", "lora", "shira"]
MAX_GRAD_NORM = 1.0
DPO_BETA, GRPO_BETA = 0.1, 0.04


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one mode trains, and for how long. Paths are strings, so that it goes through JSON."""

    algorithm: Literal["dpo", "grpo"]
    mode: Mode
    model_name: str
    checkpoint: str | None = None
    dataset: str
    subset_size: int | None = None
    mask: str
    sequence_length: int
    n_generations: int = 2
    max_new_tokens: int = 1
    n_steps: int
    batch_size: int
    learning_rate: float
    lora_rank: int = 1
    shira_rank: int | None = None  # required by mode shira
    gradient_checkpointing: bool = False
    compile: bool = False  # the model's layers, with torch.compile
    l2_fetch_granularity: int | None = None  # bytes; None leaves the device's default
    kernel_time: bool = False
    device: str
    seed: int

    def options(self) -> TrainingOptions:
        """As the trainers' options, for what loads models and data."""
        return TrainingOptions(
            policy_name=self.model_name,
            checkpoint=None if self.checkpoint is None else Path(self.checkpoint),
            dataset=self.dataset,
            gradient_checkpointing=self.gradient_checkpointing,
        )


@dataclass
class Trained:
    """The policy with the reference, clipping and optimizer of its mode."""

    policy: nn.Module
    reference: nn.Module
    reference_weights: Callable[[], AbstractContextManager[Any]]  # the reference's weights are in `reference` inside
    clip: Callable[[], Tensor]  # returns the norm
    optimizer: torch.optim.Optimizer
    n_tiled: int  # parameters whose weight gradients are computed by tiles
    parts: Callable[[], dict[str, int]]  # bytes held between steps, by what they are for

    @property
    def n_trained(self) -> int:
        """Values that the optimizer may change: weights, or those of adapters."""
        if isinstance(self.optimizer, SparseAdamW):
            return self.optimizer.mask.nnz
        return sum(parameter.numel() for parameter in self.policy.parameters() if parameter.requires_grad)


def prepare(job: Job, policy: nn.Module) -> Trained:
    """The policy under the job's mode: each in the leanest form that its users have.

    - dense: bf16 weights and moments, fused AdamW, clipping by torch's foreach functions, and a frozen second model.
    - sparse: SparseAdamW with fp32 moments and compact gradients in bf16. There is one backward pass a step and the
      dense gradients are bf16 themselves, so nothing is rounded by it. The reference is `base_weights()`.
    - tiles: the same under a mask of whole tiles, of which the optimizer computes the active ones alone.
    - lora: bf16 adapters of the stated rank, fused AdamW on them, the adapters off for the reference.
    - shira: the same with peft's SHiRA, whose bf16 values are at random positions of the weights.

    No mode has fp32 master weights.
    """
    if job.mode in ("sparse", "tiles"):
        mask = MaskSet.load(job.mask, policy)
        sparse = SparseAdamW(policy, mask, lr=job.learning_rate, grad_dtype=torch.bfloat16)
        return Trained(
            policy,
            policy,
            sparse.base_weights,
            lambda: sparse.clip_grad_norm_(MAX_GRAD_NORM),
            sparse,
            len(sparse.tiled_parameters),
            lambda: {"weights": _nbytes(policy.parameters()), **sparse.nbytes()},
        )
    reference, reference_weights = policy, None
    if job.mode == "lora":
        torch.manual_seed(job.seed)
        reference_weights = add_lora(policy, job.lora_rank).disable_adapter
    elif job.mode == "shira":
        assert job.shira_rank is not None
        reference_weights = add_shira(policy, job.shira_rank, job.seed).disable_adapter
    else:
        reference = frozen_copy(policy)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=job.learning_rate, fused=True)

    def parts() -> dict[str, int]:
        moments = [value for state in adamw.state.values() for key, value in state.items() if key != "step"]
        return {
            "weights": _nbytes(policy.parameters()),
            "reference": 0 if reference is policy else _nbytes(reference.parameters()),
            "indices": _nbytes(_shira_indices(policy)),
            "state": _nbytes(moments),
            "grad": _nbytes(trained),  # a gradient has its weight's dtype
        }

    return Trained(
        policy,
        reference,
        reference_weights or nullcontext,
        lambda: nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM, foreach=True),
        adamw,
        0,
        parts,
    )


def _shira_indices(model: nn.Module) -> list[Tensor]:
    """The row and column of each of SHiRA's values, which peft keeps next to the parameters; none without SHiRA."""
    return [indices for module in model.modules() for indices in getattr(module, "shira_indices", {}).values()]


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Sections:
    """Seconds of each section of a step, on the device and on the host that launches it."""

    def __init__(self, device: torch.device):
        self._timer = StepTimer(device)
        self._host: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._timer.section(name):
            yield
        self._host[name] = self._host.get(name, 0.0) + time.perf_counter() - began

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """(on the device, on the host) since the last read; the device's work must have been waited for."""
        host, self._host = self._host, {}
        return self._timer.read(), host


Step = Callable[[int], dict[str, Tensor]]  # number of the step, from 0 -> device scalars


def dpo_step(trained: Trained, batches: Sequence[TokenBatch], section: Sections) -> Step:
    """A step of DPO on a batch of pairs, the chosen completions before the rejected."""

    def step(i: int) -> dict[str, Tensor]:
        batch = batches[i]
        with section("reference"), torch.no_grad(), trained.reference_weights():
            ref = completion_logprobs(trained.reference, batch)
        with section("forward"):
            chosen, rejected = completion_logprobs(trained.policy, batch).chunk(2)
            ref_chosen, ref_rejected = ref.chunk(2)
            losses, *_ = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, DPO_BETA)
            loss = losses.mean()
        return {"loss": loss.detach(), **_update(trained, loss, section)}

    return step


def grpo_step(
    job: Job, trained: Trained, prompts: Sequence[list[list[int]]], pad_id: int, eos_id: int, section: Sections
) -> Step:
    """A step of GRPO: a group of completions of fixed length for each prompt, one update on them."""
    engine = GenerateEngine(trained.policy, pad_id=pad_id, eos_ids=[eos_id])
    sampling = Sampling(max_new_tokens=job.max_new_tokens, min_new_tokens=job.max_new_tokens)

    def step(i: int) -> dict[str, Tensor]:
        torch.manual_seed(job.seed + i)
        with section("rollout"):
            sampled = rollout(
                engine, trained.policy, prompts[i], n_generations=job.n_generations, sampling=sampling, pad_id=pad_id
            )
            advantages = group_advantages(even_share(sampled.batch), job.n_generations)
        with section("reference"), torch.no_grad(), trained.reference_weights():
            ref = token_logprobs(trained.reference, sampled.batch)
        with section("forward"):
            logprobs = token_logprobs(trained.policy, sampled.batch)
            loss, ratio, k3 = grpo_loss(
                logprobs, sampled.logprobs, advantages, sampled.mask, ref_logprobs=ref, beta=GRPO_BETA
            )
            assert k3 is not None
        return {
            "loss": loss.detach(),
            "ratio_error": (ratio - 1).abs().max(),
            "k3": k3.max(),
            **_update(trained, loss, section),
        }

    return step


def even_share(batch: TokenBatch) -> Tensor:
    """The reward: what share of a completion's tokens have an even id, [R] fp32. The same tokens, the same reward."""
    even = (batch.input_ids % 2 == 0) & batch.completion_mask
    return even.sum(dim=1) / batch.completion_mask.sum(dim=1)


def _update(trained: Trained, loss: Tensor, section: Sections) -> dict[str, Tensor]:
    with section("backward"):
        loss.backward()
    with section("clip"):
        norm = trained.clip()
    with section("step"):
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": norm.detach()}


def run(job: Job) -> dict[str, Any]:
    """Train for `n_steps` and return what was measured, step by step."""
    device = torch.device(job.device)
    if job.l2_fetch_granularity is not None:
        set_l2_fetch_granularity(job.l2_fetch_granularity, device)
    options = job.options()
    tokenizer = load_tokenizer(options)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if job.algorithm == "grpo" and tokenizer.eos_token_id is None:
        raise SparseOptError(f"the tokenizer of {job.model_name} has no EOS token, which a rollout needs")
    examples, _ = load_examples(
        "preference" if job.algorithm == "dpo" else "demonstration",
        job.dataset,
        options.dataset_split,
        tokenizer,
        max_length=job.sequence_length,
        subset_size=job.subset_size,
        seed=job.seed,
    )
    order = ShuffledOrder(len(examples), job.seed)
    chosen = [[examples[k] for k in order.take(i * job.batch_size, job.batch_size)] for i in range(job.n_steps)]
    trained = prepare(job, load_policy(options, device))
    if job.compile:
        for model in {id(m): m for m in (trained.policy, trained.reference)}.values():
            compile_layers(model)
    section = Sections(device)
    if job.algorithm == "dpo":
        pairs = [[sequence for column in zip(*rows, strict=True) for sequence in column] for rows in chosen]
        data: Any = [[sequence.ids for sequence in sequences] for sequences in pairs]
        step = dpo_step(trained, [collate(sequences, pad_id).to(device) for sequences in pairs], section)
    else:
        longest = job.sequence_length - job.max_new_tokens
        data = [[_prompt(row[0], longest) for row in rows] for rows in chosen]
        step = grpo_step(job, trained, data, pad_id, tokenizer.eos_token_id, section)

    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps = []
    for i in range(job.n_steps):
        synchronize()
        began = time.perf_counter()
        metrics = step(i)
        launched = time.perf_counter()
        synchronize()
        ended = time.perf_counter()
        on_device, on_host = section.read()
        steps.append(
            {
                **{name: _finite(value.item(), name, i) for name, value in metrics.items()},
                "step_s": ended - began,
                "host_s": launched - began,
                "section_s": on_device,
                "section_host_s": on_host,
            }
        )
    on_gpu = device.type == "cuda"
    return {
        "mode": job.mode,
        "n_trained": trained.n_trained,
        "n_tiled": trained.n_tiled,
        "data_digest": xxhash.xxh3_128_hexdigest(json.dumps(data).encode()),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "bytes": trained.parts(),
        "kernel_s": _kernel_seconds(lambda: step(job.n_steps - 1)) if job.kernel_time else None,
        "steps": steps,
    }


def _prompt(sequence: TokenSequence, longest: int) -> list[int]:
    """The prompt's end, where it is too long."""
    return sequence.ids[: sequence.prompt_length][-longest:]


def _finite(value: float, name: str, step: int) -> float:
    if not math.isfinite(value):
        raise SparseOptError(f"step {step + 1}: {name} is {value}")
    return value


def _kernel_seconds(step: Callable[[], object]) -> float:
    """Time that a step's kernels and copies take on the GPU, without the gaps between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    if not spans:
        raise SparseOptError("the profiler saw no kernel; run without --kernel_time")
    return covered(spans) / 1e6  # they are in microseconds


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of (start, end) intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that a JSON file describes and write the measurements to another."""
    return job_main(lambda job: run(Job(**job)), argv)


if __name__ == "__main__":
    sys.exit(main())
