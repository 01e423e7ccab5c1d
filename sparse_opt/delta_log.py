"""DeltaLog: every logged step of a run as the bits that changed, rebuilt bit for bit."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from . import delta_codec, delta_files, delta_verify
from .delta_chain import read_base, read_chain, rebuild
from .delta_codec import PatchGroup
from .delta_files import KEYFRAME, PATCH, StepFile, StepHeader
from .delta_state import StateLayout, read_state
from .delta_verify import Problem
from .errors import DeltaLogError
from .tensor_state import tensor_digest

_LOCK_NAME = "writer.lock"


@dataclass(frozen=True)
class StepInfo:
    """One logged step: its kind (keyframe or patch), how many of `numel` elements changed, and the file's size."""

    step: int
    kind: str
    changed: int
    numel: int
    bytes: int

    @property
    def share(self) -> float:
        """changed / numel."""
        return self.changed / self.numel if self.numel else 0.0


class StateDelta:
    """W0 and the state of one step side by side; iterate it as often as needed.

    Each round yields (name, tensor of the base state, tensor of the step), on the CPU, in the model's order. The state
    of the step is held in memory; the base state is read from its file tensor by tensor.
    """

    def __init__(self, base: StepHeader, state: Mapping[str, Tensor], names: Collection[str]) -> None:
        self._base, self._state, self._names = base, state, names

    def __iter__(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, tensor in delta_files.read_keyframe(self._base, self._names):
            yield name, tensor, self._state[name]


class DeltaLog:
    """An append-only directory of keyframes and patches, one file a step; see `delta_files` for the format.

    Every file is written aside, fsynced and renamed, and says which state it starts from and which it leads to. What is
    torn, flipped, renamed, reordered or another run's is refused with a DeltaLogError that names file and step; a state
    is only ever returned after its digest was found right. Leftovers of a killed writer (`.tmp`) are ignored. A missing
    last file cannot be noticed: the log then ends one step earlier.

    The state is the model's `state_dict()`: parameters and persistent buffers, of any dtype of 1, 2, 4 or 8 bytes, kept
    bit for bit. Tied tensors are stored once, under their first name. A writer holds a copy of the last logged state on
    the model's devices, and `writer.lock` in the directory until `close()`, so that a second writer is refused.

    A step is a patch, unless its changes take more bytes than the whole state: then, and where `keyframe_every` asks
    for it, it is a keyframe. A change takes its element's bytes and 4 for the position (8 where the tensors need int64
    positions): a patch of bf16 weights is the smaller up to a third of them changed, of fp32 weights up to half.

        log = DeltaLog.create("delta_logs_llama", model)
        ...
        log.append(step)
        state = DeltaLog.open("delta_logs_llama").load(step)
    """

    def __init__(self, directory: Path, model_or_state: nn.Module | Mapping[str, Tensor] | None) -> None:
        self.directory = directory
        self._model = model_or_state
        self._base_header: StepHeader | None = None
        # The last logged step, and its bits on the model's devices: what the next patch is coded against.
        self._last: StepHeader | None = None
        self._shadow: dict[str, Tensor] = {}
        self._release: weakref.finalize | None = None

    @classmethod
    def create(
        cls,
        directory: str | Path,
        model_or_state: nn.Module | Mapping[str, Tensor],
        *,
        keyframe_every: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> DeltaLog:
        """Start a log with the current state as the keyframe of step 0, the base weights W0.

        Args:
            directory: made if missing; must not hold a log.
            model_or_state: a module, or name -> tensor; what `append` logs when it is given nothing else.
            keyframe_every: every so many logged steps at the latest one is a keyframe: a longer log, shorter chains to
                rebuild from. None: only step 0 is, and steps that are smaller so.
            metadata: strings to keep with the log, `model` among them for mask files made from it.

        Raises:
            DeltaLogError: the directory holds a log, another writer has it, or it cannot be written; the state has
                an entry that cannot be logged.
        """
        if keyframe_every is not None and keyframe_every < 1:
            raise DeltaLogError(f"keyframe_every is {keyframe_every}, wanted 1 or more, or None")
        log = cls(Path(directory), model_or_state)
        layout, tensors = read_state(model_or_state)
        log._lock(make=True)
        try:
            if log._files():
                raise DeltaLogError(f"{log.directory}: holds a delta log already; open it, or choose another directory")
            shadow = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
            digests = tuple(tensor_digest(shadow[name]) for name in layout.names)
            header = StepHeader(
                file=delta_files.step_file(log.directory, 0, KEYFRAME),
                run_id=secrets.token_hex(16),
                parent_step=None,
                parent_digest="",
                result_digest=layout.state_digest(digests),
                tensor_digests=digests,
                changed=0,
                numel=layout.numel,
                layout=layout,
                log_metadata=dict(metadata or {}),
                keyframe_every=keyframe_every,
            )
            delta_files.write_step(header, {name: tensor.cpu() for name, tensor in shadow.items()})
        except DeltaLogError:
            log.close()
            raise
        log._base_header = log._last = header
        log._shadow = shadow
        return log

    @classmethod
    def open(cls, directory: str | Path, model_or_state: nn.Module | Mapping[str, Tensor] | None = None) -> DeltaLog:
        """Open a log to read it, or to append to it further.

        Reads nothing but the file names; damage is found when a step is asked for, or by `verify`. To go on with a run,
        `append`: the last logged state is rebuilt from the files and the new step coded against it, whatever the model
        went through in between. `step_of(model)` says which logged step the model is at.

        Args:
            model_or_state: what `append` logs when it is given nothing else.

        Raises:
            DeltaLogError: there is no log in the directory.
        """
        log = cls(Path(directory), model_or_state)
        if not log._files():
            raise DeltaLogError(f"{log.directory}: holds no delta log (no step_*.safetensors file)")
        return log

    @property
    def steps(self) -> tuple[int, ...]:
        """The logged steps, ascending, as the directory lists them now."""
        return tuple(self._files())

    @property
    def layout(self) -> StateLayout:
        """The tensors of the logged state."""
        layout = self._base().layout
        assert layout is not None  # the base is a keyframe
        return layout

    @property
    def metadata(self) -> dict[str, str]:
        """What `create` was given."""
        return dict(self._base().log_metadata or {})

    def digest(self, step: int) -> str:
        """The xxh3_128 digest of the state at a step, as 32 hex digits: see `StateLayout.state_digest`."""
        return self._chain(step)[-1].result_digest

    def append(self, step: int, model_or_state: nn.Module | Mapping[str, Tensor] | None = None) -> StepInfo:
        """Log the current state as `step`. On return it is on disk; on an error the log is as it was and can go on.

        Args:
            step: greater than the last logged one.
            model_or_state: defaults to what `create` or `open` was given. Must have the logged tensors.

        Raises:
            DeltaLogError: step not greater than the last, another model, a second writer, a damaged log, or a failed
                write.
        """
        state = self._model if model_or_state is None else model_or_state
        if state is None:
            raise DeltaLogError(
                f"{self.directory}: step {step}: no model given, neither here nor when the log was opened"
            )
        self._lock()
        files = self._files()
        if isinstance(step, bool) or not isinstance(step, int) or step <= max(files):
            raise DeltaLogError(f"{self.directory}: step {step!r} cannot follow step {max(files)}: steps ascend")
        base, layout = self._base(), self.layout
        found, tensors = read_state(state)
        layout.require_same(found, f"{self.directory}: step {step}")
        new = {name: tensors[name].contiguous() for name in layout.names}
        parent, shadow = self._last_state(files, new)

        groups = delta_codec.encode(shadow, new)
        counts = {name: count for group in groups for name, count in zip(group.names, group.counts, strict=True)}
        digests = tuple(
            tensor_digest(new[name]) if counts[name] else digest
            for name, digest in zip(layout.names, parent.tensor_digests, strict=True)
        )
        keyframe = _keyframe_is_due(files, base.keyframe_every) or _changes_exceed_state(groups, new)
        header = StepHeader(
            file=delta_files.step_file(self.directory, step, KEYFRAME if keyframe else PATCH),
            run_id=base.run_id,
            parent_step=parent.file.step,
            parent_digest=parent.result_digest,
            result_digest=layout.state_digest(digests),
            tensor_digests=digests,
            changed=sum(counts.values()),
            numel=layout.numel,
            layout=layout if keyframe else None,
            log_metadata=base.log_metadata if keyframe else None,
            keyframe_every=base.keyframe_every if keyframe else None,
        )
        # Copies for a keyframe: the format refuses tensors that share a storage, as slices of one flat buffer do.
        payload = (
            {name: tensor.to("cpu", copy=True) for name, tensor in new.items()}
            if keyframe
            else delta_codec.pack(layout, groups)
        )
        delta_files.write_step(header, payload)
        for group in groups:
            group.apply_(shadow)
        self._last = header
        return _info(header)

    def load(self, step: int) -> dict[str, Tensor]:
        """The state at a logged step, on the CPU, ready for `model.load_state_dict`.

        Further names of tied tensors are there too and share the tensor of the first name.

        Raises:
            DeltaLogError: the step is not logged, or a file it is rebuilt from is damaged; names file and step.
        """
        state = rebuild(self.layout, self._chain(step))
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    @torch.no_grad()
    def apply_(self, model_or_state: nn.Module | Mapping[str, Tensor], step: int) -> None:
        """Put the state at a logged step into a model, or into the tensors of a state dict, bit for bit.

        The state is rebuilt and verified on the CPU before the model is touched.

        Raises:
            DeltaLogError: as `load`; or names, shapes, dtypes or ties of the model are not the logged ones.
        """
        layout, tensors = read_state(model_or_state)
        self.layout.require_same(layout, f"{self.directory}: step {step}")
        state = self.load(step)
        if isinstance(model_or_state, nn.Module):
            model_or_state.load_state_dict(state)
        else:
            for name, tensor in tensors.items():
                tensor.copy_(state[name])

    def iter_delta(self, step: int, names: Sequence[str] | None = None) -> StateDelta:
        """(name, tensor of the base state, tensor at `step`) for every tensor, or for the named ones.

        Rebuilds the state of `step` once and reads the base tensor by tensor, in each round of iteration again.

        Raises:
            DeltaLogError: as `load`; a name is not in the log.
        """
        layout = self.layout
        unknown = sorted(set(names or ()) - set(layout.names))
        if unknown:
            raise DeltaLogError(f"{self.directory}: no tensor {unknown[0]} in the log")
        chosen = set(layout.names if names is None else names)
        return StateDelta(self._base(), rebuild(layout, self._chain(step)), chosen)

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """(step, the named tensor at that step), on the CPU, for ascending logged steps.

        A yielded tensor is good until the next one is asked for.

        Raises:
            DeltaLogError: as `load`; the name is not in the log.
        """
        if name not in self.layout.names:
            raise DeltaLogError(f"{self.directory}: no tensor {name} in the log")
        for step in steps:
            yield step, rebuild(self.layout, self._chain(step))[name]

    def step_of(self, model_or_state: nn.Module | Mapping[str, Tensor]) -> int | None:
        """The last logged step whose state has the same bits as the model's now, by digest; None if there is none.

        Raises:
            DeltaLogError: the model is not the logged one, or a header is damaged.
        """
        found, tensors = read_state(model_or_state)
        layout = self.layout
        layout.require_same(found, str(self.directory))
        digest = layout.state_digest([tensor_digest(tensors[name]) for name in layout.names])
        headers = (delta_files.read_header(file) for file in reversed(self._files().values()))
        return next((header.file.step for header in headers if header.result_digest == digest), None)

    def info(self) -> list[StepInfo]:
        """Kind, changed share and bytes of every step, from the headers alone.

        Raises:
            DeltaLogError: a header is damaged.
        """
        return [_info(delta_files.read_header(file)) for file in self._files().values()]

    def verify(self) -> list[Problem]:
        """Walk the whole log, rebuild every step and compare every digest; an empty list says that all is well.

        Holds one state in memory, and a second one after a problem.
        """
        return delta_verify.verify(self.directory)

    def close(self) -> None:
        """Let go of the directory, so that another writer may append; reading goes on working."""
        if self._release is not None:
            self._release()
            self._release = None
        self._last = None
        self._shadow = {}

    def __enter__(self) -> DeltaLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        steps = self.steps
        return f"DeltaLog({str(self.directory)!r}, {len(steps)} steps{f', last {steps[-1]}' if steps else ''})"

    def _files(self) -> dict[int, StepFile]:
        return delta_files.list_steps(self.directory)[0]

    def _base(self) -> StepHeader:
        if self._base_header is None:
            self._base_header = read_base(self.directory, self._files())
        return self._base_header

    def _chain(self, step: int) -> list[StepHeader]:
        return read_chain(self._base(), self._files(), step)

    def _last_state(
        self, files: Mapping[int, StepFile], new: Mapping[str, Tensor]
    ) -> tuple[StepHeader, dict[str, Tensor]]:
        """The last logged step and its bits, on the devices of the tensors to compare them with."""
        last = max(files)
        if self._last is None or self._last.file.step != last:
            chain = self._chain(last)
            self._shadow, self._last = rebuild(self.layout, chain), chain[-1]
        # The model may have moved since.
        self._shadow = {name: tensor.to(new[name].device) for name, tensor in self._shadow.items()}
        return self._last, self._shadow

    def _lock(self, *, make: bool = False) -> None:
        """Take the directory for writing, until `close()`, the end of this object or of the process."""
        if self._release is not None:
            return
        try:
            if make:
                self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DeltaLogError(f"{self.directory}: cannot be written: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise DeltaLogError(f"{self.directory}: another writer has this delta log open: {error}") from error
        self._release = weakref.finalize(self, os.close, descriptor)


def delta_log_dir_name(model_name: str) -> str:
    """`delta_logs_{model}`: `google/gemma-3-270m-it` -> `delta_logs_google_gemma_3_270m_it`.

    Raises:
        DeltaLogError: the name has no letter or digit.
    """
    slug = re.sub(r"[^0-9a-z]+", "_", model_name.lower()).strip("_")
    if not slug:
        raise DeltaLogError(f"model name {model_name!r} has no letter or digit to name a directory by")
    return f"delta_logs_{slug}"


def _keyframe_is_due(files: Mapping[int, StepFile], keyframe_every: int | None) -> bool:
    if keyframe_every is None:
        return False
    since = len(files) - 1 - max(i for i, file in enumerate(files.values()) if file.kind == KEYFRAME)
    return since + 1 >= keyframe_every


def _changes_exceed_state(groups: Sequence[PatchGroup], state: Mapping[str, Tensor]) -> bool:
    # Of tensors alone: a keyframe's layout takes more than a patch's counts.
    changes = sum(group.indices.nbytes + group.values.nbytes for group in groups)
    return changes > sum(tensor.nbytes for tensor in state.values())


def _info(header: StepHeader) -> StepInfo:
    size = header.file.path.stat().st_size
    return StepInfo(header.file.step, header.file.kind, header.changed, header.numel, size)
