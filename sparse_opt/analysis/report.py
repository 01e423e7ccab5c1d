"""Builds a self-contained HTML report of all analyses, with embedded plots."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..delta.state_log import StateLog
from . import plots
from .coverage import TAUS, Coverage, measure_coverage
from .ranks import TAU, RankStats, measure_ranks
from .records import (
    change_profile,
    change_tables,
    coverage_tables,
    rank_summary,
    rank_table,
    shape_sums,
    shape_table,
)
from .shapes import WeightShape, weight_shapes
from .sparsity import TOLERANCES, StepChanges, measure_sparsity, sum_changes
from .spectrum import LOWRANK_K, Method
from .states import DEVICE_CPU, Progress, no_progress
from .tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """An image as a data URL, and its alternative text."""

    address: str
    text: str


@dataclass(frozen=True)
class Section:
    """A heading and its content; tables in `folded` are collapsed until they are opened."""

    title: str
    key: str
    note: str
    pictures: Sequence[Picture]
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
    k: int = LOWRANK_K,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    device: torch.device = DEVICE_CPU,
    progress: Callable[[str], Progress] = lambda _: no_progress,
) -> str:
    """Build the page, as a complete HTML document.

    Args:
        steps: as in `measure_sparsity`; ranks are of the last of them.
        taus: of coverage; none leaves coverage out.
        rank_tau: of the ranks' share; None leaves ranks out.
        progress: name of the analysis -> `Progress`.
        others: as in `measure_sparsity`, `measure_coverage`, `measure_ranks`.

    Raises:
        DataError, DeltaLogError: as these.
    """
    from jinja2 import Environment, StrictUndefined

    choice: dict[str, Any] = {"include": include, "exclude": exclude, "mlp_only": mlp_only, "device": device}
    found = measure_sparsity(log, steps, tolerances=tolerances, progress=progress("sparsity"), **choice)
    sections = [_sparsity_section(found, tolerances)]
    if taus:
        sections.append(
            _coverage_section(measure_coverage(log, steps, taus=taus, progress=progress("coverage"), **choice))
        )
    last = found[-1]
    if rank_tau is not None:
        stats = measure_ranks(log, last.step, tau=rank_tau, method=method, k=k, progress=progress("ranks"), **choice)
        sections.append(_rank_section(stats, rank_tau, last.step))
    sections.append(
        _shape_section(
            weight_shapes({spec.name: spec.shape for spec in log.layout.tensors if spec.name in last.stored})
        )
    )
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
    return environment.from_string(TEMPLATE).render(
        title=f"Update analysis of {facts['source']}", facts=facts, sections=sections, version=__version__
    )


def _sparsity_section(found: Sequence[StepChanges], tolerances: Sequence[float]) -> Section:
    last = found[-1]
    pictures = [_picture("density by step", plots.density_figure(found, tolerances))]
    for precision in last.by_precision:
        pictures.append(_picture(f"density by layer, {precision}", plots.layer_figure(last, precision)))
    return Section(
        "Sparsity of the update",
        "sparsity",
        "Density is the share of elements that changed since the base, sparsity 100 % minus it. 'bits': elements whose "
        "bits differ; '> T': elements that moved by more than T, subtracted in fp32; 'flips': elements whose sign "
        "changed.",
        pictures,
        [*change_tables(found, tolerances), *change_profile(last, tolerances, "component")],
        [*change_profile(last, tolerances, "layer"), *change_profile(last, tolerances, "tensor")],
    )


def _coverage_section(covered: Coverage) -> Section:
    return Section(
        "Coverage of the final active set",
        "coverage",
        "An element is active at step t if |W_t - W_0| > tau. Coverage at t is the share of the elements active at the "
        "last step that are active at t; density at t is the share of all elements that are active at t.",
        [
            _picture("coverage by step", plots.coverage_figure(covered)),
            _picture("global density by step", plots.coverage_density_figure(covered)),
        ],
        coverage_tables(covered),
    )


def _rank_section(stats: Mapping[str, RankStats], tau: float, step: int) -> Section:
    return Section(
        "Ranks of the update",
        "ranks",
        "Of the singular values s of each weight matrix's change: classical rank, how many are above max(m, n) "
        "eps(fp32) s_1; effective rank, exp(-sum p ln p) with p = s / sum(s); stable rank, sum(s^2) / s_1^2. Curves "
        "are means over the matrices of a component in a layer.",
        [_picture("ranks by layer", plots.rank_figure(stats, tau, step))],
        [rank_summary(stats)],
        [rank_table(stats, tau)],
    )


def _shape_section(weights: Sequence[WeightShape]) -> Section:
    return Section(
        "Weights",
        "shapes",
        "The compared tensors; tied ones are listed once.",
        [_picture("elements by component", plots.shape_figure(weights, "Weights by component"))],
        [shape_sums(weights)],
        [shape_table(weights)],
    )


def _picture(text: str, figure: Figure) -> Picture:
    data = base64.b64encode(plots.as_svg(figure)).decode("ascii")
    return Picture(f"data:image/svg+xml;base64,{data}", text)


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 0 auto;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-bottom: .2rem; border-bottom: 1px solid #bbb; }
p.note { max-width: 60rem; }
nav a { margin-right: 1.2rem; color: #0b4a82; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { color: #555; }
dd { margin: 0; overflow-wrap: anywhere; }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
caption { text-align: left; color: #333; padding: .3rem 0; font-size: 14px; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #e2e2e2; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #777; }
th.text, td.text { text-align: left; }
summary { cursor: pointer; color: #0b4a82; }
footer { margin-top: 3rem; color: #555; font-size: 13px; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<dl>
{% for name, value in facts.items() %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
<nav>{% for section in sections %}<a href="#{{ section.key }}">{{ section.title }}</a>{% endfor %}</nav>
{% macro show(table) %}
<div class="wide"><table>
<caption>{{ table.title }}</caption>
<thead><tr>{% for c in table.headings %}
<th scope="col"{% if table.is_text[loop.index0] %} class="text"{% endif %}>{{ c }}</th>
{%- endfor %}</tr></thead>
<tbody>
{% for row in table.texts %}
<tr>{% for cell in row %}<td{% if table.is_text[loop.index0] %} class="text"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endmacro %}
{% for section in sections %}
<section id="{{ section.key }}">
<h2>{{ section.title }}</h2>
<p class="note">{{ section.note }}</p>
{% for picture in section.pictures %}
<img src="{{ picture.address }}" alt="{{ picture.text }}">
{% endfor %}
{% for table in section.tables %}
{{ show(table) }}
{% endfor %}
{% for table in section.folded %}
<details><summary>{{ table.title }}</summary>
{{ show(table) }}
</details>
{% endfor %}
</section>
{% endfor %}
<footer>sparse-opt {{ version }}</footer>
</body>
</html>
"""
