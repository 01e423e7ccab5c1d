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
        changed: the number of `numel` elements whose bits differ from the previous step's; None if the writer of a
            keyframe did not count them.
        bytes: size of the file.
        masked: the patch is coded over the elements of the log's mask.
        parent_step: the step that a patch is coded against; None for a keyframe.
    """

    step: int
    kind: str
    changed: int | None
    numel: int
    bytes: int
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
        return cls(file.step, file.kind, changed, numel, size, header.masked, parent)


@dataclass(frozen=True)
class StepJob:
    """A step to be written. The writer adds previous step, parent step and digests to `header`.

    Attributes:
        parts: the names of the payload's tensors in the file.
        digests: digests of the tensors at the layout positions `digested`; all others have the parent's digests.
    """

    header: StepHeader
    parts: tuple[str, ...]
    payload: HostCopy
    digests: StateDigest
    digested: tuple[int, ...]


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
            self._writer.is_reported = True
            raise


class StepWriter:
    """Writes steps in order, in one thread, until one cannot be written; those after it are dropped.

    Args:
        base, last: headers of the log's first and last step.
        lock: of the log's directory; checked before each file appears.

    Attributes:
        error: why a step could not be written; None if all could.
        is_reported: the error was raised to the caller.
    """

    def __init__(self, base: StepHeader, last: StepHeader, lock: WriterLock) -> None:
        self._base, self._last, self._lock_file = base, last, lock
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="delta-log")
        self._slots = threading.Semaphore(IN_FLIGHT)
        self.error: BaseException | None = None
        self.is_reported = False
        self._failed_step = 0  # of the error
        self._futures: list[Future[StepInfo]] = []

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
        future = self._executor.submit(self._run, job)
        self._futures = [f for f in self._futures if not f.done()] + [future]
        return Append(job.header.file.step, self, future)

    def require_no_error(self) -> None:
        """Raise the error of a step that could not be written."""
        if self.error is not None:
            self.is_reported = True
            raise self.error

    def drain(self) -> None:
        """Wait until every submitted step is on disk or has failed."""
        for future in self._futures:
            future.exception()

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
            if self.error is not None:
                raise DeltaLogError(
                    f"{job.header.file.where}: dropped with step {self._failed_step}, which could not be written"
                )
            return self._write(job, payload, digests)
        except BaseException as error:
            if self.error is None:
                self._failed_step, self.error = job.header.file.step, error
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
        self._last = header
        return StepInfo.of(header)
