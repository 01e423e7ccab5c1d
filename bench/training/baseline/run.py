"""One mode of the end-to-end benchmark, in a process of its own.

The step is that of `trainers/dpo.py` or `trainers/grpo.py`. It has these sections:

| section | |
|---|---|
| rollout | GRPO: completions by `model.generate`, and their log-probabilities by a forward pass |
| reference | log-probabilities under the initial weights, without gradient; none if they are precomputed |
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
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import SparseOptError
from sparse_opt.trainers.batches import TokenBatch, chunks, collate_examples, load_examples, load_prompts, shuffled
from sparse_opt.trainers.console import StepTimer
from sparse_opt.trainers.dpo import dpo_step, reference_logprobs
from sparse_opt.trainers.graphs import GraphedSteps, require_graphs
from sparse_opt.trainers.grpo import group_advantages, grpo_step
from sparse_opt.trainers.grpo import reference_logprobs as rollout_reference
from sparse_opt.trainers.modes import Section, Trained, untimed
from sparse_opt.trainers.pretrained import load_tokenizer_from
from sparse_opt.trainers.sampling import Sampling, rollout
from sparse_opt.trainers.shared_prompts import check_shared_prompts, collate_shared_prompts

from ...harness import job_main, limit_memory
from ...models import word_tokenizer
from .delta_log import measure_logging
from .modes import DPO_BETA, SPARSE_MODES, Job, held_bytes, least_bytes, make_policy, n_tiled, n_trained, prepare

GRPO_BETA = 0.04
_SECTION = "section "  # before the name of a section in a profile

Step = Callable[[int], dict[str, Tensor]]  # number of the step, from 0 -> device scalars


def dpo_steps(
    trained: Trained,
    batches: Sequence[TokenBatch],
    section: Section = untimed,
    references: Sequence[Tensor] | None = None,
) -> Step:
    """Steps of DPO, each on a batch of pairs.

    Args:
        references: `reference_logprobs` of the batches, computed in advance; None: each step computes its own.
    """

    def step(i: int) -> dict[str, Tensor]:
        known = None if references is None else [references[i]]
        return _scalars(dpo_step(trained, [batches[i]], known, section, beta=DPO_BETA))

    return step


def graphed(trained: Trained, batches: Sequence[TokenBatch], references: Sequence[Tensor] | None = None) -> Step:
    """`dpo_steps` as a CUDA graph for each shape of the batches: three ordinary steps, a capture, and replays."""

    def whole_step(given: Sequence[TokenBatch], known: Sequence[Tensor]) -> dict[str, Tensor]:
        return _scalars(dpo_step(trained, given, known or None, beta=DPO_BETA))

    call = GraphedSteps(whole_step, trained.optimizer)
    return lambda i: call([batches[i]], [] if references is None else [references[i]])


def _scalars(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if value.ndim == 0}


def grpo_steps(
    job: Job, trained: Trained, prompts: Sequence[list[list[int]]], pad_id: int, eos_id: int, section: Section
) -> Step:
    """Steps of GRPO, each on a group of completions of fixed length for each prompt."""
    sampling = Sampling(max_new_tokens=job.max_new_tokens, min_new_tokens=job.max_new_tokens)

    def step(i: int) -> dict[str, Tensor]:
        torch.manual_seed(job.seed + i)
        with section("rollout"):
            sampled = rollout(
                trained.policy,
                prompts[i],
                sampling,
                n_generations=job.n_generations,
                pad_id=pad_id,
                eos_ids=[eos_id],
                completions_per_row=job.n_generations if job.share_prompts else 1,
            )
            advantages = group_advantages(even_share(sampled.batch), job.n_generations)
        with section("reference"):
            ref = rollout_reference(trained, sampled, sampling.temperature, None)
        return grpo_step(trained, sampled, advantages, ref, section, beta=GRPO_BETA)

    return step


def even_share(batch: TokenBatch) -> Tensor:
    """The reward: what share of a completion's tokens have an even id, [R] fp32. The same tokens, the same reward."""
    even = (batch.input_ids % 2 == 0) & batch.completion_mask
    return even.sum(dim=1) / batch.completion_mask.sum(dim=1)


