"""From the files of a delta log to a state: the chain of headers from a keyframe to a step, and its patches applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from .delta_files import KEYFRAME, StepFile, StepHeader, read_header, read_keyframe, read_patch, require_tensor
from .delta_state import StateLayout
from .errors import DeltaLogError


def read_base(directory: Path, files: Mapping[int, StepFile]) -> StepHeader:
    """The header of the log's first file, which says what belongs to the log.

    Raises:
        DeltaLogError: there is no file, the first is not the keyframe that the log was begun with, or it is damaged.
    """
    if not files:
        raise DeltaLogError(f"{directory}: holds no delta log (no step_*.safetensors file)")
    first = files[min(files)]
    if first.kind != KEYFRAME:
        raise DeltaLogError(f"{first.where}: is the first file and a patch: the keyframe that it needs is missing")
    header = read_header(first)
    if header.parent_step is not None:
        raise DeltaLogError(
            f"{first.where}: is the first file, but follows step {header.parent_step}, which is missing"
        )
    return header


def read_chain(base: StepHeader, files: Mapping[int, StepFile], step: int) -> list[StepHeader]:
    """Headers from the nearest keyframe to `step`, each checked to follow the one before and to be of the base's run.

    Raises:
        DeltaLogError: `step` is not logged, or a file of the chain is missing, damaged, foreign or out of place.
    """
    if step not in files:
        raise DeltaLogError(f"{base.file.path.parent}: step {step} is not logged")
    chain = [read_header(files[step])]
    require_member(base, chain[0])
    while chain[0].file.kind != KEYFRAME:
        child = chain[0]
        parent = files.get(parent_of(child))
        if parent is None:
            raise DeltaLogError(f"{child.file.where}: needs step {child.parent_step}, whose file is missing")
        header = read_header(parent)
        require_member(base, header)
        require_parent(child, header)
        chain.insert(0, header)
    return chain


def rebuild(layout: StateLayout, chain: Sequence[StepHeader]) -> dict[str, Tensor]:
    """The verified state at the end of a chain, on the CPU."""
    state = dict(read_keyframe(chain[0]))
    advance_(state, layout, chain[1:])
    return state


def advance_(state: dict[str, Tensor], layout: StateLayout, patches: Sequence[StepHeader]) -> None:
    """Apply patches to the state they follow, in place, and verify the result. On an error the state is void."""
    for header in patches:
        for group in read_patch(header, layout):
            group.apply_(state)
    if patches:
        for name, digest in zip(layout.names, patches[-1].tensor_digests, strict=True):
            require_tensor(patches[-1], name, state[name], digest)


def parent_of(header: StepHeader) -> int:
    """The step a patch is coded against. Raises DeltaLogError where it names none before itself."""
    if header.parent_step is None or header.parent_step >= header.file.step:
        raise DeltaLogError(f"{header.file.where}: is a patch and names no earlier step that it follows")
    return header.parent_step


def require_member(base: StepHeader, header: StepHeader) -> None:
    """Raise DeltaLogError unless the file is of the run that the base began."""
    if header.run_id != base.run_id:
        raise DeltaLogError(f"{header.file.where}: belongs to run {header.run_id}, this log is of run {base.run_id}")
    if header.layout is not None and header.layout != base.layout:
        raise DeltaLogError(f"{header.file.where}: its layout is not that of {base.file.path.name}")


def require_parent(child: StepHeader, parent: StepHeader) -> None:
    """Raise DeltaLogError unless the child was coded against the state that the parent leads to."""
    if child.parent_digest != parent.result_digest:
        raise DeltaLogError(
            f"{child.file.where}: follows the state {child.parent_digest}, "
            f"but step {parent.file.step} is the state {parent.result_digest}"
        )
