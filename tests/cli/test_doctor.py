from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

from sparse_opt import backends


def report_of(outcome):
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_json_covers_every_backend_device_and_op(sparse_opt, monkeypatch):
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
        assert list(auto) == list(backends.OPS)
        assert all(report["backends"][device][entry["backend"]]["available"] for entry in auto.values())
        assert report["in_force"][device]["ops"] == {op: entry["backend"] for op, entry in auto.items()}
    assert report["environment"]["SPARSE_OPT_BACKEND"] is None


def test_says_what_auto_passed_over_and_why(sparse_opt, monkeypatch):
    monkeypatch.setattr(backends, "native_module", lambda: (None, "no compiler was found"))
    report = report_of(sparse_opt("doctor", "--json"))
    assert report["extension"] == {"built": False, "cause": "no compiler was found", "build_info": None}
    for entry in report["auto"]["cpu"].values():
        assert entry == {
            "backend": "reference",
            "order": ["cpu", "reference"],
            "passed_over": {"cpu": "no compiler was found"},
        }
    outcome = sparse_opt("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    assert "indexed_adamw_       reference   cpu, reference" in outcome.out
    assert "not cpu: no compiler was found" in outcome.out


def test_variable_in_force_is_shown_also_when_it_cannot_run(sparse_opt, monkeypatch):
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "reference")
    in_force = report_of(sparse_opt("doctor", "--json"))["in_force"]["cpu"]
    assert in_force == {"ops": dict.fromkeys(backends.OPS, "reference"), "cause": ""}
    assert "SPARSE_OPT_BACKEND=reference on cpu tensors: in force for every op" in sparse_opt("doctor").out
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "cuda")
    in_force = report_of(sparse_opt("doctor", "--json"))["in_force"]["cpu"]
    assert in_force["ops"] is None
    assert "'cuda' (SPARSE_OPT_BACKEND) cannot run" in in_force["cause"]
    assert "SPARSE_OPT_BACKEND=cuda on cpu tensors: backend 'cuda'" in sparse_opt("doctor").out


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
        assert "torch        MISSING" in outcome.out
        assert "pip install torch" in outcome.out


def _properties(index):
    major, minor = torch.cuda.get_device_capability(index)
    return SimpleNamespace(name=torch.cuda.get_device_name(index), major=major, minor=minor, total_memory=2**34)


@pytest.fixture
def three_gpus(monkeypatch):
    """Two A100 and a T4, and a binary for the A100 and the H100."""
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)
    backends.compute_capability.cache_clear()
    gpus = [("A100", (8, 0)), ("T4", (7, 5)), ("A100", (8, 0))]
    info = {"cuda": True, "cuda_missing": "", "arch_list": "8.0;9.0a", "arch_notes": "9.0 is built as 9.0a"}
    monkeypatch.setattr(backends, "native_module", lambda: (SimpleNamespace(build_info=lambda: info), ""))
    kernels = SimpleNamespace(interpreted=lambda: False)
    monkeypatch.setattr(backends, "triton_module", lambda: (kernels, ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index][1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", _properties)
    yield
    backends.compute_capability.cache_clear()


def test_every_gpu_has_its_own_answer(sparse_opt, three_gpus):
    report = report_of(sparse_opt("doctor", "--json"))
    cause = "T4 has compute capability 7.5, the CUDA kernels need 8.0 or newer"
    assert list(report["backends"]) == list(report["auto"]) == ["cpu", "cuda:0", "cuda:1", "cuda:2"]
    found = {device: backends["cuda"] for device, backends in report["backends"].items() if device != "cpu"}
    runs = {"available": True, "cause": ""}
    assert found == {"cuda:0": runs, "cuda:1": {"available": False, "cause": cause}, "cuda:2": runs}
    taken = {device: {entry["backend"] for entry in auto.values()} for device, auto in report["auto"].items()}
    assert taken == {"cpu": {"cpu"}, "cuda:0": {"cuda"}, "cuda:1": {"triton"}, "cuda:2": {"cuda"}}
    assert report["auto"]["cuda:1"]["indexed_swap_"]["passed_over"] == {"cuda": cause}
    assert report["in_force"]["cuda:1"]["ops"]["indexed_swap_"] == "triton"
    assert report["extension"]["build_info"]["arch_notes"] == "9.0 is built as 9.0a"
