"""Builds a self-contained HTML report of all analyses, with embedded plots, from the template `report.html`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from .. import __version__
from ..delta.state_log import StateLog
from . import plots
from .changes import (
    DEVICE_CPU,
    TAUS,
    TOLERANCES,
    measure_coverage,
    measure_sparsity,
    sum_changes,
)
from .ranks import TAU, measure_ranks
from .records import (
    LEVELS,
    change_tables,
    coverage_tables,
    rank_summaries,
    rank_table,
    shape_records,
    shape_tables,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def build_report(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    tolerances: Sequence[float] = TOLERANCES,
    taus: Sequence[float] = TAUS,
    rank_tau: float | None = TAU,
    names: Sequence[str] | None = None,
    device: torch.device = DEVICE_CPU,
) -> str:
    """Build the page, as a complete HTML document.

    Args:
        steps: as in `measure_sparsity`; ranks are of the last of them.
        taus: of coverage; none leaves coverage out.
        rank_tau: of the ranks' share; None leaves ranks out.
        others: as in `measure_sparsity`, `measure_coverage`, `measure_ranks`.

    Raises:
        DataError, DeltaLogError: as these.
    """
    from jinja2 import Environment, StrictUndefined

    found = measure_sparsity(log, steps, tolerances=tolerances, names=names, device=device)
    last = found[-1]
    # Section of the template -> pictures by their alternative text, tables, and tables that are collapsed.
    pictures = {"density by step": plots.density_figure(found, tolerances)}
    for precision in last.by_precision:
        pictures[f"density by layer, {precision}"] = plots.layer_figure(last, precision)
    by_step, by_component, *others = (change_tables(found, tolerances, level) for level in LEVELS)
    sections = {"sparsity": (pictures, [*by_step, *by_component], [table for tables in others for table in tables])}
    if taus:
        covered = measure_coverage(log, steps, taus=taus, names=names, device=device)
        pictures = {"coverage and density by step": plots.coverage_figure(covered)}
        sections["coverage"] = pictures, coverage_tables(covered), []
    if rank_tau is not None:
        stats = measure_ranks(log, [last.step], tau=rank_tau, names=names, device=device)
        pictures = {"ranks by layer": plots.rank_figure(stats[last.step], rank_tau, last.step)}
        sections["ranks"] = pictures, rank_summaries(stats), [rank_table(stats, rank_tau)]
    shapes = {spec.name: spec.shape for spec in log.layout.tensors if spec.name in last.stored}
    by_component, by_weight = ([table] for table in shape_tables(shape_records(shapes)))
    sections["shapes"] = {}, by_component, by_weight
    total = sum_changes(last.stored.values())
    facts = {
        "source": str(log.directory),
        "model": log.metadata.get("model", "not known"),
        "steps": f"{len(found)} compared with step {log.steps[0]}, the last is {last.step}",
        "weights": f"{total.numel:,} elements in {len(last.stored)} tensors",
        f"density at step {last.step}": f"{100 * total.share:.3f} % of the elements have other bits than the base",
        f"sparsity at step {last.step}": f"{100 * (1 - total.share):.3f} % have the same",
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_url"] = _data_url
    template = environment.from_string(files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    return template.render(
        title=f"Update analysis of {facts['source']}",
        facts=facts,
        sections=sections,
        version=__version__,
    )


def _data_url(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(plots.as_svg(figure)).decode("ascii")
