"""Reads the checkpoints of a run as a log: safetensors in folders or on the hub, or state dicts in `.pt` files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ..delta.state import StateLayout, TensorSpec
from ..errors import DataError, listed
from ..files import DamagedFile, hub_folder, one_line
from ..pt_file import check_pt, load_pt
from ..tensor_file import open_tensors
from ..tensors import canonical_names, dtype_name, tensor_digest

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Causal masks and rotary frequencies that older checkpoints store next to the parameters; transformers skips them.
_BUFFER = re.compile(r"(^|\.)(attn|attention|crossattention)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")
# Tensors that checkpoints of one model need not have in common.
_OPTIONAL = re.compile(rf"^lm_head\.weight$|{_BUFFER.pattern}")
# Prefix that transformers gives the names of a model with a head; original checkpoints of GPT-2 lack it.
_PREFIX = "transformer."
_PT_SUFFIXES = (".pt", ".pth", ".bin")
# Keys of training frameworks' files below which the state dict is.
_STATE_KEYS = ("state_dict", "model_state_dict", "model")
_OF_A_STEP = re.compile(r"(?:step|checkpoint)[-_]?(\d+)(?:\.safetensors|\.pt|\.pth|\.bin)?")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one checkpoint, read on request.

    Attributes:
        source: the argument of `open`.
        files: tensor name -> the file it is in.
        specs: tensor name -> dtype and shape.
        tied: of a state dict: further name of a tied tensor -> its name in `specs`.
    """

    source: str
    files: Mapping[str, Path]
    specs: Mapping[str, TensorSpec]
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Find a checkpoint and read the headers of its files.

        Args:
            source: a folder with `model.safetensors`, or its shards and their index; a `.safetensors` file; a `.pt`,
                `.pth` or `.bin` file of a state dict; or a hub name, optionally with `@revision`. Files in the hub's
                cache are used without a request to the hub.

        Raises:
            DataError: there is no such folder or model, it has no safetensors files, or one is damaged.
        """
        text = str(source)
        if Path(text).suffix in _PT_SUFFIXES and Path(text).is_file():
            return cls._of_state_dict(Path(text))
        files: dict[str, Path] = {}
        specs: dict[str, TensorSpec] = {}
        for path in _files_of(text):
            try:
                with open_tensors(path) as file:
                    for name, entry in file.entries.items():
                        specs[name] = TensorSpec(name, str(entry.dtype).removeprefix("torch."), entry.shape)
                        files[name] = path
            except (OSError, DamagedFile) as error:
                raise DataError(f"{path}: not a readable safetensors file: {one_line(error)}") from error
        if not specs:
            raise DataError(f"{text}: its safetensors files hold no tensor")
        return cls(text, files, specs)

    @classmethod
    def _of_state_dict(cls, path: Path) -> Checkpoint:
        try:
            check_pt(path)
            state = _state_dict(path)
        except (OSError, DamagedFile) as error:
            raise DataError(f"{path}: not a readable state dict: {one_line(error)}") from error
        firsts = canonical_names(state)
        specs = {
            name: TensorSpec(name, dtype_name(state[name]), tuple(state[name].shape))
            for name, first in firsts.items()
            if name == first
        }
        tied = {name: first for name, first in firsts.items() if name != first}
        return cls(str(path), dict.fromkeys(specs, path), specs, tied)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises DataError naming the file."""
        path = self.files[name]
        try:
            if path.suffix in _PT_SUFFIXES:
                return _state_dict(path)[name]
            with open_tensors(path) as file:
                return file.read(name)
        except (OSError, DamagedFile) as error:
            raise DataError(f"{path}: {name} cannot be read: {one_line(error)}") from error


