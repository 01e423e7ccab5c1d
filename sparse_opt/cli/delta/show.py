"""`sparse-opt delta list|info`: show the content of a log."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...tables import format_bytes, table
from ..common import format_percent, print_json

if TYPE_CHECKING:
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
    print(table(("step", "kind", "changed", "share", "bytes", "B/change"), rows, n_words=2))
    print(
        f"{totals['steps']} steps of {log.layout.numel:,} elements, {format_bytes(totals['bytes'])}: "
        f"whole states {totals['whole_states']}, {format_bytes(totals['whole_states_bytes'])}; "
        f"patches {totals['patches']}, {format_bytes(totals['patches_bytes'])}"
        + (f", {totals['bytes_per_change']:.3f} bytes a changed element" if totals["bytes_per_change"] else "")
    )


def run_info(args: Namespace) -> None:
    """Print the settings of a log, and the dtypes of its tensors."""
    from ...delta.log import DeltaLog
    from ...masks.parameters import tied_text

    log = DeltaLog.open(args.delta_log_dir)
    layout, steps = log.layout, log.steps
    dtypes = _dtypes(layout)
    settings = {"run_id": log.run_id, "keyframe_every": log.keyframe_every, "mask_digest": log.mask_digest or None}
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
    }
    if args.json:
        print_json(content)
        return
    lines = [f"{log.directory}: delta log, {format_bytes(content['bytes'])}"]
    lines.append(f"steps: {len(steps)}, {steps[0]} to {steps[-1]}")
    lines += [f"{key}: {value}" for key, value in settings.items() if value is not None]
    lines.append(f"state: {len(layout.tensors)} tensors, {format_bytes(content['state_bytes'])}")
    lines += tied_text(layout.aliases)
    lines += [f"{key}: {value}" for key, value in log.metadata.items()]
    rows = [(d, f"{e['tensors']:,}", f"{e['elements']:,}", format_bytes(e["bytes"])) for d, e in dtypes.items()]
    lines += ["", table(("dtype", "tensors", "elements", "bytes"), rows)]
    print("\n".join(lines))


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
        info.kind + (", mask" if info.masked else ""),
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
