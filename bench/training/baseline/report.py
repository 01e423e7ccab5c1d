"""Report of the end-to-end benchmark: medians of a run's steps, checks of the results, and tables."""

from __future__ import annotations

import math
import statistics
from typing import Any

from sparse_opt.tables import table

from ...common.report import machine_name
from ...common.timing import percentiles
from .modes import shared_name

# The first step's policy is its reference: DPO's loss is ln 2 whatever the weights, and GRPO's policy is the one that
# sampled, so ratios are 1 and the divergence is 0. The tolerance covers kernels that differ between a forward pass
# with and without gradients: beta = 0.1 times the rounding of sums of some hundred log-probabilities.
FIRST_LOSS_ATOL = 1e-3
FIRST_RATIO_ATOL = 1e-3
# Compiled, the two passes are fused differently and round their bf16 values at different places: 0.012 on an H200.
COMPILED_LOSS_ATOL = 0.05
# Shared prompts round differently: errors of a bf16 norm, 2^-8 each, and of the gradients it is taken of.
SHARED_NORM_RTOL = 0.02
# A section whose launches take this share of the time between its events was waiting for them.
HOST_BOUND = 0.9
_AT_PEAK = "activations and scratch at the peak"


def summary(result: dict[str, Any], n_warmup: int) -> dict[str, Any]:
    """Statistics of a run: medians over the steps after warm-up, and the steps themselves.

    step_s is the wall time of a step, host_s of that the time until the host had launched it, cpu_s its CPU time, kept
    where there is no GPU, section_s and section_host_s the sections' on the device and on the host, sections_s a step's
    sum of the former. Steps that are CUDA graphs have no sections.
    """
    timed = result["steps"][n_warmup:]
    sections = list(timed[0]["section_s"])
    device = {name: statistics.median(step["section_s"][name] for step in timed) for name in sections}
    host = {name: statistics.median(step["section_host_s"][name] for step in timed) for name in sections}
    p20, median, p80 = percentiles([step["step_s"] for step in timed])
    row = {
        **{key: value for key, value in result.items() if key not in ("job", "steps")},
        "first": {key: value for key, value in result["steps"][0].items() if isinstance(value, float)},
        "step_s": median,
        "p20_s": p20,
        "p80_s": p80,
        "host_s": statistics.median(step["host_s"] for step in timed),
        "sections_s": statistics.median(sum(step["section_s"].values()) for step in timed),
        "section_s": device,
        "section_host_s": host,
        "n_timed": len(timed),
        "steps": result["steps"],
    }
    if row["peak_memory_bytes"] is None:
        row["cpu_s"] = statistics.median(step["cpu_s"] for step in timed)
    else:
        parts = [(device[name], host[name]) for name in sections]
        parts = parts or [(median, row["host_s"])]  # a graph has no sections
        waiting = sum(on_device for on_device, on_host in parts if on_host >= HOST_BOUND * on_device)
        row["host_bound_share"] = waiting / sum(on_device for on_device, _ in parts)
        row["limit"] = "host" if row["host_bound_share"] > 0.5 else "GPU"
    return row


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The ratios of each other mode to dense: step, cpu_time, peak_memory and kernels, if both modes have them."""
    by_mode = {row["mode"]: row for row in rows}
    if "dense" not in by_mode:
        return {}
    dense = by_mode.pop("dense")
    return {mode: _ratio(row, dense) for mode, row in by_mode.items()}


def shared_ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The same ratios of each mode with shared prompts to the mode with separate rows."""
    return {separate["mode"]: _ratio(shared, separate) for separate, shared in _with_shared_prompts(rows)}


