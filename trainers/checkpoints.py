"""Checkpoints to resume from, `output_dir/checkpoints/step_00000100/`: the model in Hugging Face format (in mode lora
its adapters), and beside it `training_state.pt` with all else that a run carries from step to step.

Each appears whole or not at all, and the newest few are kept. Random states are no part of them: every step draws from
its own seed.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from sparse_opt.errors import DataError
from sparse_opt.new_folders import new_folder

from .models import first_line
from .outputs import save_into

FOLDER = "checkpoints"
STATE_FILE = "training_state.pt"
_NAME = re.compile(r"step_(\d{8})")
_LEFTOVER = re.compile(r"\.step_\d{8}\..*\.tmp")


class Stateful(Protocol):
    """What can be kept in a checkpoint: an optimizer, a schedule, a controller."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, and lists and dicts of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        output_dir: the run's folder.
        limit: how many of the newest are kept.
    """

    def __init__(self, output_dir: Path, limit: int):
        self.folder = output_dir / FOLDER
        self._limit = limit

    def steps(self) -> list[int]:
        """Steps that there are checkpoints of, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step_{step:08d}"

    def save(self, step: int, model: nn.Module, tokenizer: Any, kept: Mapping[str, Stateful]) -> None:
        """Write a checkpoint, then remove the oldest above the limit."""
        with new_folder(self.path(step)) as aside:
            save_into(model, tokenizer, aside)
            states = {name: thing.state_dict() for name, thing in kept.items()}
            torch.save({"step": step, "states": states}, aside / STATE_FILE)
        for old in self.steps()[: -self._limit]:
            shutil.rmtree(self.path(old))

    def restore(self, step: int, model: nn.Module, kept: Mapping[str, Stateful]) -> None:
        """Put a checkpoint's weights into the model, in place, and its states into `kept`; leftovers are removed.

        Raises:
            DataError: the checkpoint is damaged, or holds other things than `kept`.
        """
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        folder = self.path(step)
        try:
            saved = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(f"checkpoint {folder}: cannot read {STATE_FILE}: {first_line(error)}") from error
        if saved["step"] != step or saved["states"].keys() != kept.keys():
            raise DataError(
                f"checkpoint {folder}: holds step {saved['step']} with {', '.join(sorted(saved['states']))}; wanted "
                f"step {step} with {', '.join(sorted(kept))}"
            )
        _restore_weights(model, folder)
        for name, thing in kept.items():
            try:
                thing.load_state_dict(saved["states"][name])
            except (ValueError, KeyError, RuntimeError) as error:
                raise DataError(f"checkpoint {folder}: {name}: {first_line(error)}") from error


def _restore_weights(model: Any, folder: Path) -> None:
    try:
        if hasattr(model, "peft_config"):
            from peft import load_peft_weights, set_peft_model_state_dict

            result: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
            if result.unexpected_keys:
                raise DataError(f"checkpoint {folder}: has unknown adapter weights {result.unexpected_keys[0]}")
            return
        loaded = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype)
        model.load_state_dict(loaded.state_dict())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"checkpoint {folder}: cannot read its weights: {first_line(error)}") from error
