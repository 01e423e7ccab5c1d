"""The transport by a folder: a delta log with a mask, which the trainer writes and any number of receivers follow.

The log is an ordinary `sparse_opt.DeltaLog`: `sparse-opt delta` verifies it and rebuilds any step of it, and a receiver
can follow the log that a training run writes anyway. A step of the log is a version of the weights. The folder may be
on a network file system, and trainer and receivers need not run at the same time.

    log = DeltaLog.create(folder, model, mask=mask, keyframe_every=50)          # under FSDP2: docs/delta_logs.md
    for version in range(1, ...):
        ...
        optimizer.step()
        log.append(version)

The receiver holds the active values at the last step on the CPU, and applies new patches to these. All of them are
written to the weights, once for all steps that were logged since the last call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...delta import codec
from ...delta.chain import LogFiles
from ...delta.files import KEYFRAME, StepHeader, read_keyframe, read_payload, require_digests
from ...delta.patches import LogMask, by_dtype, unpack
from ...errors import DeltaLogError, WeightSyncError
from ...masks import MaskSet
from ...tensors import as_bits
from ..encoding import Layout
from ..index import choose
from ..receiver import WeightReceiver
from ..sender import ActiveValues, WeightSender

_POLL = 0.1  # seconds between two scans of the directory


class FolderReceiver:
    """Follows a delta log with a mask, and brings the weights of an inference engine to its last step.

    The weights outside of the mask must be those of the log: load the model that the run started from, or
    `DeltaLog.load` of any step. A step that changes other elements is refused. A receiver that starts late or again
    begins with the last keyframe, which it reads whole, and then reads only patches and later keyframes.

        receiver = FolderReceiver(WeightReceiver(model), "/shared/delta_logs_run")
        while True:
            version = receiver.receive()
            ...

    Args:
        weights: the receiver of the weights.
        directory: of the log; it may be created later.
        device: where digests of the values are computed; best that of the weights.
    """

    def __init__(self, weights: WeightReceiver, directory: str | Path, *, device: torch.device | str = "cpu") -> None:
        self.weights, self._device = weights, torch.device(device)
        self._files = LogFiles(Path(directory))
        self._at: MaskElements | None = None  # the last step that was applied
        self._needs_state = False

    def receive(self, timeout: float = 600.0) -> int:
        """Wait for a step after the last one applied, apply all that there are, and return the number of the last.

        If the run was continued from an earlier step (`DeltaLog.truncate`), that may be a smaller number.

        Raises:
            WeightSyncError: no step has come within `timeout` seconds, or the weights are not those of the mask.
            DeltaLogError: a file is damaged, missing or of another run, the log has no mask, or a step changes elements
                outside of the mask; names file and step.

            In all cases the weights have not changed.
        """
        deadline = time.monotonic() + timeout
        while True:
            found = self._next()
            if found is not None:
                return self._apply(found)
            if time.monotonic() >= deadline:
                last = "none was found" if self._at is None else f"the last one is {self._at.step}"
                raise WeightSyncError(f"{self._files.directory}: no new step within {timeout:g} s, {last}")
            time.sleep(_POLL)

    def _next(self) -> MaskElements | None:
        """Return the active values at the log's last step, or None if the weights have them."""
        listed = self._files.steps()
        if not listed:
            return None
        at = self._at
        if at is not None and not (at.step in listed and at.is_at(self._files.header(listed[at.step]))):
            at = None  # the step was removed, by a truncation
        if at is None:
            self._needs_state = True
            chain = self._files.chain(max(listed))
            return MaskElements.read(self._files, chain[0]).advanced(chain[1:])
        later = [step for step in listed if step > at.step]
        for step in later:
            chain = self._files.chain(step, after=at.header)
            if chain[0].file.kind == KEYFRAME:
                keyframe = MaskElements.read(self._files, chain[0])
                if len(chain) == 1:
                    keyframe.require_only_mask_changed(at)
                at = keyframe.advanced(chain[1:])
            else:
                at = at.advanced(chain)
        return at if later or self._needs_state else None

    def _apply(self, new: MaskElements) -> int:
        """Bring the weights to a step."""
        sender = WeightSender(_ValuesOf(new, self._device))
        self._at, self._needs_state = new, True  # until the receiver has taken it
        if self.weights.mask_digest != new.mask.digest:
            self.weights.receive(replace(sender.mask_message(), version=new.step))
        self.weights.receive(replace(sender.state_message(), version=new.step))
        self._needs_state = False
        return new.step


