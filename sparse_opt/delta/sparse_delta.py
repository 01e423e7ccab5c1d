"""SparseDelta: what training changed, as a folder to share. docs/sharing.md has its use, docs/formats.md its bytes."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .. import __version__, quantised_layers
from ..errors import DeltaError, DeltaLogError, listed
from ..files import DamagedFile, hub_folder, one_line, write_safetensors, write_text
from ..masks.mask_set import MaskSet
from ..quantised_layers import QuantisedWeight
from ..tensor_file import open_tensors
from ..tensors import (
    as_bits,
    combined_digest,
    compact_json,
    dtype_name,
    holds_base_weights,
    materialized,
    metadata_digest,
    saved_tensors,
)
from .change import Change
from .codec import PatchError
from .digest import StateDigest
from .exchange import Exchange
from .files import level_error, payload_digest
from .state import StateLayout, TensorSpec, read_state

DELTA_FILE = "delta.safetensors"
CONFIG_FILE = "delta_config.json"
FORMAT = "sparse-opt delta"
FORMAT_VERSION = "1"
_DIGEST = re.compile("[0-9a-f]{32}")
_REMEDY = (
    "apply the delta with the version of sparse-opt that wrote it, sparse-opt delta apply DELTA BASE -o TUNED, "
    "and write it again with this one: sparse-opt delta diff BASE TUNED -o NEW_DELTA"
)

_CARD = """---
library_name: sparse-opt
{base_model}tags: [sparse-opt]
---
# {title}

What training changed in {base}: {changed:,} of {numel:,} weights, bit for bit.

```python
from sparse_opt import SparseDelta
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base_name}", dtype="auto"{options})
SparseDelta.from_pretrained("{repo}").apply_(model)
```

