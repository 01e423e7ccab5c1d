"""Steps of a log taken out: between two others, which stay as they are, or at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .atomic_files import fsync
from .delta_chain import LogFiles
from .delta_files import KEYFRAME, StepHeader, read_keyframe, write_step
from .delta_lock import WriterLock
from .delta_patches import LogMask, MaskedState, count_changes, encode
from .errors import DeltaLogError


def squash(files: LogFiles, a: int, b: int, on_step: Callable[[int], None] | None, lock: WriterLock) -> StepHeader:
    """Take out the steps strictly between two; the header of step b as it is then. See `DeltaLog.squash`."""
    listed = files.steps()
    for step in (a, b):
        if step not in listed:
            raise DeltaLogError(f"{files.directory}: step {step} is not logged")
    if a >= b:
        raise DeltaLogError(f"{files.directory}: squash from step {a} to step {b}: wanted an earlier and a later step")
    between = [step for step in listed if a < step < b]
    for step in (step for step in listed if step > b):
        header = files.header(listed[step])
        if header.parent_step in between:
            raise DeltaLogError(f"{header.file.where}: is coded against step {header.parent_step}, which would go")
    header = files.header(listed[b])
    if not between:
        return header
    _rewrite(files, a, header, lock)
    _remove(files, between, on_step, lock)
    return files.header(listed[b])


def truncate(files: LogFiles, after: int, lock: WriterLock) -> None:
    """Take out the steps after `after`. See `DeltaLog.truncate`."""
    listed = files.steps()
    if after < min(listed):
        raise DeltaLogError(f"{files.directory}: truncating after step {after}: the log begins with step {min(listed)}")
    _remove(files, [step for step in listed if step > after], None, lock)


def _remove(files: LogFiles, steps: list[int], on_step: Callable[[int], None] | None, lock: WriterLock) -> None:
    """Remove steps, from the last one back: what is left after a crash can still be rebuilt."""
    listed = files.steps()
    for step in sorted(steps, reverse=True):
        lock.require_held(listed[step].where)
        try:
            listed[step].path.unlink()
            fsync(files.directory)
        except OSError as error:
            raise DeltaLogError(f"{listed[step].where}: cannot be removed: {error}") from error
        if on_step is not None:
            on_step(step)


def _rewrite(files: LogFiles, a: int, header: StepHeader, lock: WriterLock) -> None:
    """Step b as one that follows step a, with the same state and under the same name."""
    layout, chain_a = files.layout, files.chain(a)
    base = files.base()
    assert base.settings is not None  # the base is a keyframe
    parent = base if base.settings.against == "base" else chain_a[-1]
    new = files.rebuild(files.chain(header.file.step))
    if header.file.kind == KEYFRAME:
        old = files.rebuild(chain_a)
        changed = sum(count_changes(layout, old, new, files.backend).values())
        written = replace(header, previous_step=a, changed=changed)
        write_step(written, new, replace=True, require_lock=lock.require_held)
        return
    old = dict(read_keyframe(base)) if parent is base else files.rebuild(chain_a)
    masked = None
    if header.mask_digest:
        masked = MaskedState(LogMask.load(files.directory, header, layout), layout, old)
    patch = encode(layout, old, new, base.settings.level, files.backend, masked=masked)
    written = replace(
        header,
        previous_step=a,
        parent_step=parent.file.step,
        parent_digest=parent.result_digest,
        changed=sum(patch.counts.values()),
        level=base.settings.level,
        masked=patch.mask is not None,
        payload_digest="",
    )
    write_step(written, patch.parts(), replace=True, require_lock=lock.require_held)
