"""Builds a self-contained HTML report of all analyses, with embedded plots, from the template `report.html`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    Coverage,
    StepChanges,
    measure_coverage,
    measure_sparsity,
    sum_changes,
)
from .ranks import TAU, Method, RankStats, measure_ranks
from .records import (
    Table,
    change_tables,
    coverage_tables,
    rank_summaries,
    rank_table,
    shape_records,
    shape_tables,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Section:
    """A heading and its content; tables in `folded` are collapsed until they are opened."""

    title: str
    key: str
    note: str
    pictures: Mapping[str, str]  # alternative text -> data URL
    tables: Sequence[Table]
    folded: Sequence[Table] = ()


def build_report(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    tolerances: Sequence[float] = TOLERANCES,
    taus: Sequence[float] = TAUS,
    rank_tau: float | None = TAU,
    method: Method = "exact",
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
    sections = [_sparsity_section(found, tolerances)]
    if taus:
        sections.append(_coverage_section(measure_coverage(log, steps, taus=taus, names=names, device=device)))
    if rank_tau is not None:
        stats = measure_ranks(log, [last.step], tau=rank_tau, method=method, names=names, device=device)
        sections.append(_rank_section(stats, rank_tau, method))
    weights = shape_records({spec.name: spec.shape for spec in log.layout.tensors if spec.name in last.stored})
    by_component, by_weight = shape_tables(weights)
    note = "The compared tensors; tied ones are listed once."
    sections.append(Section("Weights", "shapes", note, {}, [by_component], [by_weight]))
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
    template = environment.from_string(files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    return template.render(
        title=f"Update analysis of {facts['source']}",
        facts=facts,
        sections=sections,
        version=__version__,
    )


def _sparsity_section(found: Sequence[StepChanges], tolerances: Sequence[float]) -> Section:
    last = found[-1]
    pictures = {"density by step": _data_url(plots.density_figure(found, tolerances))}
    for precision in last.by_precision:
        pictures[f"density by layer, {precision}"] = _data_url(plots.layer_figure(last, precision))
    return Section(
        "Sparsity of the update",
        "sparsity",
        "Density is the share of elements that changed since the base, sparsity 100 % minus it. 'bits': elements whose "
        "bits differ; '> T': elements that moved by more than T, subtracted in fp32; 'flips': elements whose sign "
        "changed.",
        pictures,
        [*change_tables(found, tolerances), *change_tables(found, tolerances, "component")],
        [*change_tables(found, tolerances, "layer"), *change_tables(found, tolerances, "tensor")],
    )


def _coverage_section(covered: Coverage) -> Section:
    return Section(
        "Coverage of the final active set",
        "coverage",
        "An element is active at step t if |W_t - W_0| > tau. Coverage at t is the share of the elements active at the "
        "last step that are active at t; density at t is the share of all elements that are active at t.",
        {"coverage and density by step": _data_url(plots.coverage_figure(covered))},
        coverage_tables(covered),
    )


def _rank_section(found: Mapping[int, Mapping[str, RankStats]], tau: float, method: Method) -> Section:
    ((step, stats),) = found.items()
    return Section(
        "Ranks of the update",
        "ranks",
        "Of the singular values s of each weight matrix's change: classical rank, how many are above max(m, n) "
        "eps(fp32) s_1; effective rank, exp(-sum p ln p) with p = s / sum(s); stable rank, sum(s^2) / s_1^2. Cells "
        "are means over the matrices of a part in a layer.",
        {"ranks by layer": _data_url(plots.rank_figure(stats, tau, step))},
        rank_summaries(found),
        [rank_table(found, tau, method)],
    )


def _data_url(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(plots.as_svg(figure)).decode("ascii")
