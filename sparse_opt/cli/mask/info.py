"""`sparse-opt mask info`: show the content of a mask file and the distribution of its active elements."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from ..output import print_json
from ..parser import add_json_flag
from .output import density_table, headline, stats_json, summary

_EPILOG = """Prints the density by part of the model (attention q, k, v, o, MLP gate, up, down, embeddings, norms,
lm_head) and by layer; the part 'other' has parameters of no known part, the layer 'none' those outside of layers.
--png draws a heat map of layers by parts.

examples:
  sparse-opt mask info masks/sparsity_90.0pct_magnitude_step100.safetensors
  sparse-opt mask info masks.pt --per_tensor
  sparse-opt mask info masks.safetensors --png density.png --json
"""


def add_parser(actions: Any) -> None:
    """Add the action to those of `sparse-opt mask`."""
    info = actions.add_parser("info", help="describe a mask", epilog=_EPILOG)
    info.add_argument("file", type=Path, metavar="FILE", help="mask file, .safetensors or .pt")
    info.add_argument("--per_tensor", action="store_true", help="list every tensor, not only every part and layer")
    info.add_argument("--png", type=Path, metavar="FILE", help="write a heat map of the density by layer and part")
    add_json_flag(info)


def run(args: Namespace) -> None:
    """Print the profile as text or JSON, and draw it if requested."""
    from ...masks.mask_set import MaskSet
    from ...masks.parameters import PART_LABELS, layer_label

    if args.png is not None:
        from ...analysis.output_files import require_matplotlib, save_png

        require_matplotlib("png")
    mask = MaskSet.load(args.file)
    layers = {layer_label(layer): stats for layer, stats in mask.per_layer().items()}
    parts = mask.per_part()
    if args.png is not None:
        from ...analysis.plots import mask_figure

        save_png(mask_figure(mask, args.file.name), args.png)
    if args.json:
        stats_by: dict[str, dict[Any, Any]] = {"layers": layers, "parts": dict(parts), "tensors": mask.per_tensor()}
        print_json(
            {"file": args.file, **summary(mask)}
            | {key: {name: stats_json(stats) for name, stats in group.items()} for key, group in stats_by.items()}
        )
        return
    lines = [str(args.file), headline(mask), f"digest {mask.digest}"]
    lines += [f"{key} {value}" for key, value in sorted(mask.metadata.items())]
    lines += ["", density_table("part", {PART_LABELS[part]: stats for part, stats in parts.items()})]
    lines += ["", density_table("layer", layers)]
    if args.per_tensor:
        lines += ["", density_table("tensor", mask.per_tensor())]
    if args.png is not None:
        lines += ["", f"picture {args.png}"]
    print("\n".join(lines))
