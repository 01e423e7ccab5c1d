"""Reads two checkpoints, safetensors files in a folder or on the hub, as a log of two steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..delta.state import StateLayout, TensorSpec
from ..errors import DataError
from ..files import DamagedFile, one_line
from ..tensor_file import open_tensors
from ..tensors import tensor_digest

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Causal masks and rotary frequencies that older checkpoints store next to the parameters; transformers skips them.
_BUFFER = re.compile(r"(^|\.)(attn|attention|crossattention)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")
# Prefix that transformers gives the names of a model with a head; original checkpoints of GPT-2 lack it.
_PREFIX = "transformer."


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one checkpoint, read on request.

    Attributes:
        source: the argument of `open`.
        files: tensor name -> the file it is in.
        specs: tensor name -> dtype and shape.
    """

    source: str
    files: Mapping[str, Path]
    specs: Mapping[str, TensorSpec]

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Find a checkpoint and read the headers of its files.

        Args:
            source: a folder with `model.safetensors`, or its shards and their index; a `.safetensors` file; or a hub
                name, optionally with `@revision`. Files in the hub's cache are used without a request to the hub.

        Raises:
            DataError: there is no such folder or model, it has no safetensors files, or one is damaged.
        """
        text = str(source)
        files: dict[str, Path] = {}
        specs: dict[str, TensorSpec] = {}
        for path in _files_of(text):
            try:
                with open_tensors(path) as file:
                    for name in file.names:
                        dtype = str(file.dtype(name)).removeprefix("torch.")
                        specs[name] = TensorSpec(name, dtype, file.shape(name))
                        files[name] = path
            except (OSError, DamagedFile) as error:
                raise DataError(f"{path}: not a readable safetensors file: {one_line(error)}") from error
        if not specs:
            raise DataError(f"{text}: its safetensors files hold no tensor")
        return cls(text, files, specs)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises DataError naming the file."""
        path = self.files[name]
        try:
            with open_tensors(path) as file:
                return file.read(name)
        except (OSError, DamagedFile) as error:
            raise DataError(f"{path}: {name} cannot be read: {one_line(error)}") from error


class CheckpointPair:
    """A `StateLog` of two steps: 0 is the base checkpoint, 1 the tuned one.

    Tensors are matched by name, with or without GPT-2's prefix `transformer.`. A tied tensor that only one of the two
    files has (`lm_head.weight`) is left out if the configuration ties it to the embeddings. Dtypes may differ:
    `layout` is that of the tuned checkpoint.
    """

    steps = (0, 1)

    def __init__(self, base: Checkpoint, tuned: Checkpoint) -> None:
        self.base, self.tuned = base, tuned
        self.directory = Path(f"{base.source} -> {tuned.source}")
        self.metadata: Mapping[str, str] = {"model": tuned.source}
        self._base_names = _matched(base, tuned)
        specs = tuple(tuned.specs[name] for name in self._base_names)
        self.layout = StateLayout(specs, {}, frozenset(n for n in self._base_names if _BUFFER.search(n)))

    @classmethod
    def open(cls, base: str | Path, tuned: str | Path) -> CheckpointPair:
        """See `Checkpoint.open`. Also raises DataError if the two are not checkpoints of one model."""
        return cls(Checkpoint.open(base), Checkpoint.open(tuned))

    def digest(self, step: int) -> str:
        """xxh3_128 of the matched tensors; reads them all."""
        self._require(step)
        specs = tuple(self._side(step).specs[self._name_at(name, step)] for name in self.layout.names)
        layout = StateLayout(specs, {}, frozenset())
        return layout.state_digest([tensor_digest(self._side(step).read(spec.name)) for spec in specs])

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, the named tensor), on the CPU; each is read when it is requested."""
        if name not in self._base_names:
            raise DataError(f"{self.directory}: no tensor {name} in both checkpoints")
        for step in steps:
            self._require(step)
            yield step, self._side(step).read(self._name_at(name, step))

    def _side(self, step: int) -> Checkpoint:
        return self.tuned if step else self.base

    def _name_at(self, name: str, step: int) -> str:
        return name if step else self._base_names[name]

    def _require(self, step: int) -> None:
        if step not in self.steps:
            raise DataError(f"{self.directory}: step is {step}, expected 0 (base) or 1 (tuned)")


def _matched(base: Checkpoint, tuned: Checkpoint) -> dict[str, str]:
    """Name in `tuned` -> name in `base`."""
    pairs: dict[str, str] = {}
    for name in tuned.specs:
        others = (name, _PREFIX + name, name.removeprefix(_PREFIX))
        found = next((other for other in others if other in base.specs), None)
        if found is not None:
            pairs[name] = found
    for here, there, left in (
        (base, tuned, [n for n in base.specs if n not in set(pairs.values())]),
        (tuned, base, [n for n in tuned.specs if n not in pairs]),
    ):
        odd = [n for n in left if not _BUFFER.search(n) and not (n == "lm_head.weight" and _ties_head(there))]
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise DataError(f"{odd[0]}{more} is in {here.source} and not in {there.source}: two different models")
    for name, other in pairs.items():
        mine, theirs = tuned.specs[name].shape, base.specs[other].shape
        if mine != theirs:
            raise DataError(f"{name} is {list(theirs)} in {base.source} and {list(mine)} in {tuned.source}")
    return pairs


def _ties_head(checkpoint: Checkpoint) -> bool:
    """Whether the configuration of a checkpoint without a head ties the head to the embeddings."""
    config = next(iter(checkpoint.files.values())).parent / "config.json"
    if not config.is_file():
        return False
    try:
        content = json.loads(config.read_text())
        # Configurations omit transformers' default, which is to tie.
        return bool(content.get("tie_word_embeddings", content.get("text_config", {}).get("tie_word_embeddings", True)))
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{config}: not a readable configuration: {one_line(error)}") from error


def _files_of(source: str) -> list[Path]:
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file():
        return [path]
    if path.is_dir():
        index = path / _INDEX
        if index.is_file():
            return [path / name for name in _shards(index)]
        if (path / _SINGLE).is_file():
            return [path / _SINGLE]
        raise DataError(f"{source}: holds no {_SINGLE} and no {_INDEX}")
    if path.exists():
        raise DataError(f"{source}: expected a folder, a .safetensors file or a hub name")
    return _hub_files(source)


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{index}: not a readable index of shards: {one_line(error)}") from error


def _hub_files(source: str) -> list[Path]:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name, _, revision = source.partition("@")
    try:
        # For the ties of the head; not every model has one.
        with suppress(EntryNotFoundError):
            _hub_file(name, revision, "config.json")
        # Cached files first: without a connection, it is not known which of the two files the hub has.
        single, index = (_cached(name, revision, file) for file in (_SINGLE, _INDEX))
        if single is None and index is None:
            try:
                single = _hub_file(name, revision, _SINGLE)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                index = _hub_file(name, revision, _INDEX)
        if single is not None:
            return [single]
        assert index is not None
        return [_hub_file(name, revision, shard) for shard in _shards(index)]
    except (EntryNotFoundError, OSError, ValueError) as error:
        raise DataError(f"cannot read the checkpoint {source}, which is not a folder: {one_line(error)}") from error


def _hub_file(name: str, revision: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    return _cached(name, revision, file) or Path(hf_hub_download(name, file, revision=revision or None))


def _cached(name: str, revision: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, revision=revision or None)
    return Path(found) if isinstance(found, str) else None
