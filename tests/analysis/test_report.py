"""The HTML page: it requests nothing, and its links and plots are there."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")

from sparse_opt.analysis.report import build_report

SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@pytest.fixture
def log(make_log, random_states):
    return make_log(random_states(torch.float32))


def test_the_page_requests_nothing(log):
    text = build_report(log)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy"\s+content="(.*?)"', text)
    assert policy.startswith("default-src 'none'; img-src data:;")
    (script,) = SCRIPT.findall(text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy  # else browsers do not run it
    assert "url(" not in text and "@import" not in text
    addresses = re.findall(r'\b(?:src|href|action|data|srcset)="(.*?)"', text)
    links = [address for address in addresses if not address.startswith("data:")]
    ids = re.findall(r'\bid="(.*?)"', text)
    assert [link.removeprefix("#") for link in links] == ids == ["sparsity", "coverage", "ranks", "shapes"]
    prefix = "data:image/svg+xml;base64,"
    pictures = [base64.b64decode(a.removeprefix(prefix)) for a in addresses if a.startswith("data:")]
    assert len(pictures) == 5
    for picture in pictures:
        namespaces = re.findall(r"(\S*)=\"\w+://[^\"]*\"", picture.decode())
        assert set(namespaces) <= {"xmlns", "xmlns:xlink"}
        assert picture.count(b"://") == len(namespaces)  # and in no text, style or document type
        assert re.findall(rb"href=\"(?!#|data:)|url\([^#]", picture) == []


def test_names_in_a_log_are_shown_and_not_run(make_log):
    name = "<script>alert(1)</script>.weight"
    text = build_report(make_log([{name: torch.zeros(2, 2)}, {name: torch.ones(2, 2)}]))
    assert len(SCRIPT.findall(text)) == 1
    assert "&lt;script&gt;alert(1)" in text