def run(job: Job) -> dict[str, Any]:
    """Train for `n_steps` and return what was measured, step by step; `fits` is False if memory ran out."""
    device = torch.device(job.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    mask = MaskSet.load(job.mask) if job.mask is not None and job.mode in SPARSE_MODES else None
    least = least_bytes(job, mask)
    if least > limit_memory(device, job.limit_gib):  # it would run out of memory, but later
        return {"mode": job.name, "fits": False, "needs_more_than_bytes": least}
    try:
        return {"mode": job.name, "fits": True, **_measure(job, mask, device)}
    except torch.OutOfMemoryError:
        return {"mode": job.name, "fits": False, "needs_more_than_bytes": max(peak_memory(device) or 0, least)}


def _measure(job: Job, mask: MaskSet | None, device: torch.device) -> dict[str, Any]:
    tokenizer = word_tokenizer() if job.model_name is None else load_tokenizer_from(job.model_name)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if job.algorithm == "grpo" and tokenizer.eos_token_id is None:
        raise SparseOptError(f"the tokenizer of {job.model_name} has no EOS token, which a rollout needs")
    longest = job.sequence_length - job.max_new_tokens
    if job.algorithm == "dpo":
        limit = job.sequence_length
        examples: list[Any] = load_examples(
            "preference", job.dataset, "train", tokenizer, job.subset_size, job.seed, max_length=limit
        )
    else:  # a prompt that is too long loses its beginning
        prompts = load_prompts(job.dataset, "train", tokenizer, max_length=sys.maxsize)
        examples = [prompt.ids[-longest:] for prompt in prompts[: job.subset_size]]
    order = shuffled(len(examples), job.seed, 0, job.n_steps * job.batch_size)
    chosen = [[examples[k] for k in indices] for indices in chunks(order, job.batch_size)]
    trained = prepare(job, make_policy(job, device), mask)
    build_peak = peak_memory(device)
    if job.compile:
        trained.compile()
    timer = StepTimer(device)
    if job.cuda_graphs:
        require_graphs(trained.policy, trained.optimizer, device)
    if job.share_prompts:
        check_shared_prompts(trained.policy)
    if job.algorithm == "dpo":
        data: Any = [[[sequence.ids for sequence in pair] for pair in pairs] for pairs in chosen]
        collate: Callable[..., TokenBatch] = collate_examples
        if job.share_prompts:
            collate = partial(collate_shared_prompts, separate_rows=job.cuda_graphs)
        batches = [collate(pairs, pad_id).to(device) for pairs in chosen]
        references = reference_logprobs(trained, batches) if job.precomputed_reference else None
        make_step: Callable[..., Step] = partial(dpo_steps, trained, batches, references=references)
    else:
        data = chosen
        make_step = partial(grpo_steps, job, trained, data, pad_id, tokenizer.eos_token_id)
    step = graphed(trained, batches, references) if job.cuda_graphs else make_step(section=timer.section)
    profiled = step if job.cuda_graphs else make_step(section=_synchronized)

    digest = xxhash.xxh3_128_hexdigest(json.dumps(data).encode())
    if job.delta_log is not None:
        return {"data_digest": digest, **measure_logging(job, trained, mask, step, device)}
    return {
        "data_digest": digest,
        "build_peak_bytes": build_peak,
        **measure_steps(trained, step, job.n_steps, timer, device),
        "kernel_s": _kernel_seconds(lambda: profiled(job.n_steps - 1)) if job.kernel_time else None,
    }


def peak_memory(device: torch.device) -> int | None:
    """The peak of torch's allocator in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def measure_steps(trained: Trained, step: Step, n_steps: int, timer: StepTimer, device: torch.device) -> dict[str, Any]:
    """Take steps, and return what is trained, the memory held and at most used, and what was measured step by step.

    Of each step: its metrics, and its seconds as a whole, until launched, and by section. cpu_s is the CPU time of all
    threads, which other work on the machine disturbs less.
    """
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    steps = []
    for i in range(n_steps):
        synchronize()
        began, cpu_began = time.perf_counter(), time.process_time()
        metrics = step(i)
        launched = time.perf_counter()
        synchronize()
        ended, cpu_ended = time.perf_counter(), time.process_time()
        steps.append(
            {
                **{name: finite(value.item(), name, i) for name, value in metrics.items()},
                "step_s": ended - began,
                "host_s": launched - began,
                "cpu_s": cpu_ended - cpu_began,
                "section_s": timer.read(),
            }
        )
    return {
        "n_trained": n_trained(trained),
        "n_tiled": n_tiled(trained),
        "peak_memory_bytes": peak_memory(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "bytes": held_bytes(trained),
        "steps": steps,
    }


def finite(value: float, name: str, step: int) -> float:
    if not math.isfinite(value):
        raise SparseOptError(f"step {step + 1}: {name} is {value}")
    return value


def _kernel_seconds(step: Callable[[], object]) -> dict[str, float]:
    """Time that kernels and copies take on the GPU, without the gaps between them: of a step ("") and its sections."""
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels, found = [], {"": (-math.inf, math.inf)}
    for event in profile.events() or ():
        span = event.time_range.start, event.time_range.end
        if event.device_type == on_gpu and not event.is_user_annotation:
            kernels.append(span)
        elif event.device_type != on_gpu and event.name.startswith(_SECTION):
            found[event.name.removeprefix(_SECTION)] = span
    if not kernels:
        raise SparseOptError("the profiler saw no kernel; run without --kernel_time")
    # they are in microseconds
    return {name: covered([k for k in kernels if start <= k[0] < end]) / 1e6 for name, (start, end) in found.items()}


@contextmanager
def _synchronized(name: str) -> Iterator[None]:
    """A section of a profiled step, in which only its own kernels run."""
    torch.cuda.synchronize()
    with torch.profiler.record_function(_SECTION + name):
        yield
        torch.cuda.synchronize()


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of (start, end) intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    sys.exit(job_main(lambda job: run(Job(**job))))
