"""The rows of a mode that was measured, and the checks of what the modes have computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...rows import Case, Row
from .delta_log import logging_rows
from .modes import DPO_BETA, Job, shared_name

SUITE, MEMORY = "baseline", "baseline, memory"
# The first step's policy is its reference: DPO's loss is ln 2 whatever the weights, and GRPO's policy is the one that
# sampled, so ratios are 1 and the divergence is 0. The tolerance covers kernels that differ between a forward pass
# with and without gradients: beta = 0.1 times the rounding of sums of some hundred log-probabilities.
FIRST_LOSS_ATOL = 1e-3
FIRST_RATIO_ATOL = 1e-3
# The same with more layers or experts, or longer sequences.
LARGE_LOSS_ATOL = 0.01
# Compiled, the two passes are fused differently and round their bf16 values at different places: 0.012 on an H200.
COMPILED_LOSS_ATOL = 0.05
# Of a larger model: on the 32B shape the log-probability of a token then differs by 0.067 (the root of the mean square;
# docs/dev/notebook.md). For the sums over n tokens of two sequences, times the beta of DPO, that is
# 0.1 * 0.067 * sqrt(2 n), and half of it in the loss; twice this is allowed.
COMPILED_TOKEN_RMS = 0.067
# TRL sums the bf16 log-probabilities of the two passes in an order of its own.
TRL_LOSS_ATOL = 0.02
# Shared prompts round differently: errors of a bf16 norm, 2^-8 each, and of the gradients it is taken of. DPO's are
# proportional to the sigmoid of minus the margin, which differs by a tenth where compiled losses differ by 0.05.
SHARED_NORM_RTOL = 0.15
# Keys of the cases of single modes, which other modes do not have.
OF_A_MODE = ("pattern", "density", "experts", "lean", "lora_rank", "shira_rank", "galore_rank")


def result_rows(result: Mapping[str, Any], case: Case, n_warmup: int) -> list[Row]:
    """The rows of a mode: medians over the steps after the warm-up, and memory, or a lower bound of it.

    A step's time is its wall time. Sections are timed on the device; steps that are CUDA graphs have none. `launched`
    is the time until the host had launched the step. CPU time is kept where there is no GPU. `new projections` is what
    GaLore's first step takes longer than the others, as it does again every 200 steps, which the medians do not show.

    Args:
        case: of the mode.
    """
    if not result["fits"]:
        needed = result["needs_more_than_bytes"]
        return [Row(suite=SUITE, case=case, metric="does not fit: more than", unit="bytes", value=needed)]
    if "samples" in result:
        return logging_rows(result, case)
    timed = result["steps"][n_warmup:]
    on_gpu = result["peak_memory_bytes"] is not None
    dense: Case = {"mode": "dense", "share_prompts": None, **dict.fromkeys(OF_A_MODE)}
    peers: dict[str, float | Case] = {} if case["mode"] == "dense" else {"dense": dense}
    if case.get("share_prompts"):
        peers = peers | {"separate rows": {"share_prompts": None}}
    sections = {name: statistics.median(step["section_s"][name] for step in timed) for name in timed[0]["section_s"]}

    def time(metric: str, seconds: float, **others: Any) -> Row:
        return Row(suite=SUITE, case=case, metric=metric, unit="ms", value=1e3 * seconds, n=len(timed), **others)

    whole = [1e3 * step["step_s"] for step in timed]
    rows = [Row.of_samples(whole, suite=SUITE, case=case, metric="whole step", unit="ms", peers=peers)]
    attention: dict[str, float | Case] = {"without experts": {"mode": "attention", "experts": None}}
    of_section = {"backward": attention} if case["mode"] == "experts" else {}
    rows += [time(name, seconds, peers=of_section.get(name, {})) for name, seconds in sections.items()]
    if case["mode"] == "galore":
        longer = result["steps"][0]["section_s"]["step"] - sections["step"]
        rows.append(Row(suite=SUITE, case=case, metric="new projections", unit="ms", value=1e3 * longer))
    if on_gpu:
        rows.append(time("launched", statistics.median(step["host_s"] for step in timed)))
    else:
        rows.append(time("CPU time", statistics.median(step["cpu_s"] for step in timed), peers=peers))
    of_section[""] = peers
    for name, seconds in (result.get("kernel_s") or {}).items():
        metric = f"kernels, {name}" if name else "kernels"
        rows.append(
            Row(suite=SUITE, case=case, metric=metric, unit="ms", value=1e3 * seconds, peers=of_section.get(name, {}))
        )
    for metric, key in (("peak memory", "peak_memory"), ("reserved memory", "peak_reserved"), ("build peak",) * 2):
        value = result.get(f"{key.replace(' ', '_')}_bytes")
        if value is not None:
            of_peak = peers if metric == "peak memory" else {}
            rows.append(Row(suite=SUITE, case=case, metric=metric, unit="bytes", value=value, peers=of_peak))
    return rows + memory_rows(result, case)


def memory_rows(result: Mapping[str, Any], case: Case) -> list[Row]:
    """Bytes held between steps, by what they are for; on a GPU also the rest of the peak; and what is trained."""
    held = {name: nbytes for name, nbytes in result["bytes"].items() if nbytes}
    if held and result["peak_memory_bytes"] is not None:  # in TRL's trainer they are not known
        held["activations and scratch"] = result["peak_memory_bytes"] - sum(held.values())
    rows = [Row(suite=MEMORY, case=case, metric=name, unit="bytes", value=n) for name, n in held.items()]
    counts = {"values trained": result["n_trained"], "gradients by tiles": result.get("n_tiled")}
    return rows + [Row(suite=MEMORY, case=case, metric=name, unit="", value=n) for name, n in counts.items() if n]


def first_loss_atol(job: Job) -> float:
    """How far the loss of DPO's first step may be from ln 2."""
    if job.algorithm == "trl":
        return TRL_LOSS_ATOL
    large = job.shape not in ("3b", "tiny") or job.sequence_length > 512
    if job.compile:
        return DPO_BETA * COMPILED_TOKEN_RMS * math.sqrt(2 * job.sequence_length) if large else COMPILED_LOSS_ATOL
    return LARGE_LOSS_ATOL if large else FIRST_LOSS_ATOL


