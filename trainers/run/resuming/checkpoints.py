"""Checkpoints from which a run resumes, in `output_dir/checkpoints/step_00000100/`.

A checkpoint holds the model in Hugging Face format (in mode lora its adapters), `training_state.pt` with all other
state that is carried between steps, and `manifest.json` with a digest of each file. It is written atomically, and the
newest few are kept. Random states are not saved, because every step is seeded by its own number.
"""

from __future__ import annotations

import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.files import fsync, new_folder, one_line
from sparse_opt.optim.ranks.sharding import reshard

from ...policy.pretrained import load_pretrained, reading
from ...policy.sharding import is_sharded, unsharded_class
from ...policy.whole_model import scatter
from ..outputs import save_into, writing
from .manifest import NoManifestError, require_intact, write_manifest

FOLDER = "checkpoints"
STATE_FILE = "training_state.pt"
_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\..*\.tmp")


class Stateful(Protocol):
    """An object whose state a checkpoint can hold: an optimizer, a schedule, a controller."""

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors, numbers, strings, and lists and dicts of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        output_dir: the run's folder.
        limit: number of newest checkpoints to keep; None keeps all.
    """

    def __init__(self, output_dir: Path, limit: int | None):
        self.folder = output_dir / FOLDER
        self._limit = limit

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step_{step:08d}"

    def save(
        self,
        step: int,
        model: nn.Module,
        tokenizer: Any,
        states: Mapping[str, dict[str, Any]],
        before_publishing: Callable[[], object],
    ) -> None:
        """Write a checkpoint, then remove the oldest above the limit. Raises SparseOptError if the write fails.

        Args:
            states: of each object that is kept, its `state_dict()`.
            before_publishing: called when the files are on disk, before the checkpoint gets its final name; its errors
                propagate.
        """
        folder = self.path(step)
        with writing(folder), new_folder(folder, before_publishing=before_publishing) as aside:
            save_into(model, tokenizer, aside)
            # With a file name, torch.save reports a full disk as a RuntimeError like any other.
            with (aside / STATE_FILE).open("wb") as file:
                torch.save({"step": step, "states": dict(states)}, file)
            write_manifest(aside)
        if self._limit is not None:
            for old in self.steps()[: -self._limit]:
                shutil.rmtree(self._hide(old))

    def choose(self, step: int | None = None) -> int:
        """The step to resume from, whose checkpoint has been verified; 0 means the start of the run.

        Args:
            step: None takes the newest checkpoint, or 0 if there is none. A checkpoint without a manifest that is
                requested by its step is accepted with a UserWarning.

        Raises:
            ConfigError: the step has no checkpoint.
            DataError: the checkpoint is damaged; the message names the file and the last intact checkpoint.
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
                as_it_is = f"--resume --resume_step {chosen} resumes from it unverified"
                raise DataError(f"{error}; {as_it_is}; {self._hint(chosen)}") from error
            warnings.warn(f"{error}; its files are not verified", stacklevel=2)
        except DataError as error:
            raise DataError(f"{error}; {self._hint(chosen)}") from error
        return chosen

    def _hint(self, damaged: int) -> str:
        """Where else the run can resume, as the end of an error message."""
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
        """Hide the checkpoints of later steps, which the run repeats; `remove_leftovers` deletes them."""
        later = [found for found in self.steps() if found > step]
        with writing(self.folder):
            for found in later:
                self._hide(found)
            if later:
                fsync(self.folder)

    def _hide(self, step: int) -> Path:
        """Rename a checkpoint to a leftover and return its path, so that no checkpoint is ever partly deleted."""
        path = self.path(step)
        hidden = path.with_name(f".{path.name}.removed.tmp")
        if hidden.exists():
            shutil.rmtree(hidden)
        return path.rename(hidden)

    def remove_leftovers(self) -> None:
        """Remove partly written checkpoints of a killed run, and those hidden by `set_aside_after`."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)

    def restore(self, step: int, model: nn.Module, kept: Mapping[str, Stateful]) -> None:
        """Load a checkpoint's weights into the model, in place, and its states into `kept`.

        Every rank calls this; of a sharded model, each takes its part of the weights and states.

        Raises:
            DataError: the checkpoint is damaged, or does not hold exactly the states of `kept`.
        """
        folder = self.path(step)
        states = _read_states(folder, step, in_parts=is_sharded(model))
        if states.keys() != kept.keys():
            raise DataError(
                f"checkpoint {folder}: holds {', '.join(sorted(map(str, states)))}; expected {', '.join(sorted(kept))}"
            )
        _restore_weights(model, folder)
        for name, thing in kept.items():
            try:
                thing.load_state_dict(states[name])
            # An invalid state raises any of these, depending on the class of `thing`.
            except (ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
                raise DataError(
                    f"checkpoint {folder}: {STATE_FILE}: {name}: {type(error).__name__}: {one_line(error)}"
                ) from error


def _read_states(folder: Path, step: int, *, in_parts: bool) -> dict[str, Any]:
    """The states in a step's checkpoint, by name; with `in_parts` a tensor is read from disk where it is used."""
    try:
        saved = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True, mmap=in_parts)
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
    reshard(model)
    if hasattr(model, "peft_config"):
        _restore_adapters(model, folder)
        return
    dtype, own_class = next(model.parameters()).dtype, unsharded_class(model)
    loaded = load_pretrained(own_class, folder, f"a {own_class.__name__}", dtype=dtype)
    try:
        model.load_state_dict(scatter(loaded.state_dict(), model.state_dict()))
    except RuntimeError as error:
        raise DataError(f"checkpoint {folder}: is of another model: {one_line(error)}") from error


def _restore_adapters(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    with reading(f"adapters from {folder}"):
        found = load_peft_weights(str(folder), device="cpu")
    # PEFT loads the adapters that are present and silently keeps the others, so the names are compared here.
    expected = get_peft_model_state_dict(model)
    for name in sorted(expected.keys() ^ found.keys()):
        raise DataError(
            f"checkpoint {folder}: {'has no' if name in expected else 'has unknown'} adapter weights {name}"
        )
    with reading(f"adapters from {folder}"):
        set_peft_model_state_dict(model, scatter(found, expected))
