"""Rebuilds states from the files of a delta log: finds the chain from a keyframe to a step, and applies its patches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..errors import DeltaLogError
from .files import (
    KEYFRAME,
    StepFile,
    StepHeader,
    list_steps,
    read_header,
    read_keyframe,
    read_payload,
    require_digests,
    require_steps,
    require_tensor,
)
from .patches import LogMask, TensorPatches, unpack
from .state import StateLayout
from .state_log import require_logged


class LogFiles:
    """Reads the files of one log; caches the mask and headers after they have been checked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._base: StepHeader | None = None
        self._headers: dict[Path, tuple[tuple[int, ...], StepHeader]] = {}
        self._mask: LogMask | None = None

    def steps(self) -> dict[int, StepFile]:
        """The step files in ascending order, as the directory lists them now."""
        return list_steps(self.directory)[0]

    def header(self, file: StepFile) -> StepHeader:
        """`read_header` with a cache: an unchanged file is not read again."""
        try:
            found = file.path.stat()
        except OSError as error:
            raise DeltaLogError(f"{file.where}: the file is missing") from error
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        known = self._headers.get(file.path)
        if known is None or known[0] != version:
            known = self._headers[file.path] = (version, read_header(file))
        return known[1]

    def base(self) -> StepHeader:
        """Return the header of the log's first file, which identifies the log.

        Raises:
            DeltaLogError: there is no file, the first is not the keyframe that the log began with, or it is damaged.
        """
        if self._base is None:
            self._base = read_base(self, self.steps())
        return self._base

    @property
    def layout(self) -> StateLayout:
        """The tensors of the logged state."""
        layout = self.base().layout
        assert layout is not None  # the base is a keyframe
        return layout

    def mask(self, header: StepHeader) -> LogMask | None:
        """Return the mask that a patch is coded over, or None if it is coded over whole tensors."""
        if not header.masked:
            return None
        if self._mask is None or self._mask.digest != header.mask_digest:
            self._mask = LogMask.load(self.directory, header, self.layout)
        return self._mask

    def chain(self, step: int, after: StepHeader | None = None) -> list[StepHeader]:
        """Return the headers from the nearest keyframe to `step`, and check that each follows the one before.

        Args:
            after: if the chain reaches this step before a keyframe, it begins with the patch that follows the step.

        Raises:
            DeltaLogError: `step` is not logged, or a file of the chain is missing, damaged, of another log or of
                another step.
        """
        base, files = self.base(), self.steps()
        require_logged(self.directory, step, files)
        chain = [self.header(files[step])]
        require_member(base, chain[0])
        while chain[-1].file.kind != KEYFRAME:
            child = chain[-1]
            parent_step = parent_of(child)
            if after is not None and parent_step == after.file.step:
                require_parent(child, after)
                break
            if parent_step not in files:
                raise DeltaLogError(f"{child.file.where}: needs step {parent_step}, whose file is missing")
            parent = self.header(files[parent_step])
            require_member(base, parent)
            require_parent(child, parent)
            chain.append(parent)
        return chain[::-1]

    def state(self, step: int) -> dict[str, Tensor]:
        """Return the verified state at a step, on the CPU."""
        return self.rebuild(self.chain(step))

    def rebuild(self, chain: Sequence[StepHeader]) -> dict[str, Tensor]:
        """Return the verified state at the end of a chain, on the CPU."""
        state = dict(read_keyframe(chain[0]))
        self.advance_(state, chain[1:])
        return state

    def advance_(self, state: dict[str, Tensor], patches: Sequence[StepHeader]) -> None:
        """Apply patches to a state in place, and verify the result. After an error the state is undefined."""
        for header in patches:
            require_digests(header, self.layout)
            patch = unpack(header, self.layout, self.mask(header), read_payload(header))
            patch.apply_(state, header.file.where)
        if patches:
            for name, digest in zip(self.layout.names, patches[-1].tensor_digests, strict=True):
                require_tensor(patches[-1], name, state[name], digest)

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, the named tensor at that step) for ascending steps, updating one tensor in place."""
        number, patches = self.layout.names.index(name), TensorPatches(self.layout, name)
        at: StepHeader | None = None
        tensor: Tensor | None = None
        for step in steps:
            chain = self.chain(step, after=at) if at is None or at.file.step != step else []
            if chain and chain[0].file.kind == KEYFRAME:
                # A private copy, since the caller's tensors may still share memory with the tensor yielded before.
                tensor = dict(read_keyframe(chain[0], [name]))[name]
                followed = chain[1:]
            else:
                followed = chain
            assert tensor is not None  # the first chain begins with a keyframe
            if followed:
                self._advance_tensor_(tensor, name, number, patches, followed)
            at = chain[-1] if chain else at
            yield step, tensor

    def _advance_tensor_(
        self, tensor: Tensor, name: str, number: int, patches: TensorPatches, chain: Sequence[StepHeader]
    ) -> None:
        last = chain[-1]
        require_digests(last, self.layout)
        try:
            for header in chain:
                patches.apply_(header, self.mask(header), tensor)
            require_tensor(last, name, tensor, last.tensor_digests[number])
        except DeltaLogError:
            # Find the damaged file of the chain by the payload digests.
            for header in chain:
                read_payload(header)
            raise


def read_base(files: LogFiles, listed: Mapping[int, StepFile]) -> StepHeader:
    """See `LogFiles.base`."""
    require_steps(files.directory, listed)
    first = listed[min(listed)]
    if first.kind != KEYFRAME:
        raise DeltaLogError(f"{first.where}: is the first file and a patch: the keyframe that it needs is missing")
    header = files.header(first)
    if header.previous_step is not None:
        raise DeltaLogError(
            f"{first.where}: is the first file, but follows step {header.previous_step}, which is missing"
        )
    _require_same_run(files, header, [listed[step] for step in sorted(listed)[1:3]])
    return header


def _require_same_run(files: LogFiles, base: StepHeader, others: Sequence[StepFile]) -> None:
    """Raise DeltaLogError if the first file is of another log than all others."""
    runs = []
    for file in others:
        with contextlib.suppress(DeltaLogError):  # a damaged file is reported when its step is read
            runs.append(files.header(file).run_id)
    if runs and base.run_id not in runs:
        raise DeltaLogError(
            f"{base.file.where}: is the first file and belongs to run {base.run_id}, but step {others[0].step} "
            f"belongs to run {runs[0]}"
        )


def parent_of(header: StepHeader) -> int:
    """Return the step that a patch is coded against. Raises DeltaLogError if it is not an earlier step."""
    if header.parent_step is None or header.parent_step >= header.file.step:
        raise DeltaLogError(f"{header.file.where}: parent step is {header.parent_step}, expected an earlier step")
    return header.parent_step


def require_member(base: StepHeader, header: StepHeader) -> None:
    """Raise DeltaLogError unless the file belongs to the log of the base."""
    where = header.file.where
    if header.run_id != base.run_id:
        raise DeltaLogError(f"{where}: belongs to run {header.run_id}, expected run {base.run_id} of this log")
    if header.layout is not None and header.layout != base.layout:
        raise DeltaLogError(f"{where}: its layout differs from that of {base.file.path.name}")
    if header.mask_digest != base.mask_digest:
        raise DeltaLogError(
            f"{where}: belongs to a log with the mask {header.mask_digest or 'none'}, "
            f"expected {base.mask_digest or 'none'}, the mask of this log"
        )


def require_parent(child: StepHeader, parent: StepHeader) -> None:
    """Raise DeltaLogError unless the child was coded against the state of the parent's step."""
    if child.parent_digest != parent.result_digest:
        raise DeltaLogError(
            f"{child.file.where}: was coded against the state {child.parent_digest}, "
            f"but the state of step {parent.file.step} is {parent.result_digest}"
        )
