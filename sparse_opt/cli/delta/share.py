"""`sparse-opt delta diff|apply|show|merge|push`: deltas of checkpoints, which are read and written tensor by tensor."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, DataError, DeltaError, listed
from ...progress import progress_bar
from ...tables import format_bytes, table
from ..common import format_percent, print_json

if TYPE_CHECKING:
    from torch import Tensor

    from ...analysis import Checkpoint
    from ...delta import SparseDelta
    from ...delta.state import TensorSpec

# Not copied from the base: weights, which are written or are of other formats, and its model card.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".md")
_THREADS = 2  # each has one tensor in memory


def run_diff(args: Namespace) -> None:
    """Write the delta between two checkpoints."""
    from ...delta import SparseDelta
    from ...delta.state import StateLayout

    base, tuned = _checkpoint(args.base), _checkpoint(args.tuned)
    layouts = [StateLayout(tuple(found.specs.values()), {}, frozenset()) for found in (base, tuned)]
    if differences := layouts[0].mismatches(layouts[1], args.base):
        raise DeltaError(f"{args.tuned} is not trained from {args.base}: {listed(differences, '; ')}")
    name, _, revision = args.base.partition("@")
    metadata = {"base_model": name, **({"base_revision": revision} if revision else {})}
    with progress_bar(total=len(base.specs), what="diff", unit="tensor") as bar:

        def read(spec: TensorSpec) -> tuple[Tensor, Tensor]:
            bar.update()
            return base.read(spec.name), tuned.read(spec.name)

        delta = SparseDelta.of_tensors(layouts[0], read, metadata=metadata)
    _save(delta, args)


def run_apply(args: Namespace) -> None:
    """Write the checkpoint that a delta makes of its base, with the base's other files."""
    from ...delta import SparseDelta
    from ...files import check_new_folder, new_folder, writing

    delta = SparseDelta.from_pretrained(args.delta)
    check_new_folder(args.output_dir, "output_dir")
    folder = _folder(args.base or _base_of(delta, "BASE"))
    base = _checkpoint(str(folder))
    shards = sorted(set(base.files.values()))
    if outside := [path for path in shards if path.parent != folder]:
        raise DataError(f"{folder}: its index names {outside[0]}, expected a file in the folder")
    # A checkpoint has tied tensors under one of their names, or under several.
    firsts = {name: name for name in delta.layout.names} | dict(delta.layout.aliases)
    if missing := set(delta.layout.names) - {firsts.get(name) for name in base.specs}:
        raise DeltaError(f"{folder}: has no tensor {min(missing)}, which the delta {args.delta} expects")
    with writing(args.output_dir), new_folder(args.output_dir) as aside:
        with progress_bar(total=len(base.specs), what="apply", unit="tensor") as bar:
            for path in shards:
                _write_shard(path, aside / path.name, delta, firsts, bar)
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in _NOT_COPIED and not path.name.startswith("."):
                shutil.copyfile(path, aside / path.name)
    found = {"checkpoint": args.output_dir, "changed": delta.changed, "result_digest": delta.result_digest}
    if args.json:
        print_json(found)
    else:
        print(f"{args.output_dir}: {delta.changed:,} elements changed, state digest {delta.result_digest}")