class CheckpointSeries:
    """A `StateLog` of the checkpoints of one run; docs/analysis.md says how their tensors are matched.

    `layout` is that of the last checkpoint.

    Args:
        checkpoints: step -> its checkpoint, two or more; the first one is the base.
        title: what errors and outputs call the series.

    Raises:
        DataError: they are not checkpoints of one model.
    """

    def __init__(self, checkpoints: Mapping[int, Checkpoint], title: str) -> None:
        self.steps = tuple(sorted(checkpoints))
        last = checkpoints[self.steps[-1]]
        self.directory = Path(title)
        self.metadata: Mapping[str, str] = {"model": last.source}
        self._checkpoints = checkpoints
        self._names = {step: _matched(checkpoint, last) for step, checkpoint in checkpoints.items()}
        names = [name for name in last.specs if all(name in found for found in self._names.values())]
        specs = tuple(last.specs[name] for name in names)
        tied = {further: first for further, first in last.tied.items() if first in names}
        self.layout = StateLayout(specs, tied, frozenset(name for name in names if _BUFFER.search(name)))

    @classmethod
    def of_pair(cls, base: str | Path, tuned: str | Path) -> CheckpointSeries:
        """The checkpoints before and after training as steps 0 and 1; arguments and errors as in `Checkpoint.open`."""
        return cls({0: Checkpoint.open(base), 1: Checkpoint.open(tuned)}, f"{base} -> {tuned}")

    @classmethod
    def of_folder(cls, folder: str | Path, base: str | Path | None = None) -> CheckpointSeries:
        """Find the checkpoints of a run: `step_*`, `step-*` or `checkpoint-*`, each a folder or a file.

        Args:
            base: the checkpoint before training, which becomes step 0; None takes the first one in the folder.

        Raises:
            DataError: there are fewer than two, two of one step, or an unreadable one; or they are of different models.
        """
        path = Path(folder)
        if not path.is_dir():
            raise DataError(f"{path}: no such folder")
        found: dict[int, Path] = {}
        for entry in sorted(path.iterdir()):
            match = _OF_A_STEP.fullmatch(entry.name)
            if match is None:
                continue
            step = int(match[1])
            if step in found:
                raise DataError(f"{path}: {found[step].name} and {entry.name} are both of step {step}")
            found[step] = entry
        checkpoints = {step: Checkpoint.open(entry) for step, entry in found.items()}
        if base is not None:
            if 0 in checkpoints:
                raise DataError(f"{found[0]} is of step 0, and so is the base {base}: give one")
            checkpoints[0] = Checkpoint.open(base)
        if len(checkpoints) < 2:
            raise DataError(
                f"{path}: holds {len(found)} checkpoints (step_100, step-100, checkpoint-100, step_100.pt), expected "
                "two or more, or one and a base model"
            )
        return cls(checkpoints, str(path))

    def digest(self, step: int) -> str:
        """xxh3_128 of the matched tensors; reads them all."""
        checkpoint, names = self._at(step)
        specs = tuple(checkpoint.specs[names[name]] for name in self.layout.names)
        layout = StateLayout(specs, {}, frozenset())
        return layout.state_digest([tensor_digest(checkpoint.read(spec.name)) for spec in specs])

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, the named tensor), on the CPU; each is read when it is requested."""
        if name not in self.layout.names:
            raise DataError(f"{self.directory}: no tensor {name} in all checkpoints")
        for step in steps:
            checkpoint, names = self._at(step)
            yield step, checkpoint.read(names[name])

    def _at(self, step: int) -> tuple[Checkpoint, dict[str, str]]:
        """The checkpoint of a step, and name in the last one -> name in it."""
        if step not in self._checkpoints:
            there = listed([str(there) for there in self.steps])
            raise DataError(f"{self.directory}: no checkpoint of step {step}; there are {there}")
        return self._checkpoints[step], self._names[step]


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` file, mapped into memory. Raises DamagedFile if there is no state dict in it."""
    content = load_pt(path, mmap=True)
    for key in _STATE_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise DamagedFile(f"holds {type(content).__name__}, expected a state dict")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DamagedFile(f"its {name!r} is {type(tensor).__name__}, expected a name and a tensor")
    return content


def _matched(base: Checkpoint, tuned: Checkpoint) -> dict[str, str]:
    """Name in `tuned` -> name in `base`."""
    pairs: dict[str, str] = {}
    for name in tuned.specs:
        others = (name, _PREFIX + name, name.removeprefix(_PREFIX))
        found = next((other for other in others if other in base.specs), None)
        if found is not None:
            pairs[name] = found
    for here, there, left in (
        (base, tuned, base.specs.keys() - pairs.values()),
        (tuned, base, tuned.specs.keys() - pairs.keys()),
    ):
        odd = [name for name in here.specs if name in left and not _OPTIONAL.search(name)]
        if odd:
            raise DataError(
                f"{listed(odd, most=1)} is in {here.source} and not in {there.source}: two different models"
            )
    for name, other in pairs.items():
        mine, theirs = tuned.specs[name].shape, base.specs[other].shape
        if mine != theirs:
            raise DataError(f"{name} is {list(theirs)} in {base.source} and {list(mine)} in {tuned.source}")
    return pairs


def _files_of(source: str) -> list[Path]:
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file():
        return [path]
    if path.exists() and not path.is_dir():
        raise DataError(f"{source}: expected a folder, a .safetensors file or a hub name")
    name, _, revision = source.partition("@")
    chosen = ["model*.safetensors", _INDEX]
    folder = path if path.is_dir() else hub_folder(name, revision, allow_patterns=chosen)
    files = _files_in(folder)
    if not files:
        raise DataError(f"{source}: holds no {_SINGLE} and no {_INDEX}")
    return files


def _files_in(folder: Path) -> list[Path]:
    """The safetensors files of a folder, as its index lists them; empty if it has none."""
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _SINGLE] if (folder / _SINGLE).is_file() else []
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{index}: not a readable index of shards: {one_line(error)}") from error
