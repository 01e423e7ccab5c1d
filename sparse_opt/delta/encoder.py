"""StepCoder: encodes the changes of a model's state on its device, into a step that the writer can write."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DeltaLogError, MaskError
from ..masks.mask_set import MaskSet
from ..tensors import HostCopy, as_bits, materialized
from .chain import LogFiles
from .digest import StateDigest
from .files import KEYFRAME, MASK_NAME, PATCH, StepHeader, step_file, write_step
from .lock import WriterLock, require_no_log
from .patches import LogMask, MaskedState, StatePatch, by_dtype, copy_, encode
from .state import StateLayout
from .writer import StepJob


@dataclass
class StepCoder:
    """Encodes the steps of a log.

    Attributes:
        coded_against: the state that the next patch is coded against, on the model's devices.
        since_keyframe: number of patches after the last keyframe.
        masked: the mask's elements of `coded_against`; None until a step needs them.
    """

    base: StepHeader
    mask: LogMask | None
    coded_against: dict[str, Tensor]
    since_keyframe: int
    masked: MaskedState | None = None

    @property
    def layout(self) -> StateLayout:
        assert self.base.layout is not None  # the base is a keyframe
        return self.base.layout

    @torch.no_grad()
    def job(self, step: int, tensors: Mapping[str, Tensor]) -> StepJob:
        """Encode a step for the writer, and update `coded_against`. After an error the coder is of no use.

        Args:
            tensors: the tensors of the layout.
        """
        layout, names, every = self.layout, self.layout.names, self.base.keyframe_every
        new = _gathered(layout, tensors)
        # The model may have been moved to another device.
        old = self.coded_against = {name: tensor.to(new[name].device) for name, tensor in self.coded_against.items()}
        digests: list[StateDigest] = []
        # On a GPU all digests are computed while the host waits for a sample; on a CPU those of changed tensors, later.
        early = all(tensor.is_cuda for tensor in new.values())

        def meanwhile() -> None:
            if early and not digests:
                digests.append(StateDigest.start([new[name] for name in names]))

        patch: StatePatch | None = None
        differ = list(range(len(names)))
        if every is not None and self.since_keyframe + 1 >= every:
            changed = sum(int((as_bits(old[name]) != as_bits(new[name])).sum()) for name in names)
        else:
            patch = encode(layout, old, new, masked=self._masked(), advance=True, meanwhile=meanwhile)
            counts = patch.counts
            changed = sum(counts.values())
            if patch.nbytes > layout.nbytes:
                patch = None
            else:
                differ = [i for i, name in enumerate(names) if counts[name]]
        if patch is None:
            copy_(old, new, names)
            self.masked = None  # of the old bits
        if digests:
            differ = list(range(len(names)))
        else:
            digests = [StateDigest.start([new[names[i]] for i in differ])]
        header = StepHeader(
            file=step_file(self.base.file.path.parent, step, KEYFRAME if patch is None else PATCH),
            run_id=self.base.run_id,
            changed=changed,
            numel=layout.numel,
            mask_digest=self.base.mask_digest,
            masked=patch is not None and patch.mask is not None,
            layout=layout if patch is None else None,
            log_metadata=self.base.log_metadata if patch is None else None,
            keyframe_every=every if patch is None else None,
        )
        # Copied, because training modifies the state, and safetensors refuses tensors that share a storage.
        payload = {name: new[name].to("cpu", copy=True) for name in names} if patch is None else patch.parts()
        copy = HostCopy([*payload.values()], aside=True)
        self.since_keyframe = 0 if patch is None else self.since_keyframe + 1
        return StepJob(header, tuple(payload), copy, digests[0], tuple(differ))

    def _masked(self) -> MaskedState | None:
        """Return the mask's elements of `coded_against`, or None if the log has no mask."""
        if self.mask is not None and self.masked is None:
            self.masked = MaskedState(self.mask, self.layout, self.coded_against)
        return self.masked


def begin(
    layout: StateLayout,
    tensors: Mapping[str, Tensor],
    keyframe_every: int | None,
    mask: MaskSet | None,
    metadata: Mapping[str, str],
    lock: WriterLock,
) -> StepCoder:
    """Write a log's mask and its first step, which are on disk when this returns.

    Raises:
        DeltaLogError: a file cannot be written, the lock was lost, or a log was created meanwhile.
    """
    directory = lock.directory
    require_no_log(directory)
    log_mask = None if mask is None else LogMask(mask)
    coded_against = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    digests = StateDigest.start([coded_against[name] for name in layout.names]).result()
    header = StepHeader(
        file=step_file(directory, 0, KEYFRAME),
        run_id=secrets.token_hex(16),
        result_digest=layout.state_digest(digests),
        tensor_digests=digests,
        changed=0,
        numel=layout.numel,
        mask_digest="" if log_mask is None else log_mask.digest,
        layout=layout,
        log_metadata=dict(metadata),
        keyframe_every=keyframe_every,
    )
    if log_mask is not None:
        # Replaces the mask of a creation that was killed, but not the mask of another log.
        lock.require_held(header.file.where)
        try:
            log_mask.mask.save(directory / MASK_NAME)
        except MaskError as error:
            raise DeltaLogError(f"{header.file.where}: {error}") from error
    write_step(header, {name: tensor.cpu() for name, tensor in coded_against.items()}, require_lock=lock.require_held)
    return StepCoder(header, log_mask, coded_against, 0)


def resume(files: LogFiles) -> tuple[StepCoder, StepHeader]:
    """Rebuild the coder for the next step from the files; return it and the header of the last step."""
    base, listed = files.base(), files.steps()
    chain = files.chain(max(listed))
    mask = LogMask.load(files.directory, base, files.layout) if base.mask_digest else None
    since_keyframe = [file.kind for file in listed.values()][::-1].index(KEYFRAME)
    return StepCoder(base, mask, files.rebuild(chain), since_keyframe), chain[-1]


def resolved(mask: MaskSet, layout: StateLayout, tensors: Mapping[str, Tensor], directory: Path) -> MaskSet:
    """Return the mask under the names of the state. Raises DeltaLogError if it does not fit."""
    tied = {alias: tensors[name] for alias, name in layout.aliases.items()}
    try:
        return mask.resolve({**tensors, **tied})
    except MaskError as error:
        raise DeltaLogError(f"{directory}: {error}") from error


def _gathered(layout: StateLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors whose memory holds their bits, with all of one dtype on the device of the first."""
    gathered: dict[str, Tensor] = {}
    for specs in by_dtype(layout).values():
        device = tensors[specs[0].name].device
        gathered |= {spec.name: materialized(tensors[spec.name].to(device)) for spec in specs}
    return gathered
