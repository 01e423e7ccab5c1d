"""Decide whether a folder holds a run that can be resumed: same options, not finished, a row of metrics per step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from sparse_opt.config import to_yaml
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.option_parser import read_yaml

from ..outputs import METRICS_FILE, OPTIONS_FILE, SUMMARY_FILE, read_rows

# Options that may differ in a resumed run, because they do not affect what the run computes. The batch size of each
# process may, because batch_size is compared, which is that of all.
_FREE_TO_CHANGE = {
    "resume", "resume_step", "output_dir", "mount_dir", "save_dir", "log_dir", "save_steps", "save_total_limit",
    "sample_steps", "report_to", "project_name", "run_name", "eval_dataset", "eval_dataset_split", "eval_subset_size",
    "eval_steps", "device", "parallel", "fsdp", "gather_for_generation", "vllm_server_base_url",
    "vllm_gpu_memory_utilization", "max_logprob_difference", "save_strategy", "logging_steps",
    "dataloader_num_workers", "ddp_timeout", "per_device_train_batch_size",
}  # fmt: skip


def is_begun(output_dir: Path) -> bool:
    """Whether a run has started to write to this folder."""
    return (output_dir / OPTIONS_FILE).is_file()


def check_resumable(output_dir: Path, config: Any) -> None:
    """Refuse to resume a run that has finished, or was started with options that change its results.

    Raises:
        ConfigError: the run is refused; the message names the first differing option and both values, or an options
            file that cannot be read.
    """
    if (output_dir / SUMMARY_FILE).is_file():
        raise ConfigError(f"option 'resume': the run in {output_dir} has finished, see its {SUMMARY_FILE}")
    # With n_epochs and warmup_ratio, these are known when the data is loaded.
    found_later = {"n_steps"} if config.n_epochs else set()
    found_later |= set() if config.warmup_ratio is None else {"warmup_steps"}
    require_same_options(output_dir, config, _FREE_TO_CHANGE | found_later)


def require_same_options(output_dir: Path, config: Any, free_to_change: Collection[str]) -> None:
    """Raise ConfigError if a run was started with another value of an option that must not change.

    The message names the first such option and both values. An options file that cannot be read is also refused.
    """
    file = output_dir / OPTIONS_FILE
    try:
        begun_with = read_yaml(file, "options file")
    except ConfigError as error:
        raise ConfigError(f"option 'resume': {error}") from error
    if not isinstance(begun_with, dict) or not begun_with:
        what = "is empty" if not begun_with else f"holds a {type(begun_with).__name__}"
        raise ConfigError(f"option 'resume': {file} {what}, expected the options of a run")
    now = yaml.safe_load(to_yaml(config))
    # An option added after the run was started had its default value then.
    later = {field.name for field in fields(config) if getattr(config, field.name) == field.default} - begun_with.keys()
    for name in sorted((now.keys() | begun_with.keys()) - later, key=str):
        before, after = begun_with.get(name), now.get(name)
        if before != after and name not in free_to_change:
            raise ConfigError(f"option 'resume': {name} is {after}; expected {before}, as in the run in {output_dir}")


def require_metrics(output_dir: Path, last_step: int) -> None:
    """Raise DataError unless the metrics of a run have one row for each step up to `last_step`, in order."""
    path = output_dir / METRICS_FILE
    rows = read_rows(path, last_step) if path.exists() else []
    for row in rows:
        odd = [name for name, value in row.items() if not (value is None or isinstance(value, int | float))]
        if odd or not isinstance(row.get("step_time_s"), float):
            raise DataError(f"{path}: step {row['step']}: {odd[0] if odd else 'step_time_s'} is not a number")
    found = [row["step"] for row in rows]
    for step in range(1, last_step + 1):
        if step > len(found) or found[step - 1] != step:
            raise DataError(f"{path}: has no row of step {step}, and the checkpoint is of step {last_step}")
    if len(found) > last_step:
        raise DataError(f"{path}: has {len(found)} rows up to step {last_step}, expected one per step")
