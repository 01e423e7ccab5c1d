"""Trackers that report a run's metrics to Weights & Biases and TensorBoard (option `report_to`)."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import yaml

from sparse_opt.config import to_yaml
from sparse_opt.errors import ConfigError

from ...options import model_slug
from ..outputs import write_text

_ID_FILE = "wandb_run_id"


class TrackedOptions(Protocol):
    """What trackers read of a run's options, a dataclass."""

    policy_name: str
    report_to: list[Literal["wandb", "tensorboard"]]
    project_name: str | None
    run_name: str | None


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report the metrics of a step."""

    def close(self) -> None:
        """Send pending metrics and close."""


def require_trackers(config: TrackedOptions) -> None:
    """Raise ConfigError if a tracker in `report_to` cannot be imported."""
    for name in config.report_to:
        try:
            importlib.import_module({"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}[name])
        except ImportError as error:
            raise ConfigError(
                f"option 'report_to' is {name}, which cannot be imported ({error}): pip install {name}"
            ) from error


def make_trackers(config: TrackedOptions, algorithm: str, output_dir: Path, first_step: int) -> list[Tracker]:
    """Make a tracker for each entry of `report_to`; `first_step` is the first step that this process logs.

    Raises:
        ConfigError: a tracker cannot be started.
    """
    makers: dict[str, type[WandbTracker] | type[TensorBoardTracker]]
    makers = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}
    return [makers[name](config, algorithm, output_dir, first_step) for name in config.report_to]


def project_name(config: TrackedOptions, algorithm: str) -> str:
    """`{model}-{algorithm}-subnetwork-emergence`, unless the option names another."""
    return config.project_name or f"{model_slug(config.policy_name)}-{algorithm}-subnetwork-emergence"


class TensorBoardTracker:
    """Writes event files to `output_dir/tensorboard`. A resumed run hides earlier events from its first step on."""

    def __init__(self, config: TrackedOptions, algorithm: str, output_dir: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=first_step)
        self._writer.add_text("options", f"```yaml\n{to_yaml(config)}```", first_step)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write numbers as scalars; None is skipped."""
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """Reports to a wandb run, which a resumed training continues. WANDB_MODE and other variables work as usual."""

    def __init__(self, config: TrackedOptions, algorithm: str, output_dir: Path, first_step: int):
        import wandb

        file = output_dir / _ID_FILE
        if not file.exists():
            write_text(file, secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=project_name(config, algorithm),
                name=config.run_name or output_dir.resolve().name,
                id=file.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(output_dir),
                config=yaml.safe_load(to_yaml(config)),
            )
        except wandb.Error as error:
            raise ConfigError(f"option 'report_to': wandb: {' '.join(str(error).split())}") from error

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report numbers under their names; None is skipped."""
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