class MaskElements:
    """The elements of a log's mask at one of its steps, on the CPU.

    Attributes:
        mask: of the log.
        header: of the step.
        values: name -> [nnz] values of every logged tensor, in ascending order of their positions.
    """

    def __init__(self, files: LogFiles, log_mask: LogMask, header: StepHeader, values: dict[str, Tensor]) -> None:
        self._files, self._log_mask, self.header, self.values = files, log_mask, header, values

    @property
    def mask(self) -> MaskSet:
        return self._log_mask.mask

    @property
    def step(self) -> int:
        return self.header.file.step

    def is_at(self, header: StepHeader) -> bool:
        """Whether these are the elements at the step of a header."""
        return (self.step, self.header.result_digest) == (header.file.step, header.result_digest)

    @classmethod
    def read(cls, files: LogFiles, keyframe: StepHeader) -> MaskElements:
        """Read a keyframe, one tensor after the other; all of its digests are verified.

        Raises:
            DeltaLogError: the log has no mask, or the keyframe is damaged.
        """
        if not keyframe.mask_digest:
            raise DeltaLogError(f"{files.directory}: the log has no mask, expected one created with mask=")
        log_mask = LogMask.load(files.directory, keyframe, files.layout)
        none = torch.empty(0, dtype=torch.int32, device="cpu")
        values = {
            name: as_bits(tensor).index_select(0, log_mask.mask.indices.get(name, none)).view(tensor.dtype)
            for name, tensor in read_keyframe(keyframe)
        }
        return cls(files, log_mask, keyframe, values)

    def advanced(self, headers: Sequence[StepHeader]) -> MaskElements:
        """Return the elements after the patches of a chain, the first of which applies to this step.

        Raises:
            DeltaLogError: a patch is damaged, or changes elements outside of the mask.
        """
        if not headers:
            return self
        values = {name: tensor.clone() for name, tensor in self.values.items()}
        for header in headers:
            if not header.masked:
                raise DeltaLogError(f"{header.file.where}: changes elements outside of the mask {header.mask_digest}")
            require_digests(header, self._files.layout)
            patch = unpack(header, self._files.layout, self._log_mask, read_payload(header))
            for dtype, specs in by_dtype(self._files.layout).items():
                try:
                    codec.apply_([values[spec.name] for spec in specs], patch.groups[dtype])
                except codec.PatchError as error:
                    raise DeltaLogError(f"{header.file.where}: damaged: {error}") from error
        return MaskElements(self._files, self._log_mask, headers[-1], values)

    def require_only_mask_changed(self, before: MaskElements) -> None:
        """Raise DeltaLogError if the keyframe of this step has changed elements outside of the mask since `before`.

        A keyframe that does not state how many have changed is not checked.
        """
        pairs = ((tensor, before.values[name]) for name, tensor in self.values.items())
        inside = sum(int((as_bits(new) != as_bits(old)).sum()) for new, old in pairs)
        if self.header.changed is not None and self.header.changed != inside:
            outside = self.header.changed - inside
            raise DeltaLogError(f"{self.header.file.where}: changes {outside} elements outside of the mask")


class _ValuesOf(ActiveValues):
    """The active values at a step of a log, on a device."""

    def __init__(self, elements: MaskElements, device: torch.device) -> None:
        self._values, self.mask, self.device = elements.values, elements.mask, device
        self.layout = Layout.of(elements.mask, elements.values)
        self.backend = choose(device, None)

    def take(self) -> dict[str, Tensor]:
        return {dtype: values.to(self.device) for dtype, values in self.layout.joined(self._values).items()}
