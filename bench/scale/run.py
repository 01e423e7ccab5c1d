"""One case of `sparse-opt bench scale`, in a process of its own.

    python -m sparse_opt.bench.scale.run JOB RESULT

The step is that of `sparse-opt bench baseline dpo`: the log-probabilities and the loss are the trainers', the logits
are computed in slices, and the reference is the base weights, the model without adapters, or a frozen copy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from sparse_opt import MaskSet
from sparse_opt.trainers.batches import TokenBatch, TokenSequence, collate
from sparse_opt.trainers.dpo import reference_logprobs
from sparse_opt.trainers.models import add_lora, make_masks_skippable
from sparse_opt.trainers.modes import Trained, adapter_training, dense_training, sparse_training

from ..distributed.models import make_model, pair
from ..harness import job_main, limit_memory
from ..training.baseline.modes import held_bytes, n_tiled, n_trained
from ..training.baseline.peers import add_lora_to_quantized, quantize_linear_layers
from ..training.baseline.run import Sections, dpo_steps, take_steps
from .cases import LEAN, Case


def run(case: Case) -> dict[str, Any]:
    """Build the model, take the steps, and return what was measured; `fits` is False if memory ran out."""
    device = torch.device(case.device)
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if case.least_bytes() > limit_memory(device, case.limit_gib):  # it would run out of memory, but later
        return {"fits": False, "needs_more_than_bytes": case.least_bytes()}
    try:
        measured = _measure(case, device)
    except torch.OutOfMemoryError:
        reached = torch.cuda.max_memory_allocated(device) if on_gpu else 0
        return {"fits": False, "needs_more_than_bytes": max(reached, case.least_bytes())}
    return {"fits": True, **measured}


def _measure(case: Case, device: torch.device) -> dict[str, Any]:
    trained = make_training(case, device)
    on_gpu = device.type == "cuda"
    build_peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    vocab = case.config().vocab_size
    batches = [random_pair(case, i, vocab).to(device) for i in range(case.n_steps)]
    references = reference_logprobs(trained, batches) if case.precomputed_reference else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    section = Sections(device)
    steps = take_steps(dpo_steps(trained, batches, section, references), case.n_steps, section, device)
    return {
        "n_trained": n_trained(trained),
        "n_tiled": n_tiled(trained),
        "bytes": held_bytes(trained),
        "build_peak_bytes": build_peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "steps": steps,
    }


def make_training(case: Case, device: torch.device) -> Trained:
    """The model with random weights, made layer by layer on the device, and what trains it."""
    torch.manual_seed(case.seed)
    policy: Any = make_model(
        case.config(),
        device,
        case.seed,
        checkpointing=case.checkpointing,
        compiled=case.compile,
        prepare=quantize_linear_layers if case.base == "nf4" else None,
    )
    make_masks_skippable(policy)
    policy.train()  # transformers checkpoints activations only then
    if case.method == "dense":
        return dense_training(policy, case.learning_rate, copied=not case.precomputed_reference)
    if case.method == "lora":
        add = add_lora_to_quantized if case.base == "nf4" else add_lora
        return adapter_training(add(policy, case.lora_rank), case.learning_rate)
    mask = MaskSet.random(case.masked(), density=case.density, pattern=case.pattern, seed=case.seed)
    options = LEAN
    if case.precomputed_reference:
        options = {**LEAN, "keep_base_weights": False, "offload_base_weights": False}
    return sparse_training(policy, mask, case.learning_rate, **options)


def random_pair(case: Case, index: int, vocab: int) -> TokenBatch:
    """A pair of random sequences of `sequence_length` tokens, an eighth of them the prompt, which both share."""
    chosen, rejected = pair(case.seed + index, case.sequence_length, vocab, torch.device("cpu")).tolist()
    n_prompt = case.sequence_length // 8
    rejected[:n_prompt] = chosen[:n_prompt]
    return collate([TokenSequence(ids, n_prompt) for ids in (chosen, rejected)], pad_id=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the case that a JSON file describes and write the measurements to another."""
    return job_main(lambda job: run(Case(**job)), argv)


if __name__ == "__main__":
    sys.exit(main())
