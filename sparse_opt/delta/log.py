"""DeltaLog: every logged step of a run as the bits that changed, rebuilt bit for bit."""

from __future__ import annotations

import re
import shutil
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import DeltaLogError
from ..masks.mask_set import MaskSet
from . import maintenance as delta_squash
from .codec import Backend
from .encoder import StepCoder, begin, resume, since_keyframe
from .files import LogSettings, StepHeader
from .lock import WriterLock, require_no_log
from .lock import claim as claim
from .maintenance import Problem as Problem
from .reader import DeltaReader
from .reader import StateDelta as StateDelta
from .state import StateReader, is_text, read_state
from .writer import Append, StepInfo, StepWriter

ModelOrState = nn.Module | Mapping[str, Tensor]
OnError = Literal["raise", "warn"]


@dataclass
class _Writing:
    """A log that is written to, from the first step that this object wrote or appended."""

    coder: StepCoder
    writer: StepWriter
    lock: WriterLock
    end: weakref.finalize[Any, Any]
    last_step: int
    warned: bool = False


class DeltaLog(DeltaReader):
    """An append-only directory of keyframes and patches, one file a step; docs/formats.md has the format.

    Every file is written aside, fsynced and given its name, never over a file of the same step; it says which state it
    starts from and which it leads to. What is torn, flipped, renamed, reordered or another run's is refused with a
    DeltaLogError that names file and step; a state is only ever returned after its digest was found right. Leftovers of
    a killed writer (`.tmp`) are ignored. A missing last file cannot be noticed: the log then ends one step earlier.

    The state is the model's `state_dict()`: parameters and persistent buffers, kept bit for bit, of every dtype that
    safetensors files hold (`tensor_file.DTYPES`). Tied tensors are stored once, under their first name. Sharded ones
    (DTensor, FSDP, DeepSpeed ZeRO-3) are refused: gather a full state dict and log that.

    A step is a patch, unless the patch would be larger than the state: then, and where `keyframe_every` asks for it, it
    is a keyframe.

    Memory: a writer holds a copy of the state that patches are coded against, on the model's devices, and beside it the
    patches of at most two steps, on the device until they are copied and in pinned host memory until they are written.
    A patch over a mask's elements holds their positions (4 bytes each) and two copies of the elements while it is made;
    a keyframe is copied to the host whole, while training waits. Where tensors of one dtype lie on several devices,
    they are copied to that of the first to be coded.

    `writer.lock` in the directory is held until `close()`, so that a second writer is refused. If the file is deleted
    or replaced meanwhile, later steps are refused until the log is closed and opened again.

        with DeltaLog.create("delta_logs_llama", model) as log:
            for step in ...:
                ...
                log.append(step)        # behind the training
        state = DeltaLog.open("delta_logs_llama").load(step)
    """

    def __init__(
        self, directory: Path, model_or_state: ModelOrState | None, on_error: OnError, backend: Backend | None
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise DeltaLogError(f"on_error is {on_error!r}, wanted raise or warn")
        super().__init__(directory, backend)
        self._model, self._on_error = model_or_state, on_error
        self._writing: _Writing | None = None
        self._reader: StateReader | None = None

    @classmethod
    def create(
        cls,
        directory: str | Path,
        model_or_state: ModelOrState,
        *,
        base: ModelOrState | None = None,
        level: str = "packed",
        against: Literal["previous", "base"] = "previous",
        keyframe_every: int | None = None,
        mask: MaskSet | None = None,
        metadata: Mapping[str, str] | None = None,
        on_error: OnError = "raise",
        backend: Backend | None = None,
        lock: WriterLock | None = None,
    ) -> DeltaLog:
        """Start a log with the base weights W0 as the keyframe of step 0. On return it is on disk.

        Args:
            directory: made if missing; must not hold a log.
            model_or_state: a module, or name -> tensor; what `append` logs when it is given nothing else.
            base: W0; None takes the current state.
            level: of the patches (`delta.codec`): `fast`, `packed` or `tight`.
            against: what patches are coded against: the step logged before, or the base, which makes larger patches
                and rebuilds any step from two files.
            keyframe_every: every so many logged steps at the latest one is a keyframe: a longer log, shorter chains to
                rebuild from. None: only step 0 is, and steps that are smaller so.
            mask: of a sparse run: where nothing but its elements has changed, patches are coded over those, and say
                nothing of positions between them. Kept beside the steps. Other changes are logged in the ordinary form.
            metadata: strings to keep with the log, `model` among them for mask files made from it.
            on_error: what `append`, `flush` and `close` do about a step that could not be written: raise, or warn once
                and go on with a keyframe as soon as one can be written.
            backend: as `delta.codec.encode` takes it.
            lock: of `claim(directory)`.

        Raises:
            DeltaLogError: the directory holds a log, another writer has it, or it cannot be written; the state has an
                entry that cannot be logged; an option is none; base or mask do not fit the state.
        """
        log = cls(Path(directory), model_or_state, on_error, backend)
        settings = LogSettings(level, against, keyframe_every)
        for text in (text for pair in (metadata or {}).items() for text in pair):
            if isinstance(text, str) and not is_text(text):
                raise DeltaLogError(f"{log.directory}: metadata has {text!r}, which cannot be written as UTF-8")
        layout, tensors = read_state(model_or_state)
        if base is not None:
            other, tensors = read_state(base)
            layout.require_same(other, f"{log.directory}: base")
        with ExitStack() as undo:
            if lock is None:
                require_no_log(log.directory)
                lock = undo.enter_context(claim(log.directory))
            elif lock.directory != log.directory or not lock.held:
                raise DeltaLogError(f"{log.directory}: the lock is of {lock.directory}, or was let go of")
            coder = begin(log.directory, layout, tensors, settings, mask, metadata or {}, backend, lock)
        log._writing = log._begun(lock, coder, coder.base)
        return log

    @classmethod
    def open(
        cls,
        directory: str | Path,
        model_or_state: ModelOrState | None = None,
        *,
        on_error: OnError = "raise",
        backend: Backend | None = None,
    ) -> DeltaLog:
        """Open a log to read it, or to append to it further, with the level, mask and keyframes that it was begun with.

        Reads nothing but the file names; damage is found when a step is asked for, or by `verify`. To go on with a run,
        `append`: the last logged state is rebuilt from the files and the new step coded against it, whatever the model
        went through in between. `step_of(model)` says which logged step the model is at.

        Args:
            model_or_state: what `append` logs when it is given nothing else.
            on_error, backend: see `create`.

        Raises:
            DeltaLogError: there is no log in the directory.
        """
        log = cls(Path(directory), model_or_state, on_error, backend)
        if not log._listed():
            raise DeltaLogError(f"{log.directory}: holds no delta log (no step_*.safetensors file)")
        return log

    @property
    def last_step(self) -> int:
        """The last step that was logged, or handed over to be."""
        return max(self._log_files.steps()) if self._writing is None else self._writing.last_step

    def append(self, step: int, model_or_state: ModelOrState | None = None) -> Append:
        """Log the current state as `step`, behind what follows.

        On return the state may be written to: its changes are coded, on its device and in the order of the current
        stream. They are on disk once `.wait()` of what is returned, or `flush()`, has come back. Waits while two steps
        are under way.

        Args:
            step: greater than the last one.
            model_or_state: defaults to what `create` or `open` was given. Must have the logged tensors.

        Raises:
            DeltaLogError: step not greater than the last, another model, a second writer, a damaged log, a process
                forked from the one that writes; or a step handed over before could not be written, of which nobody was
                told yet: this one is not logged then, and the next one is a keyframe.
        """
        state = self._model if model_or_state is None else model_or_state
        if state is None:
            raise DeltaLogError(
                f"{self.directory}: step {step}: no model given, neither here nor when the log was opened"
            )
        if self._writing is None:
            self._writing = self._resumed()
        writing = self._writing
        writing.writer.require_here(f"{self.directory}: step {step}")
        fresh = self._report(writing) or writing.coder.fresh
        if fresh:
            writing.last_step = writing.writer.last_step
        if isinstance(step, bool) or not isinstance(step, int) or step <= writing.last_step:
            raise DeltaLogError(f"{self.directory}: step {step!r} cannot follow step {writing.last_step}: steps ascend")
        layout = self.layout
        if self._reader is None:
            self._reader = StateReader(layout)
        tensors = self._reader.read(state, f"{self.directory}: step {step}")
        if fresh and self._on_error == "warn":
            # A keyframe would be copied from the device for nothing, at every step of a run that has a full disk.
            free = shutil.disk_usage(self.directory).free
            if free < layout.nbytes:
                where = f"{self.directory}: step {step}"
                return writing.writer.refused(step, f"{where}: a keyframe takes {layout.nbytes} bytes, {free} are free")
        writing.writer.reserve()
        try:
            job = writing.coder.job(step, tensors, fresh=fresh)
            writing.last_step = step
            handed = writing.writer.submit(job)
        except BaseException:
            writing.writer.cancel()
            raise
        writing.coder.handed_over(job)
        return handed

    def flush(self) -> None:
        """Wait until all that was appended is on disk.

        Raises:
            DeltaLogError: a step could not be written, of which nobody was told yet.
        """
        if self._writing is not None:
            self._writing.writer.require_here(str(self.directory))
            self._writing.writer.drain()
            self._report(self._writing)

    def squash(self, a: int, b: int, on_step: Callable[[int], None] | None = None) -> StepInfo:
        """Take out the steps strictly between two logged ones; all others keep their states, bit for bit.

        Step b is coded anew, on the CPU: against step a, or against the base in a log that codes against it; a keyframe
        stays one. At every instant, also of a crash, the log opens and a, b and what comes after b can be rebuilt. It
        is no time for others to read the log. `on_step` is called with each step that is gone.

        Raises:
            DeltaLogError: a or b is not logged, a is not before b; a second writer, a damaged log or a failed write.
        """
        self.flush()
        lock = WriterLock.take(self.directory) if self._writing is None else self._writing.lock
        try:
            info = StepInfo.of(delta_squash.squash(self._log_files, a, b, on_step, lock))
            if self._writing is not None:
                self._writing.coder.since_keyframe = since_keyframe(self._log_files.steps())
            return info
        finally:
            if self._writing is None:
                lock.release()

    def truncate(self, after: int) -> None:
        """Take out the steps after `after`, for a run that goes on from there and logs them anew.

        What is left is a log at every instant, also of a crash. Lets go of the directory, as `close` does.

        Raises:
            DeltaLogError: the log begins later; a second writer or a failed write.
        """
        self.close()
        lock = WriterLock.take(self.directory)
        try:
            delta_squash.truncate(self._log_files, after, lock)
        finally:
            lock.release()

    def close(self) -> None:
        """Wait for what was appended, and let go of the directory for another writer; reading goes on working.

        In a process forked from the one that writes, only this object is closed: files and lock are the other's.

        Raises:
            DeltaLogError: as `flush`; the directory is let go of all the same.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.end()
            if writing.writer.is_here:
                self._report(writing)

    def __enter__(self) -> DeltaLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DeltaLogError as error:
            if value is None:
                raise
            value.add_note(str(error))

    def __repr__(self) -> str:
        steps = self.steps
        return f"DeltaLog({str(self.directory)!r}, {len(steps)} steps{f', last {steps[-1]}' if steps else ''})"

    def _drain(self) -> None:
        if self._writing is not None and self._writing.writer.is_here:
            self._writing.writer.drain()

    def _begun(self, lock: WriterLock, coder: StepCoder, last: StepHeader) -> _Writing:
        writer = StepWriter(coder.base, last, lock)
        return _Writing(coder, writer, lock, weakref.finalize(self, _end, writer, lock), last.file.step)

    def _resumed(self) -> _Writing:
        """Take the directory, and rebuild the state that the next patch is coded against."""
        lock = WriterLock.take(self.directory)
        try:
            return self._begun(lock, *resume(self._log_files))
        except BaseException:
            lock.release()
            raise

    def _report(self, writing: _Writing) -> bool:
        """Raise or warn of a failed step that nobody was told of; True if the next step has to begin anew."""
        trouble = writing.writer.reported()
        if not trouble.stopped:
            writing.warned = False
        if trouble.error is not None:
            if self._on_error == "raise" or not isinstance(trouble.error, DeltaLogError):
                raise trouble.error
            if not writing.warned:
                warnings.warn(f"{trouble.error}; training goes on, and steps are missing in the log", stacklevel=3)
                writing.warned = True
        return trouble.wants_fresh


def delta_log_dir_name(model_name: str) -> str:
    """`delta_logs_{model}`: `google/gemma-3-270m-it` -> `delta_logs_google_gemma_3_270m_it`.

    Raises:
        DeltaLogError: the name has no letter or digit.
    """
    slug = re.sub(r"[^0-9a-z]+", "_", model_name.lower()).strip("_")
    if not slug:
        raise DeltaLogError(f"model name {model_name!r} has no letter or digit to name a directory by")
    return f"delta_logs_{slug}"


def _end(writer: StepWriter, lock: WriterLock) -> None:
    writer.close()
    lock.release()