def _with_shared_prompts(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(with separate rows, with shared prompts) of each mode that was measured with both."""
    by_mode = {row["mode"]: row for row in rows}
    return [(row, by_mode[shared_name(mode)]) for mode, row in by_mode.items() if shared_name(mode) in by_mode]


def _ratio(row: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    found, expected = _compared(row), _compared(base)
    return {key: value / expected[key] for key, value in found.items() if key in expected}


def _compared(row: dict[str, Any]) -> dict[str, float]:
    found = {
        "step": row["step_s"],
        "cpu_time": row.get("cpu_s"),
        "peak_memory": row["peak_memory_bytes"],
        "kernels": row["kernel_s"],
    }
    return {key: value for key, value in found.items() if value is not None}


def _slope(loss: float) -> float:
    """The factor of a DPO gradient that depends on the loss: sigmoid(-beta h) of a pair's loss -log sigmoid(beta h).

    Of a batch's mean loss it is an approximation. 1 for a loss that no pair can have.
    """
    return -math.expm1(-loss) if loss > 0 else 1.0


def wrong_results(algorithm: str, rows: list[dict[str, Any]], *, compiled: bool = False) -> list[str]:
    """The errors in the results, a line each. The first step has a known loss, which shows that the modes train."""
    wrong = []
    loss_atol = COMPILED_LOSS_ATOL if compiled else FIRST_LOSS_ATOL
    for row in rows:
        mode, first = row["mode"], row["first"]
        if algorithm == "dpo" and not abs(first["loss"] - math.log(2)) <= loss_atol:
            wrong.append(f"mode {mode} begins at a DPO loss of {first['loss']}, expected ln 2 = {math.log(2):.6f}")
        if algorithm == "grpo" and not first["ratio_error"] <= FIRST_RATIO_ATOL:
            wrong.append(f"mode {mode} begins with ratios off by {first['ratio_error']}, expected 1: policy = sampler")
        if algorithm == "grpo" and not first["k3"] <= FIRST_RATIO_ATOL:
            wrong.append(f"mode {mode} begins at a divergence of {first['k3']}, expected 0: policy = reference")
        if mode in ("tiles", shared_name("tiles")) and not row["n_tiled"]:
            wrong.append(
                f"mode {mode} computes no weight gradient by tiles: its optimizer's tiled_parameters are empty"
            )
        still = [i + 1 for i, step in enumerate(row["steps"]) if not step["grad_norm"] > 0]
        if algorithm == "dpo" and still:
            wrong.append(f"mode {mode} has a gradient norm of 0 in step {still[0]}, expected more than 0")
        if algorithm == "grpo" and len(still) == len(row["steps"]):  # a group may have equal rewards
            wrong.append(f"mode {mode} has a gradient norm of 0 in every step, expected more than 0 in one")
    for separate, shared in _with_shared_prompts(rows):
        found, expected = shared["first"]["grad_norm"], separate["first"]["grad_norm"]
        if algorithm == "dpo":
            expected *= _slope(shared["first"]["loss"]) / _slope(separate["first"]["loss"])
        if not math.isclose(found, expected, rel_tol=SHARED_NORM_RTOL):
            wrong.append(f"mode {shared['mode']} begins with a gradient norm of {found}, expected {expected}")
    digests = {row["mode"]: row["data_digest"] for row in rows}
    if len(set(digests.values())) > 1:
        wrong.append(f"the modes trained on different data, with digests {digests}")
    return wrong


def cells(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headers, a row of each mode) of the table of times and peaks. The report has rows."""
    rows = report["rows"]
    on_gpu, profiled = rows[0]["peak_memory_bytes"] is not None, rows[0]["kernel_s"] is not None
    headers = [
        f"{report['algorithm'].upper()}, ms",
        *rows[0]["section_s"],
        "whole step",
        "p20 - p80",
        "launched" if on_gpu else "CPU time",
        *(["kernels"] if profiled else []),
        *(["peak GiB", "reserved", "limit"] if on_gpu else []),
    ]
    return headers, [
        [
            row["mode"],
            *(f"{1e3 * seconds:.1f}" for seconds in (*row["section_s"].values(), row["step_s"])),
            f"{1e3 * row['p20_s']:.1f} - {1e3 * row['p80_s']:.1f}",
            f"{1e3 * row['host_s' if on_gpu else 'cpu_s']:.1f}",
            *([f"{1e3 * row['kernel_s']:.1f}"] if profiled else []),
            *([_gib(row["peak_memory_bytes"]), _gib(row["peak_reserved_bytes"]), row["limit"]] if on_gpu else []),
        ]
        for row in rows
    ]


def held_cells(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headers, a row of each mode) of the table of what is trained and what memory holds. The report has rows.

    Bytes between steps, by what they are for, where any mode has them; on a GPU also the rest of the peak.
    """
    rows = report["rows"]
    held = [{name: nbytes for name, nbytes in row["bytes"].items() if nbytes} for row in rows]
    if rows[0]["peak_memory_bytes"] is not None:
        for row, parts in zip(rows, held, strict=True):
            parts[_AT_PEAK] = row["peak_memory_bytes"] - sum(parts.values())
    names = sorted({name: None for parts in held for name in parts}, key=lambda name: name == _AT_PEAK)
    unit, size = ("GiB", 2**30) if max(sum(parts.values()) for parts in held) >= 2**30 else ("MiB", 2**20)
    headers = [f"held, {unit}", *names, "values trained"]
    return headers, [
        [
            row["mode"],
            *(f"{parts[name] / size:.2f}" if name in parts else "-" for name in names),
            _count(row["n_trained"]),
        ]
        for row, parts in zip(rows, held, strict=True)
    ]


def text(report: dict[str, Any]) -> str:
    """The report for a terminal: times, then what is trained and held, then what the other modes take of dense."""
    lines, rows = [heading(report)], report["rows"]
    if not rows:
        return lines[0]
    lines += [table(*cells(report)), "", table(*held_cells(report)), "", *ratio_lines(report)]
    if rows[0]["peak_memory_bytes"] is not None:
        lines.append(
            "launched: until the host had launched the step; limit: host where most of the step's time passes in "
            f"sections that take the host {HOST_BOUND:.0%} of their time to launch"
        )
    return "\n".join(lines)


def ratio_lines(report: dict[str, Any]) -> list[str]:
    """One line for each ratio: of every other mode to dense, and of every mode with shared prompts to the same mode
    with separate rows."""
    compared = {f"{mode}/dense": found for mode, found in report["ratios"].items()}
    compared |= {
        f"{mode}, shared prompts/separate rows": found for mode, found in report.get("shared_ratios", {}).items()
    }
    return [
        f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value:.2f}" for key, value in found.items())
        for name, found in compared.items()
    ]


def heading(report: dict[str, Any]) -> str:
    """What was trained on what, in one line."""
    settings = report["settings"]
    if report["algorithm"] == "dpo":
        work = f"{settings['batch_size']} pair(s) of at most {settings['sequence_length']} tokens a step"
        if settings.get("prompt_share") is not None:
            work += f", prompts of {settings['prompt_share']:.0%}"
    else:
        work = (
            f"{settings['batch_size']} prompt(s) a step, {settings['n_generations']} completions each of "
            f"{settings['max_new_tokens']} tokens, at most {settings['sequence_length']} with the prompt"
        )
    notes = ", activations checkpointed" if settings["gradient_checkpointing"] else ""
    notes += ", layers compiled" if settings.get("compile") else ""
    notes += ", CUDA graphs" if settings.get("cuda_graphs") else ""
    if settings.get("steps_in_a_row", 1) > 1:
        notes += f", {settings['steps_in_a_row']} steps in a row"
    notes += ", precomputed reference" if settings.get("precomputed_reference") else ""
    if settings.get("l2_fetch_granularity") is not None:
        notes += f", {settings['l2_fetch_granularity']}-byte fetches"
    mask = report["mask"]
    share = "" if mask is None or "sparse" not in settings["modes"] else _share(report, mask, "sparse")
    if "tiles" in settings["modes"]:
        share += _share(report, report["tile_mask"], "tiles")
    for choice in ("include", "exclude"):
        if settings.get(choice):
            share += f", random masks {choice} {' '.join(settings[choice])}"
    share += ", random masks of feed-forward blocks alone" if settings.get("mlp_only") else ""
    rank = f", LoRA of rank {settings['lora_rank']}" if "lora" in settings["modes"] else ""
    rank += f", SHiRA of rank {settings['shira_rank']}" if "shira" in settings["modes"] else ""
    return f"{_count(report['numel'])} bf16 weights{share}{rank}; {work}{notes}; {machine_name(report)}"


def _share(report: dict[str, Any], mask: dict[str, Any], mode: str) -> str:
    pattern = mask.get("pattern", "element")
    units = "" if pattern == "element" else f" in {pattern}"
    n_tiled = sum(row.get("n_tiled", 0) for row in report["rows"] if row["mode"] == mode)
    tiled = f" ({n_tiled} weight gradients by tiles)" if n_tiled else ""
    return f", {mask['nnz'] / report['numel']:.2%} active{units} in mode {mode}{tiled}"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n:,}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f}"
