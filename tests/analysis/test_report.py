"""The HTML page, read as a browser reads it: it requests nothing, and its links, plots and numbers are right."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
import torch

from sparse_opt.analysis import measure_ranks, measure_sparsity, sum_changes

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")

from sparse_opt.analysis.report import build_report

EMPTY = {"meta", "img", "link", "br"}  # elements without an end tag


class Page(HTMLParser):
    """The tags of a page, its addresses, the content of its tables by caption, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[str] = []
        self.policy = ""
        self._caption = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in EMPTY:
            self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.addresses += [found[key] for key in ("src", "href", "action", "data", "srcset") if key in found]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
        if tag in ("td", "th"):
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "caption":
            self._caption += data
        elif inside in ("td", "th"):
            self.tables[self._caption][-1][-1] += data
        elif inside == "script":
            self.scripts.append(data)


@pytest.fixture
def log(make_log, random_states):
    return make_log(random_states(torch.float32))


def test_the_page_requests_nothing(log):
    text = build_report(log)
    page = Page(text)
    assert page.policy.startswith("default-src 'none'; img-src data:;")
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy  # else browsers do not run it
    assert "url(" not in text and "@import" not in text
    links = [address for address in page.addresses if not address.startswith("data:")]
    assert [link.removeprefix("#") for link in links] == page.ids == ["sparsity", "coverage", "ranks", "shapes"]
    prefix = "data:image/svg+xml;base64,"
    pictures = [base64.b64decode(a.removeprefix(prefix)) for a in page.addresses if a.startswith("data:")]
    assert len(pictures) == 5
    for picture in pictures:
        namespaces = re.findall(r"(\S*)=\"\w+://[^\"]*\"", picture.decode())
        assert set(namespaces) <= {"xmlns", "xmlns:xlink"}
        assert picture.count(b"://") == len(namespaces)  # and in no text, style or document type
        assert re.findall(rb"href=\"(?!#|data:)|url\([^#]", picture) == []


def test_tables_have_the_measured_numbers(log):
    text = build_report(log, tolerances=[1e-5])
    tables = Page(text).tables
    totals = [sum_changes(step.stored.values()) for step in measure_sparsity(log, tolerances=[1e-5])]
    (density,) = (rows for title, rows in tables.items() if title.startswith("density of the update by step, in the"))
    assert density[0] == ["step", "bits", "> 1e-5", "flips"]
    for row, step, total in zip(density[1:], (10, 20, 30), totals, strict=True):
        shares = (total.share, total.shares_above[0], total.share_flipped)
        assert row == [str(step), *(f"{100 * share:.3f} %" for share in shares)]
    (sparsity,) = (rows for title, rows in tables.items() if title.startswith("sparsity of the update by step, in the"))
    assert sparsity[3][1] == f"{100 * (1 - totals[2].share):.3f} %" in text
    (matrices,) = (rows for title, rows in tables.items() if title.startswith("rank and size"))
    found = measure_ranks(log)[30]
    column = matrices[0].index("effective rank")
    assert {row[0]: row[column] for row in matrices[1:]} == {
        name: f"{s.effective_rank:.4g}" for name, s in found.items()
    }


def test_names_in_a_log_are_shown_and_not_run(make_log):
    name = "<script>alert(1)</script>.weight"
    text = build_report(make_log([{name: torch.zeros(2, 2)}, {name: torch.ones(2, 2)}]))
    assert len(Page(text).scripts) == 1
    assert "&lt;script&gt;alert(1)" in text


def test_parts_can_be_left_out(log):
    assert Page(build_report(log, taus=(), rank_tau=None)).ids == ["sparsity", "shapes"]
