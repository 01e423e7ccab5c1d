"""`sparse-opt mask compare`: measure the overlap of masks and compare it with chance."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...tables import table
from ..common import add_json_flag, print_json

if TYPE_CHECKING:
    from ...analysis import Comparison, Overlap

_EPILOG = """For each pair of masks A and B:
  Jaccard   |A and B| / |A or B|
  of A      |A and B| / |A|, the share of A's active elements that B shares; 'of B' likewise
  'chance'  the expected value for random masks with the same density of every tensor: exact for 'of A' and 'of B', to
            second order for Jaccard; --json and --csv contain its standard deviation

Two masks are compared as a whole, by part of the model (attention q, k, v, o, MLP gate, up, down, embeddings, norms)
and by layer; for more masks, the table shows each pair as a whole, and --csv and --json contain everything, for
mixtures of experts each expert too (3.17: expert 17 of layer 3). Masks of different models are an error; --common
compares masks of one model over the tensors that all of them list.

examples:
  sparse-opt mask compare seed0.safetensors seed1.pt --per_tensor --png agreement_by_layer.png
  sparse-opt mask compare masks/*.safetensors --png overlap.png --csv overlap.csv
"""


def add_parser(actions: Any) -> None:
    """Add the action to those of `sparse-opt mask`."""
    compare = actions.add_parser(
        "compare", help="measure the overlap of masks, and compare it with chance", epilog=_EPILOG
    )
    compare.add_argument("files", type=Path, nargs="+", metavar="FILE", help="two or more mask files")
    compare.add_argument("--common", action="store_true", help="compare over the tensors that all masks list")
    compare.add_argument("--per_tensor", action="store_true", help="list every tensor")
    compare.add_argument(
        "--png", type=Path, metavar="FILE", help="write a heat map: of two masks by layer and part, of more by pair"
    )
    compare.add_argument("--csv", type=Path, metavar="FILE", help="write a table of all statistics")
    add_json_flag(compare)


def run(args: Namespace) -> None:
    """Compare the masks, write the requested files, and print tables or JSON."""
    from ...analysis import compare_masks, plots
    from ...analysis.records import write_csv
    from ...masks.mask_set import MaskSet

    labels = _labels(args.files)
    if args.png is not None:
        plots.require_matplotlib("png")
    masks = {label: MaskSet.load(file) for label, file in zip(labels, args.files, strict=True)}
    comparisons = compare_masks(masks, common=args.common)
    records = [record for pair in comparisons for record in _records(pair)]
    if args.csv is not None:
        write_csv(records, args.csv)
    if args.png is not None:
        is_pair = len(comparisons) == 1
        plots.save_png(plots.pair_figure(comparisons[0]) if is_pair else plots.comparison_figure(comparisons), args.png)
    if args.json:
        files = [
            {"name": label, "file": file, "nnz": mask.nnz, "density": mask.density, "digest": mask.digest}
            for (label, mask), file in zip(masks.items(), args.files, strict=True)
        ]
        print_json({"masks": files, "overlaps": records})
        return
    _print_tables(comparisons, args.per_tensor)
    for path in (args.png, args.csv):
        if path is not None:
            print(f"\nwrote {path}")


def _labels(files: Sequence[Path]) -> list[str]:
    """The file names without suffix, or the full paths if two names are equal."""
    if len(files) < 2:
        raise ConfigError(f"found one mask file, {files[0]}: expected two or more")
    for i, file in enumerate(files):
        if file in files[:i]:
            raise ConfigError(f"mask file {file} is given twice")
    stems = [file.stem for file in files]
    return stems if len(set(stems)) == len(stems) else [str(file) for file in files]


def _records(pair: Comparison) -> list[dict[str, Any]]:
    """The statistics of a pair as a whole, by part, layer and tensor, for CSV and JSON."""
    from ...masks.parameters import layer_label

    levels: dict[str, Mapping[str, Overlap]] = {
        "total": {"total": pair.total},
        "part": {str(part): overlap for part, overlap in pair.parts.items()},
        "layer": {layer_label(layer): overlap for layer, overlap in pair.layers.items()},
        "expert": {f"{layer_label(layer)}.{number}": overlap for (layer, number), overlap in pair.experts.items()},
        "tensor": pair.tensors,
    }
    return [
        {
            "first": pair.first,
            "second": pair.second,
            "level": level,
            "name": name,
            "numel": o.numel,
            "active_first": o.first,
            "active_second": o.second,
            "active_both": o.both,
            "jaccard": o.jaccard,
            "jaccard_chance": o.jaccard_chance,
            "jaccard_chance_sd": o.jaccard_chance_sd,
            "of_first": o.of_first,
            "of_first_chance": o.of_first_chance,
            "of_second": o.of_second,
            "of_second_chance": o.of_second_chance,
        }
        for level, overlaps in levels.items()
        for name, o in overlaps.items()
    ]


def _print_tables(comparisons: Sequence[Comparison], per_tensor: bool) -> None:
    from ...masks.parameters import PART_LABELS, layer_label

    if len(comparisons) > 1:
        rows = [(pair.first, pair.second, *_cells(pair.total)) for pair in comparisons]
        print(table(("A", "B", "Jaccard", "chance", "of A", "chance", "of B", "chance"), rows, n_words=2))
    else:
        (pair,) = comparisons
        print(f"A {pair.first}: {pair.total.first:,} active elements\nB {pair.second}: {pair.total.second:,}")
        parts = {PART_LABELS[part]: overlap for part, overlap in pair.parts.items()}
        print("\n" + _table("part", {"all": pair.total, **parts}))
        print("\n" + _table("layer", {layer_label(layer): overlap for layer, overlap in pair.layers.items()}))
    for pair in comparisons if per_tensor else ():
        print(f"\nA {pair.first}, B {pair.second}\n{_table('tensor', pair.tensors)}")


def _table(of: str, overlaps: Mapping[str, Overlap]) -> str:
    rows = [(name, f"{o.both:,}", *_cells(o)) for name, o in overlaps.items()]
    return table((of, "in both", "Jaccard", "chance", "of A", "chance", "of B", "chance"), rows)


def _cells(o: Overlap) -> list[str]:
    values = (o.jaccard, o.jaccard_chance, o.of_first, o.of_first_chance, o.of_second, o.of_second_chance)
    # NaN, the only value that is unequal to itself: a mask has no active element in this part.
    return ["-" if value != value else f"{value:.4f}" for value in values]