def _write_shard(path: Path, target: Path, delta: SparseDelta, firsts: dict[str, str], bar: Any) -> None:
    """Write a safetensors file with the trained tensors: the base's header, then `_THREADS` tensors at a time."""
    import torch

    from ...tensor_file import open_tensors

    specs = {spec.name: spec for spec in delta.layout.tensors}
    threads, thread = torch.get_num_threads(), local()

    def start() -> None:
        torch.set_num_threads(max(1, threads // _THREADS))
        thread.buffer = buffers.pop()

    def write(name: str) -> None:
        tensor = file.read(name, thread.buffer)
        if (spec := specs.get(firsts.get(name, ""))) is not None:
            if (tensor.dtype, tuple(tensor.shape)) != (spec.torch_dtype, spec.shape):
                raise DeltaError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {spec}")
            tensor = delta.trained(spec.name, tensor, in_place=True)
        with target.open("r+b") as out:
            begin = file.entries[name].begin
            out.seek(begin)
            out.write(tensor.view(-1).view(torch.uint8).numpy().data)
            # Starts to write to disk, so that the fsync at the end waits less.
            os.posix_fadvise(out.fileno(), begin, tensor.nbytes, os.POSIX_FADV_DONTNEED)

    with open_tensors(path) as file, path.open("rb") as content:
        size = content.read(8)
        target.write_bytes(size + content.read(int.from_bytes(size, "little")))
        largest = max((entry.nbytes for entry in file.entries.values()), default=0)
        buffers = [torch.empty(largest, dtype=torch.uint8, device="cpu") for _ in range(_THREADS)]
        try:
            with ThreadPoolExecutor(_THREADS, initializer=start) as pool:
                for _ in pool.map(write, file.names):
                    bar.update()
        finally:
            torch.set_num_threads(threads)


def run_show(args: Namespace) -> None:
    """Print what a delta changes: by layer, and the tensors of which it changes most."""
    from ...delta import SparseDelta
    from ...masks.parameters import group_by_layer, layer_label

    delta = SparseDelta.from_pretrained(args.delta)
    numels, counts = {spec.name: spec.numel for spec in delta.layout.tensors}, delta.counts
    layers = {
        layer_label(layer): {"elements": sum(n for n, _ in pairs), "changed": sum(c for _, c in pairs)}
        for layer, pairs in group_by_layer({name: (numels[name], counts[name]) for name in counts}).items()
    }
    found: dict[str, Any] = {
        "delta": args.delta,
        "metadata": delta.metadata,
        "base_digest": delta.base_digest,
        "result_digest": delta.result_digest,
        "bytes": delta.nbytes,
        "quantised_digests": delta.quantised_digests,
        "elements": delta.layout.numel,
        "changed": delta.changed,
        "layers": layers,
        "tensors": counts,
    }
    if args.json:
        print_json(found)
        return
    print(f"{args.delta}: {_summary(delta)}")
    for key, value in [*delta.metadata.items(), *((k, found[k]) for k in ("base_digest", "result_digest"))]:
        print(f"{key}: {value}")
    if delta.quantised_digests:
        print(f"quantised tensors of the base: {len(delta.quantised_digests)}")
    rows = [_row(layer, entry["elements"], entry["changed"]) for layer, entry in layers.items()]
    print("\n" + table(("layer", "elements", "changed", "share"), rows))
    most = sorted(counts, key=lambda name: (-counts[name] / max(1, numels[name]), name))[: args.largest]
    if rows := [_row(name, numels[name], counts[name]) for name in most if counts[name]]:
        print("\n" + table(("most changed tensors", "elements", "changed", "share"), rows))


def _row(name: str, elements: int, changed: int) -> tuple[str, str, str, str]:
    return name, f"{elements:,}", f"{changed:,}", format_percent(changed / max(1, elements))


def run_merge(args: Namespace) -> None:
    """Write the delta that makes the changes of two."""
    from ...delta import SparseDelta

    a, b = SparseDelta.from_pretrained(args.first), SparseDelta.from_pretrained(args.second)
    base = _checkpoint(args.base or _base_of(a, "--base"))
    # The checkpoint may have a tied tensor under another of its names than the layout.
    names = {a.layout.aliases.get(name, name): name for name in base.specs} | {name: name for name in base.specs}

    def read(spec: TensorSpec) -> Tensor:
        if spec.name not in names:
            raise DeltaError(f"{base.source}: has no tensor {spec.name}, which the delta {args.first} expects")
        return base.read(names[spec.name])

    _save(a.merged(b, read, add=args.sum), args)


def run_push(args: Namespace) -> None:
    """Upload a delta to the hub."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from ...delta import SparseDelta

    delta = SparseDelta.from_pretrained(args.delta)
    try:
        commit = delta.push_to_hub(args.repo, private=args.private or None)
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise DeltaError(f"{args.delta} cannot be pushed to {args.repo}: {' '.join(str(error).split())}") from error
    print(f"{args.repo}: {_summary(delta)}: {commit}")


def _save(delta: SparseDelta, args: Namespace) -> None:
    delta.save_pretrained(args.output_dir)
    if args.json:
        print_json({"delta": args.output_dir, "changed": delta.changed, "bytes": delta.nbytes})
    else:
        print(f"{args.output_dir}: {_summary(delta)}")


def _summary(delta: SparseDelta) -> str:
    numel, changed = delta.layout.numel, delta.changed
    each = f", {delta.nbytes / changed:.3f} bytes a changed element" if changed else ""
    share = format_percent(changed / max(1, numel))
    return f"{changed:,} of {numel:,} elements changed, {share}, {format_bytes(delta.nbytes)}{each}"


def _base_of(delta: SparseDelta, option: str) -> str:
    if not (name := delta.metadata.get("base_model")):
        raise ConfigError(f"the delta does not name its base: give {option}")
    revision = delta.metadata.get("base_revision")
    return name if Path(name).exists() or not revision else f"{name}@{revision}"


def _checkpoint(source: str) -> Checkpoint:
    from ...analysis import Checkpoint

    checkpoint = Checkpoint.open(source)
    if other := next((path for path in checkpoint.files.values() if path.suffix != ".safetensors"), None):
        raise DataError(f"{other}: expected a safetensors file: save it with save_pretrained")
    return checkpoint


def _folder(source: str) -> Path:
    """A checkpoint's folder: the given one, or that of the hub's cache with all files but weights of other formats."""
    if Path(source).exists():
        if not Path(source).is_dir():
            raise ConfigError(f"BASE is {source}, expected a checkpoint's folder or a name on the hub")
        return Path(source)
    from ...files import hub_folder

    name, _, revision = source.partition("@")
    return hub_folder(name, revision, ignore_patterns=[f"*{s}" for s in _NOT_COPIED if s != ".safetensors"])
