"""DeltaLog: writes the weights of a run to disk, as keyframes and patches of the bits that changed, and reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DeltaLogError
from ..files import is_text
from ..masks.mask_set import MaskSet
from . import maintenance
from .chain import LogFiles
from .digest import StateDigest
from .encoder import StepCoder, begin, resolved, resume
from .files import MASK_NAME, StepHeader, checked_interval, read_header, require_steps
from .lock import WriterLock, require_no_log
from .maintenance import Problem as Problem
from .sparse_delta import SparseDelta, origin
from .state import StateLayout, TensorSpec, read_logged, read_state
from .writer import Append, StepInfo, StepWriter

ModelOrState = nn.Module | Mapping[str, Tensor]


@dataclass
class _Writing:
    """State of a log open for writing, from the first step that this object wrote or appended."""

    coder: StepCoder
    writer: StepWriter
    lock: WriterLock
    end: weakref.finalize[Any, Any]
    last_step: int


class DeltaLog:
    """An append-only directory of keyframes and patches, one file per step. docs/formats.md describes the format.

    A file that is damaged, renamed, reordered or from another run raises a DeltaLogError that names file and step; a
    state is returned only after its digest has been verified. docs/delta_logs.md says what is stored and what is
    refused.

    Memory: a writer holds a copy of the last state on the model's devices, and the patches of at most two steps, on the
    device until they are copied and in pinned host memory until they are written. A keyframe is copied to the host
    whole, while training waits. If tensors of one dtype are on several devices, they are copied to that of the first
    one.

        with DeltaLog.create("delta_logs_llama", model) as log:
            for step in ...:
                ...
                log.append(step)  # written in the background
        state = DeltaLog.open("delta_logs_llama").load(step)
    """

    def __init__(self, directory: Path, model_or_state: ModelOrState | None) -> None:
        self.directory = directory
        self._log_files = LogFiles(directory)
        self._model = model_or_state
        self._writing: _Writing | None = None

    @classmethod
    def create(
        cls,
        directory: str | Path,
        model_or_state: ModelOrState,
        *,
        keyframe_every: int | None = None,
        mask: MaskSet | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> DeltaLog:
        """Start a log with the current weights as the keyframe of step 0, which is on disk when this returns.

        Args:
            directory: created if missing; must not contain a log.
            model_or_state: a module, or name -> tensor; the default of `append`.
            keyframe_every: write a keyframe at least every so many logged steps. None: only step 0, and steps whose
                patch would be larger than the state.
            mask: the mask of a sparse run, stored in the log. If only its elements have changed, a patch is coded over
                these alone, without their positions; other changes are coded over whole tensors.
            metadata: strings stored in the log; `model` is copied to mask files made from it.

        Raises:
            DeltaLogError: the directory contains a log, is locked by another writer, or cannot be written; the state
                has an entry that cannot be logged; an option is invalid; the mask does not fit the state.
        """
        log = cls(Path(directory), model_or_state)
        checked_interval(keyframe_every)
        for text in (text for pair in (metadata or {}).items() for text in pair):
            if isinstance(text, str) and not is_text(text):
                raise DeltaLogError(f"{log.directory}: metadata has {text!r}, which cannot be written as UTF-8")
        layout, tensors = read_state(model_or_state)
        if mask is not None:
            mask = resolved(mask, layout, tensors, log.directory)
        require_no_log(log.directory)
        lock = WriterLock(log.directory)
        try:
            coder = begin(layout, tensors, keyframe_every, mask, metadata or {}, lock)
            log._writing = log._begun(lock, coder, coder.base)
        except BaseException:
            lock.release()
            raise
        return log

    @classmethod
    def open(cls, directory: str | Path, model_or_state: ModelOrState | None = None) -> DeltaLog:
        """Open a log to read it, or to append to it with the mask and keyframe interval it was created with.

        Only lists the files; damage is detected when a step is read, or by `verify`. The first `append` rebuilds the
        last logged state from the files, so that changes of the model in between do not matter.

        Args:
            model_or_state: the default of `append`.

        Raises:
            DeltaLogError: there is no log in the directory.
        """
        log = cls(Path(directory), model_or_state)
        require_steps(log.directory, log._files.steps())
        return log

    @property
    def steps(self) -> tuple[int, ...]:
        """The logged steps, ascending, as the directory lists them now."""
        return tuple(self._files.steps())

    @property
    def layout(self) -> StateLayout:
        """The tensors of the logged state."""
        return self._log_files.layout

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata passed to `create`."""
        return dict(self._log_files.base().log_metadata or {})

    @property
    def run_id(self) -> str:
        """32 hex digits that all files of this log share."""
        return self._log_files.base().run_id

    @property
    def keyframe_every(self) -> int | None:
        """The interval of keyframes, as passed to `create`."""
        return self._log_files.base().keyframe_every

    @property
    def mask_digest(self) -> str:
        """The digest of the log's mask; empty if the log has none."""
        return self._log_files.base().mask_digest

    def digest(self, step: int) -> str:
        """Return the xxh3_128 digest of the state at a step, 32 hex digits: see `StateLayout.state_digest`."""
        return self._files.chain(step)[-1].result_digest

    def load(self, step: int) -> dict[str, Tensor]:
        """Return the state at a logged step, on the CPU, ready for `model.load_state_dict`.

        Further names of tied tensors are included and share the tensor of the first name.

        Raises:
            DeltaLogError: the step is not logged, or a file it is rebuilt from is damaged; names file and step.
        """
        state = self._files.state(step)
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    @torch.no_grad()
    def apply_(self, model_or_state: ModelOrState, step: int) -> None:
        """Copy the state at a logged step into a model, or into the tensors of a state dict, bit for bit.

        It is verified before the model is changed. Buffers that the log lacks do not change.

        Raises:
            DeltaLogError: as `load`; or names, shapes, dtypes or ties of the model are not the logged ones.
        """
        layout, tensors = read_state(model_or_state)
        self.layout.require_same(layout.within(self.layout), f"{self.directory}: step {step}")
        state = self.load(step)
        if isinstance(model_or_state, nn.Module):
            model_or_state.load_state_dict(state, strict=False)  # the names have been compared
        else:
            for name, tensor in tensors.items():
                tensor.copy_(state[name])

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, the named tensor at that step), on the CPU, for ascending logged steps.

        Reads only the tensor's records. A yielded tensor is verified, and is valid until the next one is requested.

        Raises:
            DeltaLogError: as `load`; the name is not in the log; the steps do not ascend.
        """
        if name not in self.layout.names:
            raise DeltaLogError(f"{self.directory}: no tensor {name} in the log")
        if any(a > b for a, b in pairwise(steps)):
            raise DeltaLogError(f"{self.directory}: steps {list(steps)} do not ascend")
        yield from self._files.tensor_states(name, steps)

    def between(self, a: int, b: int) -> SparseDelta:
        """Return what changed from logged step `a` to the later step `b`, as a delta to share.

        Reads the log tensor by tensor. Its metadata are the log's; base_model is the log's `model` if `a` is step 0.

        Raises:
            DeltaLogError: as `load`; or `a` is not before `b`.
        """
        if a >= b:
            raise DeltaLogError(f"{self.directory}: between({a}, {b}), expected a step and a later one")
        mask = MaskSet.load(self.directory / MASK_NAME) if self.mask_digest else None
        metadata = origin(None, mask) | self.metadata | {"steps": f"{a} to {b}"}
        if a == 0 and "model" in self.metadata:
            metadata["base_model"] = self.metadata["model"]

        def read(spec: TensorSpec) -> tuple[Tensor, Tensor]:
            # Cloned: a yielded tensor is valid only until the next one is read.
            old, new = (tensor.clone() for _, tensor in self._files.tensor_states(spec.name, [a, b]))
            return old, new

        return SparseDelta.of_tensors(self.layout, read, metadata=metadata)

    def step_of(self, model_or_state: ModelOrState) -> int | None:
        """Return the last logged step whose state has the model's current bits, by digest; None if there is none.

        Raises:
            DeltaLogError: the model is not the logged one, or a header is damaged.
        """
        found, tensors = read_state(model_or_state)
        layout = self.layout
        layout.require_same(found, str(self.directory))
        digest = layout.state_digest(StateDigest.start([tensors[name] for name in layout.names]).result())
        headers = (read_header(file) for file in reversed(self._files.steps().values()))
        return next((header.file.step for header in headers if header.result_digest == digest), None)

    def info(self) -> list[StepInfo]:
        """Return kind, changes and bytes of every step, from the headers alone.

        Raises:
            DeltaLogError: a header is damaged.
        """
        return [StepInfo.of(read_header(file)) for file in self._files.steps().values()]

    def verify(self, on_step: Callable[[int], None] | None = None) -> list[Problem]:
        """Rebuild every step of the log and compare every digest; return the problems found.

        Holds one state in memory, and a second one after a problem. `on_step` is called after each step.
        """
        return maintenance.verify(self.directory, on_step)

    @property
    def last_step(self) -> int:
        """The last step that was logged or submitted to the writer."""
        return max(self._log_files.steps()) if self._writing is None else self._writing.last_step

    def append(self, step: int, model_or_state: ModelOrState | None = None) -> Append:
        """Log the current state as `step`; a background thread writes it.

        The changes are coded on the state's device, in the order of the current stream, before this returns. They are
        on disk once `wait()` of the returned object, or `flush()`, has returned. Blocks while two steps are still being
        written.

        Args:
            step: greater than the last one.
            model_or_state: defaults to the argument of `create` or `open`. Must have the logged tensors.

        Raises:
            DeltaLogError: the step is not greater than the last one; the model is another, or holds its base weights;
                another writer holds the lock; the log is damaged; or the process was forked from the writing one. Or an
                earlier step could not be written, which ends the log: after `close`, this continues after the last step
                on disk.
        """
        state = self._model if model_or_state is None else model_or_state
        if state is None:
            raise DeltaLogError(
                f"{self.directory}: step {step}: no model given, expected one here or when the log is opened"
            )
        if self._writing is None:
            self._writing = self._resumed()
        writing = self._writing
        writing.writer.require_here(f"{self.directory}: step {step}")
        writing.writer.require_no_error()
        if isinstance(step, bool) or not isinstance(step, int) or step <= writing.last_step:
            raise DeltaLogError(f"{self.directory}: step is {step!r}, expected a step after {writing.last_step}")
        tensors = read_logged(state, self.layout, f"{self.directory}: step {step}")
        writing.writer.reserve()
        try:
            append = writing.writer.submit(writing.coder.job(step, tensors))
        except BaseException as error:
            # What the next patch would be coded against may not be the state of a step: the next call reads it again.
            writing.writer.cancel()
            self._close_after(error)
            raise
        writing.last_step = step
        return append

    def flush(self) -> None:
        """Wait until all appended steps are on disk.

        Raises:
            DeltaLogError: a step could not be written.
        """
        if self._writing is not None:
            self._writing.writer.require_here(str(self.directory))
            self._writing.writer.drain()
            self._writing.writer.require_no_error()

    def truncate(self, after: int) -> None:
        """Remove the steps after `after`, for a run that continues from there and logs them again. Closes the log.

        At every moment, also after a crash, the rest is a valid log.

        Raises:
            DeltaLogError: the log begins after `after`; another writer holds the lock; or a write failed.
        """
        self.close()
        lock = WriterLock(self.directory)
        try:
            maintenance.truncate(self._log_files, after, lock)
        finally:
            lock.release()

    def close(self) -> None:
        """Wait for the appended steps and release the lock. The log can still be read, and appended to again.

        In a process forked from the writing one, only this object is closed.

        Raises:
            DeltaLogError: a step could not be written, and no other call has raised that. The lock is released in any
                case.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.end()
            if writing.writer.is_here and not writing.writer.is_reported:
                writing.writer.require_no_error()

    def __enter__(self) -> DeltaLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if value is None:
            self.close()
        else:
            self._close_after(value)

    def _close_after(self, error: BaseException) -> None:
        """Close the log, and add to an error that one of an earlier step, if there is one."""
        try:
            self.close()
        except DeltaLogError as earlier:
            error.add_note(str(earlier))

    def __repr__(self) -> str:
        steps = self.steps
        return f"DeltaLog({str(self.directory)!r}, {len(steps)} steps{f', last {steps[-1]}' if steps else ''})"

    @property
    def _files(self) -> LogFiles:
        """The files, after pending writes, so that appended steps can be read."""
        if self._writing is not None and self._writing.writer.is_here:
            self._writing.writer.drain()
        return self._log_files

    def _begun(self, lock: WriterLock, coder: StepCoder, last: StepHeader) -> _Writing:
        writer = StepWriter(coder.base, last, lock)
        return _Writing(coder, writer, lock, weakref.finalize(self, _end, writer, lock), last.file.step)

    def _resumed(self) -> _Writing:
        """Lock the directory, and rebuild the state that the next patch is coded against."""
        lock = WriterLock(self.directory)
        try:
            return self._begun(lock, *resume(self._log_files))
        except BaseException:
            lock.release()
            raise


def _end(writer: StepWriter, lock: WriterLock) -> None:
    writer.close()
    lock.release()
