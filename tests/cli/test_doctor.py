import importlib.util
import json

import pytest
import torch

from sparse_opt import backends


def report_of(outcome):
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_json_covers_every_backend_and_device(sparse_opt, monkeypatch):
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)
    report = report_of(sparse_opt("doctor", "--json"))
    assert report["torch"]["version"] == torch.__version__
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    assert list(report["backends"]) == ["cpu", *(gpus or ["cuda"])]
    for found in report["backends"].values():
        assert set(found) == set(backends.BACKENDS)
        # Either it runs, or there is a cause; never both, never neither.
        assert all(entry["available"] == (entry["cause"] == "") for entry in found.values())
    assert report["backends"]["cpu"]["reference"]["available"]
    for device, auto in report["auto"].items():
        assert report["backends"][device][auto["backend"]]["available"]
    assert report["environment"]["SPARSE_OPT_BACKEND"] is None


def test_says_what_auto_passed_over_and_why(sparse_opt, monkeypatch):
    monkeypatch.setattr(backends, "native_module", lambda: (None, "no compiler was found"))
    report = report_of(sparse_opt("doctor", "--json"))
    assert report["extension"] == {"built": False, "cause": "no compiler was found", "build_info": None}
    assert report["auto"]["cpu"] == {"backend": "reference", "order": ["cpu", "reference"]}
    assert report["backends"]["cpu"]["cpu"] == {"available": False, "cause": "no compiler was found"}
    text = sparse_opt("doctor").done()
    assert "no compiler was found" in text
    assert "auto on cpu tensors: reference, the first that runs of cpu, reference" in text


def test_variable_in_force_is_shown_also_when_it_cannot_run(sparse_opt, monkeypatch):
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "reference")
    assert "SPARSE_OPT_BACKEND=reference on cpu tensors: in force" in sparse_opt("doctor").out
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "cuda")
    assert "SPARSE_OPT_BACKEND=cuda on cpu tensors: it runs on cuda tensors" in sparse_opt("doctor").out


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_variable_that_names_no_backend_fails_after_the_report(sparse_opt, monkeypatch, flags):
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "fastest")
    outcome = sparse_opt("doctor", *flags)
    assert outcome.code == 1
    assert torch.__version__ in outcome.out
    assert outcome.err.count("\n") == 1
    assert "backend 'fastest' (SPARSE_OPT_BACKEND) cannot run: no backend has this name" in outcome.err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_without_torch_it_says_so(sparse_opt, monkeypatch, flags):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    outcome = sparse_opt("doctor", *flags)
    assert (outcome.code, outcome.err) == (0, "")
    if flags:
        assert "torch" not in json.loads(outcome.out)
    else:
        assert "pip install torch" in outcome.out
