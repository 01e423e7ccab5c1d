"""Step times of the quickstart's dense and sparse runs, measured in turns.

The two runs of the experiment come one after the other, and other processes can keep the machine busy during one of
them. Short runs in turns are made under the same load.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS, STEPS = 3, 6
# Of each run: the first steps load code and fill caches.
WARM_UP = 2


def step_times(folder: Path, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Median times of the steps of DPO runs, in seconds: name of the run -> `step_time_s` and `optimizer_time_s`.

    Args:
        folder: a new folder for the runs' files, which is removed.
        options: name of the run -> its options for `DPOConfig`, without number of steps and outputs.
    """
    from sparse_opt.trainers import dpo
    from sparse_opt.trainers.run.outputs import METRICS_FILE, read_rows

    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in options}
    for i in range(ROUNDS):
        for name, chosen in options.items():
            output_dir = folder / f"{name}_{i}"
            config = dpo.DPOConfig(
                **{**chosen, "n_steps": STEPS, "sample_steps": None, "output_dir": output_dir, "delta_log_dir": None}
            )
            dpo.train(config)
            rows[name] += read_rows(output_dir / METRICS_FILE, STEPS)[WARM_UP:]
    shutil.rmtree(folder)
    return {
        name: {key: median(row[key] for row in found) for key in ("step_time_s", "optimizer_time_s")}
        for name, found in rows.items()
    }