{facts}
"""

ModelOrState = nn.Module | Mapping[str, Tensor]
Weight = Tensor | QuantisedWeight


class SparseDelta:
    """The bits that differ between a base model and a trained one, encoded as in delta logs, with digests of both.

    It changes no other model than its base: every tensor of the model is compared with its digest before the first one
    is written, and every result with its own. docs/sharing.md has its use and its costs.

    Attributes:
        layout: the tensors of both models, tied ones once.
        changes: name -> `Change` of each tensor that changed.
        base_digests, result_digests: of each tensor of the layout, as in delta logs.
        metadata: strings; base_model, base_revision, quantization_config, mask_pattern and mask_digest where they are
            known.
        quantised_digests: name -> digest of the quantised bytes of each tensor that the base has quantised. Its other
            digests and its change are those of the dequantised weight.
    """

    def __init__(
        self,
        layout: StateLayout,
        changes: Mapping[str, Change],
        base_digests: Sequence[str],
        result_digests: Sequence[str],
        metadata: Mapping[str, str] | None = None,
        quantised_digests: Mapping[str, str] | None = None,
    ) -> None:
        self.layout, self.changes = layout, dict(changes)
        self.base_digests, self.result_digests = tuple(base_digests), tuple(result_digests)
        self.metadata, self.quantised_digests = dict(metadata or {}), dict(quantised_digests or {})
        self._digests = dict(zip(layout.names, zip(self.base_digests, self.result_digests, strict=True), strict=True))
        self._applied: WeakKeyDictionary[nn.Module, Exchange] = WeakKeyDictionary()

    # Making one

    @classmethod
    def from_models(
        cls,
        base: ModelOrState,
        trained: ModelOrState,
        *,
        mask: MaskSet | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SparseDelta:
        """Encode what differs between two models of one architecture, or two state dicts.

        Args:
            mask: the mask of the run, whose pattern and digest become metadata.
            metadata: strings to store; base_model and base_revision are those of the base's `config`, where it has one.

        Raises:
            DeltaError: names, shapes, dtypes or ties differ, or a tensor cannot be stored (sharded, on meta); or a
                quantised layer of the base has trained weights; or the trained model is inside of `base_weights()`.
        """
        from ..optim.quantised import current_weight, overlay_of, shows_base

        if isinstance(trained, nn.Module) and shows_base(_unwrapped(trained)):
            raise DeltaError("the trained model holds its base weights: leave base_weights() first")
        (layout, before), (other, after) = read_model(base, "the base"), read_model(trained, "the trained model")
        if differences := layout.mismatches(other, "the base"):
            raise DeltaError(f"the trained model is not of the base's architecture: {listed(differences, '; ')}")

        for name, weight in before.items():
            if isinstance(weight, QuantisedWeight) and (overlay := overlay_of(weight)) is not None:
                if overlay.is_trained():
                    raise DeltaError(f"the base: {name!r} has been trained over its quantised base: load it again")

        def read(spec: TensorSpec) -> tuple[Tensor, Tensor]:
            new = after[spec.name]
            new = current_weight(new) if isinstance(new, QuantisedWeight) else new
            return dense(before[spec.name]).to(new.device), new

        facts, digests = origin(base, mask) | dict(metadata or {}), quantised_digests(before)
        return cls.of_tensors(layout, read, metadata=facts, quantised=digests)

    @classmethod
    @torch.no_grad()
    def of_tensors(
        cls,
        layout: StateLayout,
        read: Callable[[TensorSpec], tuple[Tensor, Tensor]],
        *,
        metadata: Mapping[str, str] | None = None,
        quantised: Mapping[str, str] | None = None,
    ) -> SparseDelta:
        """Encode the differences of pairs of tensors, (base, trained), that `read` returns one after the other.

        Holds one pair. `quantised` becomes `quantised_digests`.
        """
        changes, digests = {}, []
        for spec in layout.tensors:
            old, new = (materialized(tensor.detach()) for tensor in read(spec))
            digests.append(StateDigest.start([old, new]).result())
            if digests[-1][0] != digests[-1][1]:
                changes[spec.name] = Change.between(old, new)
        base, result = zip(*digests, strict=True) if digests else ((), ())
        return cls(layout, changes, base, result, metadata, quantised)

    @classmethod
    def from_peft(cls, adapted: Any) -> SparseDelta:
        """Encode the change that the active adapters of a `peft.PeftModel` make when PEFT merges them.

        Raises:
            DeltaError: an adapter is merged already, or saves whole modules (`modules_to_save`); names the layer.
        """
        from .peft_adapters import merged_tensors

        layout, read, metadata = merged_tensors(adapted)
        return cls.of_tensors(layout, read, metadata=metadata)

    def merged(
        self, other: SparseDelta, base: nn.Module | Callable[[TensorSpec], Tensor], *, add: bool = False
    ) -> SparseDelta:
        """Return the delta that makes both changes to their common base.

        Elements that only one of the deltas changes get its bits. Others are refused or, with `add`, set to
        base + (a - base) + (b - base), computed in this order in fp32 (fp64 for fp64) and rounded once to the nearest
        number of their dtype, ties to even.

        Args:
            base: the model before training, or a function that returns the tensor of a spec.

        Raises:
            DeltaError: the bases differ, an element is changed by both, or cannot be added; names the tensor.
        """
        self._require_base_of(other)
        found = self._tensors_of(base) if isinstance(base, nn.Module) else {}

        def pair(spec: TensorSpec) -> tuple[Tensor, Tensor]:
            old = dense(found[spec.name]) if isinstance(base, nn.Module) else base(spec)
            a, b = self.trained(spec.name, old), other.trained(spec.name, old)
            return old, _both(spec, old, a, b, add=add)

        common = self.metadata.items() & other.metadata.items()
        quantised = self.quantised_digests.items() & other.quantised_digests.items()
        return SparseDelta.of_tensors(self.layout, pair, metadata=dict(common), quantised=dict(sorted(quantised)))

    def _require_base_of(self, other: SparseDelta) -> None:
        if differences := self.layout.mismatches(other.layout, "the first delta"):
            raise DeltaError(f"the deltas have different bases: {listed(differences)}")
        for name, (mine, _) in self._digests.items():
            if (theirs := other._digests[name][0]) != mine:
                raise DeltaError(f"the deltas have different bases: {name} has the digests {mine} and {theirs}")

    # What is in it

    @property
    def counts(self) -> dict[str, int]:
        """Name -> number of changed elements, of every tensor."""
        return {name: self.changes[name].changed if name in self.changes else 0 for name in self.layout.names}

    @property
    def changed(self) -> int:
        """Number of elements whose bits differ."""
        return sum(self.counts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded change, without the file's header."""
        return sum(part.nbytes for change in self.changes.values() for part in change.parts().values())

    @property
    def base_digest(self) -> str:
        """The digest of the base's state, as of a delta log's."""
        return self.layout.state_digest(self.base_digests)

    @property
    def result_digest(self) -> str:
        """The digest of the trained state."""
        return self.layout.state_digest(self.result_digests)

    def trained(self, name: str, base: Tensor, *, in_place: bool = False) -> Tensor:
        """Return the trained tensor of a name from the base's, or `base` itself if it did not change.

        Args:
            in_place: write it over `base`, whose contents are undefined after an error.

        Raises:
            DeltaError: `base` is not the tensor that the delta was made from, or the change is damaged.
        """
        before, after = self._digests[name]
        old = materialized(base.detach())
        if (found := StateDigest.start([old]).result()[0]) != before:
            raise DeltaError(f"{name} has the digest {found}, expected {before}: the delta is for {self._base()}")
        if name not in self.changes:
            return base
        new = old if in_place else old.clone()
        try:
            self.changes[name].apply_(new)
        except PatchError as error:
            raise DeltaError(f"the change of {name} is damaged: {one_line(error)}") from error
        if (found := StateDigest.start([new]).result()[0]) != after:
            raise DeltaError(f"the change of {name} is damaged: its result has the digest {found}, expected {after}")
        return new

    def _base(self) -> str:
        name, revision = self.metadata.get("base_model"), self.metadata.get("base_revision")
        found = (name or "another model") + (f" at revision {revision}" if revision else "")
        return f"{found}, quantised" if self.quantised_digests else found

    # Applying it

    def apply_(self, model: nn.Module) -> None:
        """Change a model that has the base's bits into the trained one, bit for bit, in place.

        Reads all tensors of the model once, to compare them with their digests. Nothing is written if it raises.
        Quantised layers keep their weights, and compute with the dequantised ones and the changes over them.

        Raises:
            DeltaError: the delta is applied already, the model has other bits, or lacks a tensor; or a quantised layer
                is trained or has a delta; names it.
        """
        model = _unwrapped(model)
        if model in self._applied:
            raise DeltaError("apply_: the delta is applied to this model already: call remove_ first")
        exchange = self.exchange(model)
        self._applied[model] = exchange
        try:
            exchange.enter_()
        except BaseException:
            del self._applied[model]
            exchange.leave_()
            raise

    def remove_(self, model: nn.Module) -> None:
        """Undo `apply_`, bit for bit. Deltas that change the same tensors are removed in the opposite order.

        Raises:
            DeltaError: the delta is not applied, or one of its tensors was changed since; nothing is removed then.
        """
        model = _unwrapped(model)
        if model not in self._applied:
            raise DeltaError("remove_: the delta is not applied to this model")
        exchange = self._applied[model]
        require_no_base_weights(exchange.tensors, "remove_")
        self.require_bits(exchange.tensors, "remove_", applied=True)
        exchange.leave_()
        del self._applied[model]

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """A context in which the delta is applied; it is removed on exit, also after an exception."""
        self.apply_(model)
        try:
            yield
        finally:
            self.remove_(model)

    def exchange(self, model: nn.Module) -> Exchange:
        """Decode the change for a model with the base's bits, without writing to it. Errors as in `apply_`."""
        with torch.no_grad():
            # All quantised layers compute in the same way as those of the trained model, also those without a change.
            run_lengths = {name: change.run_length for name, change in self.changes.items()}
            pairs = (
                (name, old, new, run_lengths.get(name, 1))
                for name, old, new in self.pairs(model)
                if name in self.changes or isinstance(old, QuantisedWeight)
            )
            return Exchange(_unwrapped(model), pairs)

    def pairs(self, model: nn.Module) -> Iterator[tuple[str, Weight, Tensor]]:
        """Yield (name, tensor or quantised layer, trained tensor) of a model with the base's bits. Errors as `apply_`.

        For a quantised layer, the trained tensor is in new memory; each of them is freed before the next one is made.
        """
        found = self._tensors_of(model)
        require_no_base_weights({n: t for n, t in found.items() if isinstance(t, Tensor)}, "apply_")
        for name, weight in found.items():
            yield name, weight, self._trained_weight(name, weight)

    def _trained_weight(self, name: str, weight: Weight) -> Tensor:
        old = dense(weight)
        expected = self.quantised_digests.get(name)
        if isinstance(weight, QuantisedWeight) and expected is not None:
            if (found := quantised_digests({name: weight})[name]) != expected:
                raise DeltaError(
                    f"{name} has quantised bytes of the digest {found}, expected {expected}: the delta is for "
                    f"{self._base()}"
                )
            if StateDigest.start([old]).result()[0] != self._digests[name][0]:
                raise DeltaError(
                    f"{name} has the base's quantised bytes, but dequantises to other bits on {old.device}: apply the "
                    "delta on a device, and with a version of the library, like those that it was made with"
                )
        return self.trained(name, old)

    def require_bits(self, tensors: Mapping[str, Tensor], call: str, *, applied: bool) -> None:
        """Raise a DeltaError unless the named tensors have the bits of the trained model, or those of the base."""
        for name, found in zip(tensors, StateDigest.start(list(tensors.values())).result(), strict=True):
            if found != self._digests[name][applied]:
                raise DeltaError(f"{call}: {name} was changed by other code: undo that change first")

    def _tensors_of(self, model: nn.Module) -> dict[str, Weight]:
        """Return name -> parameter, buffer or quantised layer of a model for each tensor of the layout."""
        layout, state = read_model(model, "the model")
        live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        found: dict[str, Weight] = {}
        for spec in self.layout.tensors:
            names = [spec.name, *(alias for alias, first in self.layout.aliases.items() if first == spec.name)]
            name = next((name for name in names if name in state or name in layout.aliases), None)
            if name is None:
                raise DeltaError(f"the model has no tensor {spec.name}: the delta is for {self._base()}")
            tensor = state[layout.aliases.get(name, name)]
            whole = tensor.whole if isinstance(tensor, QuantisedWeight) else tensor
            if (whole.dtype, tuple(whole.shape)) != (spec.torch_dtype, spec.shape):
                is_now = f"{dtype_name(whole)} {list(whole.shape)}"
                raise DeltaError(f"{spec.name} of the model is {is_now}, expected {spec}: load it in that dtype")
            if spec.name in self.changes and isinstance(tensor, Tensor):
                if name not in live or live[name].data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
                    raise DeltaError(f"{spec.name} of the model is not a contiguous parameter or buffer of that name")
                tensor = live[name]
            found[spec.name] = tensor
        return found

    # Files

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write `delta.safetensors` and `delta_config.json` into a folder, which is made if it is missing.

        Raises:
            DeltaError: a file cannot be written.
        """
        folder = Path(folder)
        header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "layout": self.layout.to_json(),
            "base_tensor_digests": "".join(self.base_digests),
            "result_tensor_digests": "".join(self.result_digests),
            "metadata": compact_json(self.metadata),
        }
        if self.quantised_digests:
            header["quantised_digests"] = compact_json(self.quantised_digests)
        payload = {f"{n}.{part}": t for n, change in self.changes.items() for part, t in change.parts().items()}
        header["payload_digest"] = payload_digest(payload)
        header["header_digest"] = metadata_digest(header)
        config = {
            **{key: header[key] for key in ("format", "format_version", "header_digest")},
            "base_digest": self.base_digest,
            "result_digest": self.result_digest,
            "changed": self.changed,
            "numel": self.layout.numel,
            "quantised_tensors": len(self.quantised_digests),
            "sparse_opt_version": __version__,
            "metadata": self.metadata,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(folder / DELTA_FILE, payload, header)
            write_text(folder / CONFIG_FILE, json.dumps(config, indent=1) + "\n")
        except (OSError, SafetensorError, UnicodeEncodeError) as error:
            raise DeltaError(f"{folder}: the delta cannot be written: {one_line(error)}") from error

    @classmethod
    def from_pretrained(
        cls, source: str | PathLike[str], *, revision: str | None = None, token: str | bool | None = None
    ) -> SparseDelta:
        """Read a delta from a folder, or from the hub or its cache. All bytes are verified by their digests.

        Args:
            source: a folder, or a name such as user/my-delta.
            revision, token: of the hub, as in `huggingface_hub.snapshot_download`.

        Raises:
            DataError: the hub has no such delta.
            DeltaError: there is no delta, or a file is damaged; names it.
        """
        folder = Path(source)
        if not folder.is_dir():
            folder = hub_folder(str(source), revision, token=token, allow_patterns=[DELTA_FILE, CONFIG_FILE])
        elif revision is not None:
            raise DeltaError(f"revision is {revision!r}, but {folder} is a folder, which has none")
        path = folder / DELTA_FILE
        try:
            config = json.loads((folder / CONFIG_FILE).read_bytes())
            with open_tensors(path) as file:
                header, payload = file.metadata, {name: file.read(name) for name in file.names}
        except FileNotFoundError as error:
            raise DeltaError(f"{folder}: holds no delta: {Path(str(error.filename)).name} is missing") from error
        except (OSError, DamagedFile, ValueError, RecursionError) as error:
            raise DeltaError(f"{folder}: the delta is damaged: {one_line(error)}") from error
        if any(name.endswith(".heads") for name in payload):  # a part of the patches that earlier versions called so
            raise DeltaError(f"{path}: {level_error('packed', _REMEDY)}")
        try:
            return cls._parsed(header, payload, config)
        except (DeltaError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DeltaError(f"{path}: damaged: {one_line(error)}") from error

    @classmethod
    def _parsed(cls, header: dict[str, str], payload: dict[str, Tensor], config: Any) -> SparseDelta:
        """Build the delta of a file. Raises errors without the file's name."""
        for key, expected in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
            if header.get(key) != expected:
                raise DeltaError(f"its {key} is {header.get(key)!r}, expected {expected!r}")
        rest = {key: value for key, value in header.items() if key != "header_digest"}
        for what, found, expected in (
            ("header_digest", metadata_digest(rest), header.get("header_digest", "")),
            (f"header_digest in {CONFIG_FILE}", config["header_digest"], header.get("header_digest", "")),
            ("payload_digest", payload_digest(payload), header["payload_digest"]),
        ):
            if found != expected:
                raise DeltaError(f"its {what} is {found!r}, expected {expected!r}")
        layout = StateLayout.from_json(header["layout"])
        base, result = (_DIGEST.findall(header[f"{which}_tensor_digests"]) for which in ("base", "result"))
        if not len(base) == len(result) == len(layout.tensors):
            raise DeltaError(f"it has {len(base)} and {len(result)} digests, expected {len(layout.tensors)} of each")
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in payload.items():
            name, _, part = key.rpartition(".")
            parts.setdefault(name, {})[part] = tensor
        changed = {n for n, before, after in zip(layout.names, base, result, strict=True) if before != after}
        if parts.keys() != changed:
            raise DeltaError(f"it has changes of {listed(sorted(parts.keys() ^ changed))} or lacks them")
        specs = {spec.name: spec for spec in layout.tensors}
        changes = {}
        for name, of_name in parts.items():
            try:
                changes[name] = Change.from_parts(of_name, specs[name])
            except PatchError as error:
                raise DeltaError(f"the change of {name}: {one_line(error)}") from error
        metadata, quantised = (
            {str(key): str(value) for key, value in json.loads(text).items()}
            for text in (header["metadata"], header.get("quantised_digests", "{}"))
        )
        changes = {name: changes[name] for name in layout.names if name in changes}
        return cls(layout, changes, base, result, metadata, quantised)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a delta",
    ) -> Any:
        """Upload the delta and a model card to a repository of the hub, which is created if it is missing.

        Returns what `huggingface_hub.HfApi.upload_folder` returns; its errors propagate.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            Path(folder, "README.md").write_text(self._card(repo), encoding="utf-8")
            return api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=commit_message)

    def _card(self, repo: str) -> str:
        name = self.metadata.get("base_model", "")
        is_on_hub = name.count("/") == 1 and not name.startswith((".", "/"))
        quantised = json.loads(self.metadata.get("quantization_config", "null"))
        facts = {"base_digest": self.base_digest, "result_digest": self.result_digest} | self.metadata
        return _CARD.format(
            base_model=f"base_model: {name}\n" if is_on_hub else "",
            title=repo.rpartition("/")[2],
            repo=repo,
            base=self._base(),
            base_name=name,
            options=f", quantization_config={quantised}" if quantised else "",
            changed=self.changed,
            numel=self.layout.numel,
            facts="\n".join(f"- {key}: `{value}`" for key, value in sorted(facts.items())),
        )

    # PEFT

    def to_peft(self, model: nn.Module, adapter_name: str = "default") -> Any:
        """Return the model with this change as a SHiRA adapter: a `peft.PeftModel`, whose `save_pretrained` writes it.

        PEFT adds fp32 differences to the weights. For 16-bit weights the sum is the trained weight; for fp32 weights it
        is rounded.

        Raises:
            DeltaError: PEFT cannot express the change: of another tensor than the weight of an `nn.Linear`, of more
                elements than a rank allows, not exactly, or of a quantised model; names the tensor. Or as `apply_`.
        """
        from .peft_adapters import shira_of

        if (name := next(iter(quantised_layers.find(model)), None)) is not None:
            raise DeltaError(f"to_peft: {name!r} is quantised: give the dequantised model, as save_merged writes it")
        changed = ((name, dense(old), new) for name, old, new in self.pairs(model) if name in self.changes)
        return shira_of(changed, model, adapter_name)

    def __repr__(self) -> str:
        return f"SparseDelta(of {self._base()}, {self.changed:,} of {self.layout.numel:,} elements changed)"


def origin(model: object, mask: MaskSet | None) -> dict[str, str]:
    """Return the metadata of a delta of this base, under this mask."""
    config = getattr(model, "config", None)
    is_quantised = isinstance(model, nn.Module) and bool(quantised_layers.find(model))
    quantization = getattr(config, "quantization_config", None) if is_quantised else None
    found = {
        "base_model": getattr(config, "name_or_path", None),
        "base_revision": getattr(config, "_commit_hash", None),
        "quantization_config": None if quantization is None else compact_json(quantization.to_diff_dict()),
        "mask_pattern": None if mask is None else mask.pattern,
        "mask_digest": None if mask is None else mask.digest,
    }
    return {key: str(value) for key, value in found.items() if value}


def _both(spec: TensorSpec, old: Tensor, a: Tensor, b: Tensor, *, add: bool) -> Tensor:
    """The tensor with the changes of both `a` and `b`, which are `old` itself where nothing changed."""
    if a is old or b is old:
        return b if a is old else a
    old, a, b = (materialized(tensor) for tensor in (old, a, b))
    of_a, of_b = (as_bits(tensor) != as_bits(old) for tensor in (a, b))
    both = of_a & of_b
    new = a.clone()
    as_bits(new)[of_b] = as_bits(b)[of_b]
    if not bool(both.any()):
        return new
    place = int(both.nonzero()[0])
    if not add or not old.is_floating_point():
        why = "" if not add else ", which has no floating-point numbers to add"
        raise DeltaError(f"{spec.name}: both deltas change {int(both.sum())} elements, the first at {place}{why}")
    wide = torch.promote_types(old.dtype, torch.float32)
    x, y, z = (tensor.view(-1)[both].to(wide) for tensor in (old, a, b))
    new.view(-1)[both] = (x + (y - x) + (z - x)).to(old.dtype)
    return new


def require_no_base_weights(tensors: Mapping[str, Tensor], call: str) -> None:
    """Raise a DeltaError inside of `base_weights()`, whose exit would write over the change."""
    if holds_base_weights(tensors.values()):
        raise DeltaError(f"{call}: the model holds its base weights: leave base_weights() first")


def _unwrapped(model: nn.Module) -> nn.Module:
    original: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile prefixes every name with "_orig_mod."
    return original


def dense(weight: Weight) -> Tensor:
    """Return the tensor itself, or the dequantised base weight of a quantised layer in new memory."""
    return weight.dequantised() if isinstance(weight, QuantisedWeight) else weight


def quantised_digests(weights: Mapping[str, Weight]) -> dict[str, str]:
    """Return name -> digest of the bytes of each quantised weight, as a checkpoint has them."""
    digests = {}
    for name, layer in weights.items():
        if isinstance(layer, QuantisedWeight):
            stored = {key: tensor.detach() for key, tensor in layer.stored().items()}
            found = zip(stored.items(), StateDigest.start(list(stored.values())).result(), strict=True)
            digests[name] = combined_digest((key, dtype_name(t), tuple(t.shape), digest) for (key, t), digest in found)
    return digests


def read_model(model_or_state: ModelOrState, what: str) -> tuple[StateLayout, dict[str, Weight]]:
    """Return the layout and the tensors of a model as `read_state` does; `what` names it in the DeltaError.

    A quantised weight has the shape and dtype of the dequantised one; the layer is returned in place of the tensor.
    """
    if not isinstance(model_or_state, nn.Module):
        return _read_state(model_or_state, what)
    model = _unwrapped(model_or_state)
    layers = quantised_layers.find(model)
    if not layers:
        return _read_state(model, what)
    saved = dict(saved_tensors(model))
    layout, tensors = _read_state({name: t for name, t in saved.items() if name not in layers}, what)
    weights: dict[str, Weight] = tensors | {layer.name: layer for layer in layers.values()}
    specs = {spec.name: spec for spec in layout.tensors}
    for layer in layers.values():
        specs[layer.name] = TensorSpec(layer.name, dtype_name(layer.whole), tuple(layer.whole.shape))
    aliases = {**layout.aliases, **{name: layer.name for name, layer in layers.items() if name != layer.name}}
    buffers = weights.keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return StateLayout(tuple(specs[n] for n in saved if n in specs), aliases, frozenset(buffers)), weights


def _read_state(model_or_state: ModelOrState, what: str) -> tuple[StateLayout, dict[str, Any]]:
    try:
        return read_state(model_or_state)
    except DeltaLogError as error:
        raise DeltaError(f"{what}: {error}") from error