def wrong_results(
    algorithm: str, results: Sequence[Mapping[str, Any]], loss_atol: float = FIRST_LOSS_ATOL
) -> list[str]:
    """The errors in the results, a line each. The first step has a known loss, which shows that the modes train."""
    wrong, results = [], [result for result in results if result["fits"]]
    for result in results:
        mode, first = result["mode"], result["steps"][0]
        if algorithm != "grpo" and not abs(first["loss"] - math.log(2)) <= loss_atol:
            wrong.append(f"mode {mode} begins at a DPO loss of {first['loss']}, expected ln 2 = {math.log(2):.6f}")
        if algorithm == "grpo" and not first["ratio_error"] <= FIRST_RATIO_ATOL:
            wrong.append(f"mode {mode} begins with ratios off by {first['ratio_error']}, expected 1: policy = sampler")
        if algorithm == "grpo" and not first["k3"] <= FIRST_RATIO_ATOL:
            wrong.append(f"mode {mode} begins at a divergence of {first['k3']}, expected 0: policy = reference")
        if mode.partition(",")[0] in ("tiles", "attention", "experts") and not result["n_tiled"]:
            wrong.append(
                f"mode {mode} computes no weight gradient by tiles: its optimizer's tiled_parameters are empty"
            )
        still = [i + 1 for i, step in enumerate(result["steps"]) if not step["grad_norm"] > 0]
        if algorithm != "grpo" and still:
            wrong.append(f"mode {mode} has a gradient norm of 0 in step {still[0]}, expected more than 0")
        if algorithm == "grpo" and len(still) == len(result["steps"]):  # a group may have equal rewards
            wrong.append(f"mode {mode} has a gradient norm of 0 in every step, expected more than 0 in one")
    by_mode = {result["mode"]: result for result in results}
    for mode, separate in by_mode.items():
        shared = by_mode.get(shared_name(mode))
        if shared is None:
            continue
        found, expected = shared["steps"][0]["grad_norm"], separate["steps"][0]["grad_norm"]
        if not math.isclose(found, expected, rel_tol=SHARED_NORM_RTOL):
            wrong.append(f"mode {shared['mode']} begins with a gradient norm of {found}, expected {expected}")
    digests = {result["mode"]: result["data_digest"] for result in results}
    if len(set(digests.values())) > 1:
        wrong.append(f"the modes trained on different data, with digests {digests}")
    return wrong
