"""Runs of the training loops that benchmarks make: options checked like those of the command line, and resuming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def config_of(module: Any, name: str, options: dict[str, Any]) -> Any:
    """The config class `name` of a loop's module with these options, checked like those of the command line."""
    from sparse_opt.config import parse_config

    words = [f"{key}={','.join(value) if isinstance(value, list) else value}" for key, value in options.items()]
    return parse_config(getattr(module, name), words)


def finish(module: Any, config: str, options: dict[str, Any], dataset: Path, folder: Path) -> dict[str, Any]:
    """The summary of the run in this folder, which is done now, or resumed, unless it is finished."""
    if (folder / "summary.json").is_file():
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    options = {"delta_log_dir": "none", **options, "dataset": dataset, "output_dir": folder, "resume": True}
    return module.train(config_of(module, config, options))


def accuracy(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The summary of `rft test` with these options, which is done now, or resumed, unless `folder` has it."""
    from sparse_opt.trainers.rft import train as rft

    if not (folder / "summary.json").is_file():
        rft.test(config_of(rft, "TestConfig", {**options, "output_dir": folder, "resume": True}))
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def metrics(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a finished run's metrics.jsonl."""
    return [json.loads(line) for line in Path(summary["metrics_file"]).read_text(encoding="utf-8").splitlines()]


def rounded(rate: float) -> float:
    """A learning rate with six digits, because 3e-5 * 0.3 has seventeen."""
    return float(f"{rate:.6g}")


def beyond(tried: Sequence[float], best: float) -> list[float]:
    """The next learning rate if the best one is the lowest or highest; empty if it is inside.

    The steps repeat those of the decade before: after 0.1, 0.3, 1, 3 come 10 and 30. A single rate has no steps.
    """
    if len(tried) < 2 or min(tried) < best < max(tried):
        return []
    if best >= max(tried):
        return [rounded(min(10 * rate for rate in tried if 10 * rate > 1.01 * best))]
    return [rounded(max(rate / 10 for rate in tried if 1.01 * rate / 10 < best))]
