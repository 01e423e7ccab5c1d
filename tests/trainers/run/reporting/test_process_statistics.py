"""Columns of a step's metrics that describe its processes, and the utilization of a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sparse_opt.integrations.trl.memory import gpu_utilization, process_statistics
from sparse_opt.trainers.run.reporting.process_statistics import statistics_columns

GPU = torch.device("cuda", 0)


class NVMLError(Exception):
    """As pynvml's."""


@pytest.fixture
def pynvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError))


@pytest.mark.usefixtures("pynvml")
@pytest.mark.parametrize("error", [NVMLError("Not Supported"), RuntimeError("driver"), ModuleNotFoundError("pynvml")])
def test_the_utilization_of_a_gpu_is_absent_where_it_cannot_be_read(monkeypatch, error):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: {GPU: 87}[device])
    assert gpu_utilization(GPU) == 87

    def fail(device):
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert gpu_utilization(GPU) is None


def test_the_utilization_of_a_gpu_needs_nvidia_ml_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: pytest.fail("was read"))
    assert gpu_utilization(GPU) is None


def test_columns_of_several_gpus_and_of_one():
    def of(memory, peak, reserved, utilization, host):
        sizes = {"memory_bytes": memory, "peak_memory_bytes": peak, "reserved_memory_bytes": reserved}
        return sizes | {"gpu_utilization_percent": utilization, "peak_host_memory_bytes": host}

    of_ranks = [of(5, 7, 8, 90, 3), of(4, 9, 9, 95, 2)]
    one_gpu = {name: value for name, value in of_ranks[0].items() if name != "peak_host_memory_bytes"}
    assert statistics_columns(of_ranks[:1]) == one_gpu
    assert statistics_columns(of_ranks) == {
        "memory_bytes": 5,
        "peak_memory_bytes": 9,
        "reserved_memory_bytes": 9,
        "gpu_utilization_percent": 92.5,
        **{f"rank0/{name}": value for name, value in of_ranks[0].items()},
        **{f"rank1/{name}": value for name, value in of_ranks[1].items()},
    }


def test_a_process_on_a_cpu_has_its_peak_memory_only():
    found = process_statistics(torch.device("cpu"))
    assert found.keys() == {"peak_host_memory_bytes"} and found["peak_host_memory_bytes"] > 2**20
    assert statistics_columns([found]) == {}
