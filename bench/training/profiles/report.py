"""Report of `bench profiles`: medians and spread of the repeats, the check of accuracy, targets, and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_opt.tables import table

from ...common.report import machine_name
from ...kernels.table.targets import Verdict
from .run import STAGES

# Profile -> how many times as fast as plain all three stages are, on a GPU and with 100 million weights or more.
SPEED_UPS = {"conservative": 2.0, "balanced": 3.0, "aggressive": 5.0}
TARGETS_ARE_FOR = "set for a GPU and a model of 100 million weights or more"


@dataclass(frozen=True)
class Configuration:
    """Options by stage, to be measured; all configurations share the others."""

    name: str
    kind: str  # plain, profile or setting
    values: dict[str, dict[str, Any]]


def summarized(
    configurations: Sequence[Configuration], results: Sequence[dict[str, Any]], sigmas: float
) -> dict[str, Any]:
    """`rows`, one a configuration, with the repeats' medians, lowest and highest, and `accuracy_check` of each.

    Results of a configuration that failed are missing; a row without results has `n_repeats` 0 and no statistics.
    """
    rows = []
    for configuration in configurations:
        of_it = [result for result in results if result["name"] == configuration.name]
        rows.append(
            {
                "name": configuration.name,
                "kind": configuration.kind,
                "values": configuration.values,
                "n_repeats": len(of_it),
                **(_statistics(of_it) if of_it else {}),
                "results": of_it,
            }
        )
    plain = next(row for row in rows if row["kind"] == "plain")
    for row in rows:
        if row["n_repeats"] and plain["n_repeats"]:
            row["accuracy_check"] = accuracy_check(row["accuracy"][0], plain["accuracy"][0], row["n_test"], sigmas)
    return {"rows": rows}


def _statistics(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """name -> [middle, lowest, highest] over the repeats: of shares the mean in the middle, else the median."""

    def of(values: list[float], middle: Any = statistics.median) -> list[float]:
        return [middle(values), min(values), max(values)]

    statistics_by_name: dict[str, Any] = {}
    for stage in STAGES:
        stages = [result["stages"][stage] for result in results]
        peaks = [found["peak_memory_bytes"] for found in stages]
        statistics_by_name[stage] = {
            "wall_s": of([found["wall_s"] for found in stages]),
            "work_s": of([found["work_s"] for found in stages]),
            "tokens_per_s": of([found["tokens_per_s"] for found in stages]),
            "peak_memory_bytes": None if None in peaks else of(peaks),
        }
    tests = [result["stages"]["test"] for result in results]
    return {
        **statistics_by_name,
        "work_s": of([sum(result["stages"][stage]["work_s"] for stage in STAGES) for result in results]),
        "optimizer_bytes": results[0]["stages"]["train"]["optimizer_bytes"],
        "peak_resident_bytes": of([result["peak_resident_bytes"] for result in results]),
        "n_kept": of([result["stages"]["datagen"]["n_kept"] for result in results]),
        "accuracy": of([found["accuracy"] for found in tests], statistics.fmean),
        "answer_rate": of([found["answer_rate"] for found in tests], statistics.fmean),
        "n_test": tests[0]["n_prompts"],
    }


def accuracy_check(accuracy: float, plain: float, n_prompts: int, sigmas: float) -> dict[str, Any]:
    """Whether an accuracy is at most `sigmas` standard errors of a difference below plain's.

    The standard error is that of two independent shares of n prompts, sqrt(2 p (1 - p) / n) with p the mean of both.
    """
    mean = (accuracy + plain) / 2
    tolerance = sigmas * math.sqrt(2 * mean * (1 - mean) / n_prompts)
    return {
        "difference": accuracy - plain,
        "tolerance": tolerance,
        "holds": accuracy >= plain - tolerance,
    }


def failures(report: dict[str, Any], n_repeats: int) -> list[str]:
    """What is wrong, a line each: configurations that did not run, profiles whose accuracy does not hold."""
    if report["start"] is None:
        return ["the model that all configurations start from could not be made or tested"]
    wrong = []
    for row in report["rows"]:
        if row["n_repeats"] < n_repeats:
            wrong.append(f"{row['name']} ran {row['n_repeats']} times, expected {n_repeats}")
        check = row.get("accuracy_check")
        if row["kind"] == "profile" and check is not None and not check["holds"]:
            wrong.append(
                f"accuracy of {row['name']} is {row['accuracy'][0]:.4f}, {-check['difference']:.4f} below plain; the "
                f"tolerance is {check['tolerance']:.4f}"
            )
    return wrong


def judge(report: Mapping[str, Any]) -> list[Verdict]:
    """The verdict of each profile that has a target, if it ran on a GPU. `accuracy_check` is apart from it."""
    plain = next((row for row in report["rows"] if row["kind"] == "plain"), None)
    if plain is None or not plain["n_repeats"] or "gpu" not in report["environment"]["machine"]:
        return []
    return [
        Verdict(
            f"profile {row['name']}",
            "cuda",
            None,
            "x as fast as plain",
            plain["work_s"][0] / row["work_s"][0],
            SPEED_UPS[row["name"]],
            False,
        )
        for row in report["rows"]
        if row["kind"] == "profile" and row["n_repeats"] and row["name"] in SPEED_UPS
    ]


def _target_lines(report: Mapping[str, Any]) -> list[str]:
    verdicts = judge(report)
    if not verdicts:
        return [f"targets ({', '.join(f'{name} {x:g} x' for name, x in SPEED_UPS.items())}) are {TARGETS_ARE_FOR}"]
    n_met = sum(verdict.met for verdict in verdicts)
    return [
        *(f"{'met' if verdict.met else 'missed'}: {verdict.text}" for verdict in verdicts),
        f"{len(verdicts)} targets, {TARGETS_ARE_FOR}: {n_met} met, {len(verdicts) - n_met} missed",
    ]


def text(report: dict[str, Any]) -> str:
    """The report for a terminal: profiles, then each setting on its own, and the verdicts on the targets."""
    rows = [row for row in report["rows"] if row["n_repeats"]]
    lines = [_heading(report)]
    if not rows:
        return lines[0]
    profiles = [row for row in rows if row["kind"] != "setting"]
    settings = [row for row in rows if row["kind"] != "profile"]
    lines += [table(*_cells("profile", profiles))]
    if len(settings) > 1:
        lines += ["", "One setting on, all others off:", table(*_cells("on", settings))]
    settings_of = report["settings"]
    lines += [
        "",
        f"seconds and tokens/s: medians of {settings_of['repeats']} repeats (lowest - highest), without loading; "
        "accuracy: mean of the repeats (lowest - highest)",
        f"accuracy holds: at most {settings_of['sigmas']:g} standard errors of a difference of two shares of "
        f"{rows[0]['n_test']} prompts below plain",
        *_target_lines(report),
    ]
    return "\n".join(lines)


def _heading(report: dict[str, Any]) -> str:
    settings = report["settings"]
    what = settings["model_name"] or "arithmetic, a small Llama"
    start = report["start"]
    begins = "" if start is None else f", accuracy {start['accuracy']:.4f} before"
    return (
        f"RFT on {what}{begins}: {settings['n_prompts']} prompts x {settings['n_generations']} completions, "
        f"{settings['train_steps']} steps, {settings['n_test']} test prompts; {machine_name(report)}"
    )


def _cells(first: str, rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    on_gpu = rows[0]["train"]["peak_memory_bytes"] is not None
    headers = [
        first,
        *(f"{stage} s" for stage in STAGES),
        "all s",
        "of plain",
        "datagen tok/s",
        "train tok/s",
        *(["peak datagen", "peak train"] if on_gpu else ["resident"]),
        "optimizer",
        "accuracy",
        "holds",
    ]
    plain = rows[0]
    cells = []
    for row in rows:
        peaks = [row["datagen"]["peak_memory_bytes"], row["train"]["peak_memory_bytes"]]
        cells.append(
            [
                row["name"],
                *(_spread(row[stage]["work_s"], "{:.2f}") for stage in STAGES),
                f"{row['work_s'][0]:.2f}",
                f"{row['work_s'][0] / plain['work_s'][0]:.2f}",
                f"{row['datagen']['tokens_per_s'][0]:.0f}",
                f"{row['train']['tokens_per_s'][0]:.0f}",
                *([_mib(peak[0]) for peak in peaks] if on_gpu else [_mib(row["peak_resident_bytes"][0])]),
                _mib(sum(row["optimizer_bytes"].values())),
                _spread(row["accuracy"], "{:.4f}"),
                "-" if row["kind"] == "plain" else "yes" if row["accuracy_check"]["holds"] else "NO",
            ]
        )
    return headers, cells


def _spread(values: Sequence[float], form: str) -> str:
    middle, lowest, highest = (form.format(value) for value in values)
    return middle if lowest == highest else f"{middle} ({lowest} - {highest})"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
