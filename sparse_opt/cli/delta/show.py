"""`sparse-opt delta list|info`: show the content of a log."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...progress import progress_bar
from ...tables import format_bytes, table
from ..output import format_percent, print_json

if TYPE_CHECKING:
    from ...delta.log import DeltaLog
    from ...delta.state import StateLayout
    from ...delta.writer import StepInfo


def run_list(args: Namespace) -> None:
    """Print every step and the totals."""
    from ...delta.log import DeltaLog

    log = DeltaLog.open(args.delta_log_dir)
    infos = log.info()
    totals = _totals(infos)
    if args.json:
        print_json({"steps": [_step_fields(info) for info in infos], "totals": totals})
        return
    rows = [_step_row(info) for info in infos]
    print(table(("step", "kind", "level", "changed", "share", "bytes", "B/change"), rows, n_words=3))
    print(
        f"{totals['steps']} steps of {log.layout.numel:,} elements, {format_bytes(totals['bytes'])}: "
        f"whole states {totals['whole_states']}, {format_bytes(totals['whole_states_bytes'])}; "
        f"patches {totals['patches']}, {format_bytes(totals['patches_bytes'])}"
        + (f", {totals['bytes_per_change']:.3f} bytes a changed element" if totals["bytes_per_change"] else "")
    )


def run_info(args: Namespace) -> None:
    """Print information on the whole log, or on one step."""
    if args.largest < 0:
        raise ConfigError(f"option 'largest' is {args.largest}: expected 0 or more")
    from ...delta.log import DeltaLog

    log = DeltaLog.open(args.delta_log_dir)
    if args.step is None:
        _info_of_log(log, args)
    else:
        _info_of_step(log, args)


def _info_of_log(log: DeltaLog, args: Namespace) -> None:
    layout, steps = log.layout, log.steps
    largest = sorted(layout.tensors, key=lambda spec: (-spec.numel, spec.name))[: args.largest]
    dtypes = _dtypes(layout)
    settings = {"run_id": log.run_id, **asdict(log.settings), "mask_digest": log.mask_digest or None}
    content: dict[str, Any] = {
        "directory": log.directory,
        "bytes": sum(path.stat().st_size for path in log.directory.glob("*.safetensors")),
        "steps": {"count": len(steps), "first": steps[0], "last": steps[-1]},
        **settings,
        "tensors": len(layout.tensors),
        "elements": layout.numel,
        "state_bytes": layout.nbytes,
        "dtypes": dtypes,
        "buffers": len(layout.buffers),
        "tied": dict(layout.aliases),
        "metadata": log.metadata,
        "largest": [{"name": s.name, "dtype": s.dtype, "shape": s.shape, "elements": s.numel} for s in largest],
    }
    if args.json:
        print_json(content)
        return
    lines = [f"{log.directory}: delta log, {format_bytes(content['bytes'])}"]
    lines.append(f"steps: {len(steps)}, {steps[0]} to {steps[-1]}")
    lines += [f"{key}: {value}" for key, value in settings.items() if value is not None]
    lines.append(f"state: {len(layout.tensors)} tensors, {format_bytes(content['state_bytes'])}")
    lines += _tied(layout)
    lines += [f"{key}: {value}" for key, value in log.metadata.items()]
    rows = [(d, f"{e['tensors']:,}", f"{e['elements']:,}", format_bytes(e["bytes"])) for d, e in dtypes.items()]
    lines += ["", table(("dtype", "tensors", "elements", "bytes"), rows)]
    if largest:
        shown = [(s.name, s.dtype, " x ".join(map(str, s.shape)), f"{s.numel:,}") for s in largest]
        lines += ["", table(("largest tensors", "dtype", "shape", "elements"), shown, n_words=3)]
    print("\n".join(lines))


def _info_of_step(log: DeltaLog, args: Namespace) -> None:
    steps = log.steps
    digest = log.digest(args.step)
    place = steps.index(args.step)
    before = steps[place - 1] if place else None
    counts = {} if before is None else _changes(log, before, args.step)
    content: dict[str, Any] = {"step": args.step, "digest": digest, "since": before}
    if before is not None:
        changed = sum(counts.values())
        content |= {"changed": changed, "share": changed / log.layout.numel if log.layout.numel else 0.0}
        content["dtypes"] = _changes_by_dtype(log.layout, counts)
        content["tensors"] = counts
    if args.json:
        print_json(content)
        return
    print(f"step {args.step}: state digest {digest}")
    if before is None:
        print("the base: there is no step before it")
        return
    share = format_percent(content["share"])
    print(f"changed since step {before}: {content['changed']:,} of {log.layout.numel:,}, {share}")
    by_dtype = [
        (d, f"{e['elements']:,}", f"{e['changed']:,}", format_percent(e["share"])) for d, e in content["dtypes"].items()
    ]
    print("\n" + table(("dtype", "elements", "changed", "share"), by_dtype))
    numels = {spec.name: spec.numel for spec in log.layout.tensors}
    most = sorted(counts, key=lambda name: (-counts[name], name))[: args.largest]
    rows = [(n, f"{numels[n]:,}", f"{counts[n]:,}", format_percent(counts[n] / max(1, numels[n]))) for n in most]
    if rows:
        print("\n" + table(("most changed tensors", "elements", "changed", "share"), rows))
    if log.layout.aliases:
        print("\n" + "\n".join(_tied(log.layout)))


def _changes(log: DeltaLog, before: int, step: int) -> dict[str, int]:
    """Name -> elements whose bits differ between two steps."""
    from ...tensors import as_bits

    counts = {}
    for name in progress_bar(log.layout.names, what="compare", unit="tensor"):
        old, new = (tensor.clone() for _, tensor in log.tensor_states(name, [before, step]))
        counts[name] = int((as_bits(old) != as_bits(new)).sum())
    return counts


def _changes_by_dtype(layout: StateLayout, counts: dict[str, int]) -> dict[str, dict[str, Any]]:
    elements, changed = Counter[str](), Counter[str]()
    for spec in layout.tensors:
        elements[spec.dtype] += spec.numel
        changed[spec.dtype] += counts[spec.name]
    return {
        dtype: {"elements": n, "changed": changed[dtype], "share": changed[dtype] / n if n else 0.0}
        for dtype, n in elements.items()
    }


def _tied(layout: StateLayout) -> list[str]:
    from ...masks.parameters import tied_text

    return tied_text(layout.aliases)


def _dtypes(layout: StateLayout) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for spec in layout.tensors:
        entry = found.setdefault(spec.dtype, {"tensors": 0, "elements": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["elements"] += spec.numel
        entry["bytes"] += spec.numel * spec.element_size
    return found


def _step_fields(info: StepInfo) -> dict[str, Any]:
    return {**asdict(info), "share": info.share, "bytes_per_change": info.bytes_per_change}


def _step_row(info: StepInfo) -> tuple[str, ...]:
    counted = info.step > 0
    return (
        str(info.step),
        info.kind,
        info.level + (", mask" if info.masked else ""),
        f"{info.changed:,}" if counted and info.changed is not None else "",
        format_percent(info.share) if counted and info.share is not None else "",
        format_bytes(info.bytes),
        "" if info.bytes_per_change is None else f"{info.bytes_per_change:.3f}",
    )


def _totals(infos: list[StepInfo]) -> dict[str, Any]:
    patches = [info for info in infos if info.parent_step is not None]
    whole = [info for info in infos if info.parent_step is None]
    changed, size = sum(info.changed or 0 for info in patches), sum(info.bytes for info in patches)
    return {
        "steps": len(infos),
        "bytes": sum(info.bytes for info in infos),
        "whole_states": len(whole),
        "whole_states_bytes": sum(info.bytes for info in whole),
        "patches": len(patches),
        "patches_bytes": size,
        "patches_changed": changed,
        "bytes_per_change": size / changed if changed else None,
    }
