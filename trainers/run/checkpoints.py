"""Checkpoints to resume from, `output_dir/checkpoints/step_00000100/`: the model in Hugging Face format (in mode lora
its adapters), `training_state.pt` with all else that a run carries from step to step, and `manifest.json` with a digest
of each file.

Each appears whole or not at all, and the newest few are kept. Random states are no part of them: every step draws from
its own seed.
"""

from __future__ import annotations

import pickle
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.files import new_folder, one_line

from ..policy.pretrained import load_pretrained, reading
from .manifest import NoManifestError, require_intact, write_manifest
from .outputs import save_into, writing

FOLDER = "checkpoints"
STATE_FILE = "training_state.pt"
_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\..*\.tmp")


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
        """Write a checkpoint, then remove the oldest above the limit. Raises SparseOptError where it cannot."""
        states = {name: thing.state_dict() for name, thing in kept.items()}
        with writing(self.path(step)), new_folder(self.path(step)) as aside:
            save_into(model, tokenizer, aside)
            # Given a name, torch.save fails on a full disk with a RuntimeError that is no different from others.
            with (aside / STATE_FILE).open("wb") as file:
                torch.save({"step": step, "states": states}, file)
            write_manifest(aside)
        for old in self.steps()[: -self._limit]:
            shutil.rmtree(self._hide(old))

    def choose(self, step: int | None = None) -> int:
        """The step to go on from, whose checkpoint was read and found intact; 0 is the beginning of the run.

        Args:
            step: None takes the newest checkpoint, and the beginning where there is none. A checkpoint that is named
                here and has no manifest is taken as it is, with a UserWarning.

        Raises:
            ConfigError: there is no checkpoint of this step.
            DataError: the checkpoint is damaged; the message names the file, and the last checkpoint that is intact.
        """
        steps = self.steps()
        if step is not None and step not in (0, *steps):
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise ConfigError(f"option 'resume_step' is {step}: no checkpoint of this step in {self.folder}; {there}")
        chosen = max(steps, default=0) if step is None else step
        if chosen == 0:
            return 0
        try:
            require_intact(self.path(chosen))
        except NoManifestError as error:
            if step is None:
                as_it_is = f"--resume --resume_step {chosen} goes on from it unverified"
                raise DataError(f"{error}; {as_it_is}; {self._hint(chosen)}") from error
            warnings.warn(f"{error}; its files are not verified", stacklevel=2)
        except DataError as error:
            raise DataError(f"{error}; {self._hint(chosen)}") from error
        return chosen

    def _hint(self, damaged: int) -> str:
        """From where else a run can go on."""
        for step in reversed(self.steps()):
            if step == damaged:
                continue
            try:
                require_intact(self.path(step))
            except DataError:
                continue
            return f"the last intact checkpoint is {self.path(step).name}: --resume --resume_step {step}"
        return "no other checkpoint is intact; --resume --resume_step 0 starts from the beginning"

    def set_aside_after(self, step: int) -> None:
        """Hide the checkpoints of later steps, which the run does again; `remove_leftovers` removes them."""
        for later in self.steps():
            if later > step:
                self._hide(later)

    def _hide(self, step: int) -> Path:
        """Rename a checkpoint to a leftover, so that none is ever half removed; the leftover."""
        path = self.path(step)
        hidden = path.with_name(f".{path.name}.removed.tmp")
        if hidden.exists():
            shutil.rmtree(hidden)
        return path.rename(hidden)

    def remove_leftovers(self) -> None:
        """Remove what a killed run left half-written, and what `set_aside_after` hid."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)

    def restore(self, step: int, model: nn.Module, kept: Mapping[str, Stateful]) -> None:
        """Put a checkpoint's weights into the model, in place, and its states into `kept`.

        Raises:
            DataError: the checkpoint is damaged, or holds other things than `kept`.
        """
        folder = self.path(step)
        states = _read_states(folder, step)
        if states.keys() != kept.keys():
            raise DataError(
                f"checkpoint {folder}: holds {', '.join(sorted(map(str, states)))}; expected {', '.join(sorted(kept))}"
            )
        _restore_weights(model, folder)
        for name, thing in kept.items():
            try:
                thing.load_state_dict(states[name])
            # What is not the state of such a thing can fail in any of these ways.
            except (ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
                raise DataError(
                    f"checkpoint {folder}: {STATE_FILE}: {name}: {type(error).__name__}: {one_line(error)}"
                ) from error


def _read_states(folder: Path, step: int) -> dict[str, Any]:
    """Name -> state of the checkpoint of a step."""
    try:
        saved = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"checkpoint {folder}: cannot read {STATE_FILE}: {one_line(error)}") from error
    if not isinstance(saved, dict) or saved.keys() != {"step", "states"} or not isinstance(saved["states"], dict):
        found = ", ".join(sorted(map(str, saved))) if isinstance(saved, dict) else type(saved).__name__
        raise DataError(f"checkpoint {folder}: {STATE_FILE} holds {found or 'nothing'}; expected step and states")
    if saved["step"] != step:
        raise DataError(f"checkpoint {folder}: {STATE_FILE} is of step {saved['step']}, expected {step}")
    states: dict[str, Any] = saved["states"]
    return states


def _restore_weights(model: Any, folder: Path) -> None:
    if hasattr(model, "peft_config"):
        _restore_adapters(model, folder)
        return
    dtype = next(model.parameters()).dtype
    loaded = load_pretrained(type(model), folder, f"a {type(model).__name__}", dtype=dtype)
    try:
        model.load_state_dict(loaded.state_dict())
    except RuntimeError as error:
        raise DataError(f"checkpoint {folder}: is of another model: {one_line(error)}") from error


def _restore_adapters(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    with reading(f"adapters from {folder}"):
        found = load_peft_weights(str(folder), device="cpu")
    # peft takes what there is, and leaves the other adapters as they are.
    expected = get_peft_model_state_dict(model)
    for name in sorted(expected.keys() ^ found.keys()):
        raise DataError(
            f"checkpoint {folder}: {'has no' if name in expected else 'has unknown'} adapter weights {name}"
        )
    with reading(f"adapters from {folder}"):
        set_peft_model_state_dict(model, found)
