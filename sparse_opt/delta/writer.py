"""StepWriter: copies submitted steps from the device, and writes them to disk, in a background thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import DeltaLogError
from ..tensors import HostCopy
from .digest import StateDigest
from .files import KEYFRAME, StepHeader, write_step
from .lock import WriterLock

# Submitted steps that are not yet on disk: one that is being written and one in the queue.
IN_FLIGHT = 2


@dataclass(frozen=True)
class StepInfo:
    """One logged step.

    Attributes:
        kind: `keyframe` or `patch`.
        changed: the number of `numel` elements whose bits differ from the previous step's; None for a keyframe after a
            failed step.
        bytes: size of the file.
        level: empty for a keyframe.
        masked: the patch is coded over the elements of the log's mask.
        parent_step: the step that a patch is coded against; None for a keyframe.
    """

    step: int
    kind: str
    changed: int | None
    numel: int
    bytes: int
    level: str
    masked: bool
    parent_step: int | None

    @property
    def share(self) -> float | None:
        """changed / numel."""
        if self.changed is None:
            return None
        return self.changed / self.numel if self.numel else 0.0

    @property
    def bytes_per_change(self) -> float | None:
        """bytes / changed for a patch with changes, otherwise None."""
        return self.bytes / self.changed if self.changed and self.kind != KEYFRAME else None

    @classmethod
    def of(cls, header: StepHeader) -> StepInfo:
        size, file = header.file.path.stat().st_size, header.file
        changed, numel, parent = header.changed, header.numel, header.parent_step
        return cls(file.step, file.kind, changed, numel, size, header.level, header.masked, parent)


@dataclass(frozen=True)
class StepJob:
    """A step to be written. The writer adds previous step, parent step and digests to `header`.

    Attributes:
        parts: the names of the payload's tensors in the file.
        digests: digests of the tensors at the layout positions `digested`; all others have the parent's digests.
        restarts: a keyframe that restarts the log after a failed step.
    """

    header: StepHeader
    parts: tuple[str, ...]
    payload: HostCopy
    digests: StateDigest
    digested: tuple[int, ...]
    restarts: bool = False


@dataclass(frozen=True)
class WriterStatus:
    """Status of the writer.

    stopped: the last attempted step could not be written.
    needs_keyframe: stopped, and no keyframe that restarts the log has been submitted since.
    error: the cause, if it was not reported yet.
    """

    stopped: bool
    needs_keyframe: bool
    error: BaseException | None


class Append:
    """An appended step, which may still be being written."""

    def __init__(self, step: int, writer: StepWriter, future: Future[StepInfo]) -> None:
        self.step, self._writer, self._future = step, writer, future

    def done(self) -> bool:
        """True once the step is on disk or has failed."""
        return self._future.done()

    def wait(self) -> StepInfo:
        """Wait until the step is on disk, and return how it was logged.

        Raises:
            DeltaLogError: the step could not be written, or was dropped because an earlier one could not; or it is not
                on disk yet, and this process was forked from the writing one.
        """
        if not self._future.done():
            self._writer.require_here(f"step {self.step}")
        try:
            return self._future.result()
        except DeltaLogError:
            if self._writer.is_here:
                self._writer.reported()
            raise


class StepWriter:
    """Writes steps in order, in one thread. After a failed step nothing is written until a keyframe restarts
    the log.

    Args:
        base, last: headers of the log's first and last step.
        lock: of the log's directory; checked before each file appears.
    """

    def __init__(self, base: StepHeader, last: StepHeader, lock: WriterLock) -> None:
        self._base, self._last, self._lock_file = base, last, lock
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="delta-log")
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._lock = threading.Lock()
        self._failed: int | None = None
        self._unreported: BaseException | None = None
        # Failed steps, without those dropped after them, and how many of them a keyframe has
        # followed that restarts the log.
        self._failures = self._restarted = 0
        self._futures: list[Future[StepInfo]] = []

    @property
    def last_step(self) -> int:
        """The last step on disk."""
        return self._last.file.step

    @property
    def is_here(self) -> bool:
        """False in a process forked after construction, which does not have the writing thread."""
        return os.getpid() == self._process

    def require_here(self, where: str) -> None:
        """Raise a DeltaLogError that begins with `where` in a forked process."""
        if not self.is_here:
            raise DeltaLogError(
                f"{where}: the log was opened for writing in process {self._process}, this is process {os.getpid()}, "
                "forked from it: only the first one can write"
            )

    def reserve(self) -> None:
        """Wait until another step can be submitted. Call `submit` or `cancel` afterwards."""
        self._slots.acquire()

    def cancel(self) -> None:
        self._slots.release()

    def submit(self, job: StepJob) -> Append:
        if job.restarts:
            self._restarted = self._failures  # if it fails too, that is a new failure
        future = self._executor.submit(self._run, job)
        self._futures = [f for f in self._futures if not f.done()] + [future]
        return Append(job.header.file.step, self, future)

    def refused(self, step: int, message: str) -> Append:
        """Return an `Append` that has failed with `message`, without an attempt to write the step."""
        future: Future[StepInfo] = Future()
        future.set_exception(DeltaLogError(message))
        return Append(step, self, future)

    def drain(self) -> None:
        """Wait until every submitted step is on disk or has failed."""
        for future in self._futures:
            future.exception()

    def reported(self) -> WriterStatus:
        """Return the status, and mark its error as reported."""
        with self._lock:
            stopped = self._failed is not None
            found = WriterStatus(stopped, stopped and self._failures > self._restarted, self._unreported)
            self._unreported = None
        return found

    def close(self) -> None:
        """Write the submitted steps, and let the thread end; in a forked process, do nothing.

        The thread is not joined: the garbage collector may call this while the interpreter starts a thread, and holds a
        lock that joining one waits for.
        """
        if self.is_here:
            self._executor.shutdown(wait=False)
            self.drain()

    def _run(self, job: StepJob) -> StepInfo:
        try:
            # First, so that no tensor is freed while it is copied.
            payload = dict(zip(job.parts, job.payload.result(), strict=True))
            digests = job.digests.result()
            if self._failed is not None and not job.restarts:
                raise DeltaLogError(
                    f"{job.header.file.where}: dropped with step {self._failed}, which could not be written"
                )
            return self._write(job, payload, digests)
        except BaseException as error:
            with self._lock:
                if self._failed is None or job.restarts:
                    self._failed, self._unreported = job.header.file.step, error
                    self._failures += 1
            raise
        finally:
            self._slots.release()

    def _write(self, job: StepJob, payload: Mapping[str, Tensor], digests: tuple[str, ...]) -> StepInfo:
        layout, parent = self._base.layout, self._last
        assert layout is not None  # the base is a keyframe
        whole = list(parent.tensor_digests)
        for i, digest in zip(job.digested, digests, strict=True):
            whole[i] = digest
        patch = job.header.file.kind != KEYFRAME
        header = replace(
            job.header,
            previous_step=parent.file.step,
            parent_step=parent.file.step if patch else None,
            parent_digest=parent.result_digest if patch else "",
            tensor_digests=tuple(whole),
            result_digest=layout.state_digest(whole),
        )
        write_step(header, payload, require_lock=self._lock_file.require_held)
        with self._lock:
            self._last, self._failed = header, None
        return StepInfo.of(header)
