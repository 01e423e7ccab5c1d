"""Counting bytes with Nsight Compute: its command line, and how its output is parsed. The counting needs a GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from sparse_opt.bench.common import harness
from sparse_opt.bench.kernels import dram_bytes

# As ncu 2025.3 writes it with --csv --print-units base; the lines before the table are its own.
LOG = """==PROF== Connected to process 411 (/usr/bin/python3)
==PROF== Disconnected from process 411
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","411","python3","127.0.0.1","spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","1,024"
"0","411","python3","127.0.0.1","spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","0"
"0","411","python3","127.0.0.1","spin_kernel(long)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","2,048"
"1","411","python3","127.0.0.1","void swap<unsigned short, int>(Args)","1","7","(256, 1, 1)","(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","3,600,000,000"
"1","411","python3","127.0.0.1","void swap<unsigned short, int>(Args)","1","7","(256, 1, 1)","(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","2,100,000,000"
"1","411","python3","127.0.0.1","void swap<unsigned short, int>(Args)","1","7","(256, 1, 1)","(9, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","1,500,000"
"2","411","python3","127.0.0.1","second_kernel","1","7","(256, 1, 1)","(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","64"
"2","411","python3","127.0.0.1","second_kernel","1","7","(256, 1, 1)","(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","32"
"2","411","python3","127.0.0.1","second_kernel","1","7","(256, 1, 1)","(9, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","500,000"
"""  # noqa: E501
CALL = {"op": "indexed_swap_", "backend": "cuda", "density": 0.025, "floor_bytes": 5.5e9}


def test_the_kernels_of_a_log():
    kernels = dram_bytes.parse(LOG)
    assert [kernel["kernel"] for kernel in kernels] == [
        "spin_kernel(long)",
        "void swap<unsigned short, int>(Args)",
        "second_kernel",
    ]
    assert kernels[1][dram_bytes.READ] == 3.6e9
    assert kernels[1][dram_bytes.WRITTEN] == 2.1e9
    assert kernels[1][dram_bytes.TIME] == 1.5e6


def test_a_call_is_the_sum_of_the_kernels_after_its_marker():
    (row,) = dram_bytes.counted([CALL], dram_bytes.parse(LOG))
    assert (row["n_kernels"], row["bytes_read"], row["bytes_written"]) == (2, 3_600_000_064, 2_100_000_032)
    assert row["ms"] == pytest.approx(2.0)
    line = dram_bytes.text({"rows": [row]}).splitlines()[-1].split()
    assert line == ["indexed_swap_", "cuda", "2.5%", "2", "3.600", "2.100", "5.700", "5.500", "1.04", "2.000"]


def test_a_marker_too_few_is_an_error():
    with pytest.raises(ValueError, match="saw 1 markers, expected one for each of 2 calls"):
        dram_bytes.counted([CALL, CALL], dram_bytes.parse(LOG))


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "no table in ncu's output, which begins with '==ERROR== ERR_NVGPUCTRPERM'"),
        (LOG.replace('"byte"', '"Gbyte"'), "is in 'Gbyte', expected 'byte'"),
        ("\n".join(LOG.splitlines()[:-1]), "second_kernel has no gpu__time_duration.sum"),
    ],
)
def test_a_log_without_the_counts_is_an_error(log, message):
    with pytest.raises(ValueError, match=message):
        dram_bytes.parse(log)


def test_ncu_leaves_the_clocks_alone_and_waits_for_the_profiled_region():
    words = dram_bytes.ncu_command(Path("log.csv"), ["python", "-m", "program"])
    assert words == [
        *("ncu", "--clock-control", "none", "--profile-from-start", "off", "--metrics"),
        "dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum",
        *("--print-units", "base", "--csv", "--log-file", "log.csv", "python", "-m", "program"),
    ]


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        dram_bytes.main(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu_or_without_ncu_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA GPU" in failed(capsys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ncu (Nsight Compute) is not on PATH" in failed(capsys)


@pytest.mark.parametrize("exit_code", [0, 1])
def test_the_counts_of_a_profiled_run_are_written(capsys, monkeypatch, tmp_path, exit_code):
    """Nsight Compute is replaced by a function that writes what it and the profiled process would write."""
    path = tmp_path / "dram_bytes.json"

    def ncu(command, **options):
        words = list(map(str, command))
        Path(words[words.index("--log-file") + 1]).write_text(LOG)
        Path(words[words.index("--profiled") + 1]).write_text(json.dumps([CALL]))
        assert words[words.index("-m") : words.index("-m") + 2] == ["-m", dram_bytes.MODULE]
        assert words[words.index("--numel") + 1] == "1000"
        assert words[words.index("--output") + 1] != str(path)
        return subprocess.CompletedProcess(command, exit_code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "environment", lambda device: {"device": device})
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", ncu)
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)
    assert dram_bytes.main(["--numel", "1000", "--output", str(path)]) == exit_code
    out, err = capsys.readouterr()
    if exit_code:
        assert "ncu ended with exit code 1: " in err and not path.exists()
        return
    (row,) = json.loads(path.read_text())["rows"]
    assert row["bytes_read"] == 3_600_000_064 and row["floor_bytes"] == CALL["floor_bytes"]
    assert "indexed_swap_" in out
