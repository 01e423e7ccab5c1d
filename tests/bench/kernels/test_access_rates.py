"""The rates of scattered writes: the probe's output, the rates between its rows, and why there may be none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sparse_opt.bench.kernels import access_rates, bounds
from sparse_opt.bench.kernels.access_rates import AccessRates, NotMeasured, measure, parse
from sparse_opt.bench.kernels.table import main as kernels
from sparse_opt.bench.kernels.table import targets

PROBE = Path(__file__).parents[3] / access_rates.PROBE
# As the probe prints them; the rates are those of an H200 in docs/dev/notebook.md.
PRINTED = """[
{"unit_bytes": 32, "share": 0.024999, "read_gb_per_s": 1336.0, "write_gb_per_s": 803.0, "read_write_gb_per_s": 996.0, \
"part_gb_per_s": 868.0},
{"unit_bytes": 64, "share": 0.025002, "read_gb_per_s": 2295.0, "write_gb_per_s": 1501.0, "read_write_gb_per_s": 1887.0,\
 "part_gb_per_s": 1715.0},
{"unit_bytes": 32, "share": 0.330010, "read_gb_per_s": 2520.0, "write_gb_per_s": 1560.0, "read_write_gb_per_s": 1890.0,\
 "part_gb_per_s": 1630.0}
]
"""
RATES = AccessRates(
    4000e9, {32: [(0.02, 800e9), (0.1, 1000e9), (0.5, 2000e9)], 64: [(0.1, 1500e9), (0.2, 2500e9)], 256: [(0.1, 3e12)]}
)


def test_the_output_of_the_probe_is_read():
    rows = parse(PRINTED)
    assert [row["read_gb_per_s"] for row in rows] == [1336, 2295, 2520]
    rates = AccessRates.of(4260e9, rows)
    assert rates == (4260e9, {32: [(0.024999, 803e9), (0.330010, 1560e9)], 64: [(0.025002, 1501e9)]})
    assert AccessRates.of(4260e9, rows[::-1]) == rates


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("", "Expecting value"),
        ("   unit  share      read", "Expecting value"),
        ("[]", "expected a JSON array of rows"),
        ('{"unit_bytes": 32}', "expected a JSON array of rows"),
        ("[3]", "unit_bytes is None in 3, expected a positive number"),
        ('[{"unit_bytes": 32, "share": 0.1}]', "write_gb_per_s is None"),
        ('[{"unit_bytes": 32, "share": 0, "write_gb_per_s": 1}]', "share is 0 in"),
        ('[{"unit_bytes": 32, "share": 0.1, "write_gb_per_s": Infinity}]', "write_gb_per_s is inf in"),
        ('[{"unit_bytes": 32, "share": 0.1, "write_gb_per_s": NaN}]', "write_gb_per_s is nan in"),
    ],
)
def test_a_damaged_output_is_refused(printed, message):
    with pytest.raises(ValueError, match=message):
        parse(printed)


@pytest.mark.parametrize(
    ("unit", "share", "rate"),
    [
        (32, 0.02, 800e9),
        (32, 0.06, 900e9),
        (32, 0.1, 1000e9),
        (32, 0.3, 1500e9),
        (32, 0.5, 2000e9),
        (32, 0.001, 800e9),  # below the least share
        (32, 1.0, 2000e9),  # above the largest one
        (48, 0.06, 900e9),  # by the rates of 32 bytes
        (64, 0.15, 2000e9),
        (128, 0.15, 2000e9),
        (256, 0.7, 3e12),
        (4096, 0.7, 3e12),
        (16, 0.06, 900e9),  # smaller than all of them
    ],
)
def test_rates_are_interpolated_between_shares(unit, share, rate):
    assert RATES.write_rate(unit, share) == pytest.approx(rate)


def test_rates_that_were_not_measured_are_unknown():
    assert AccessRates(4000e9, {}).write_rate(32, 0.1) is None


def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that torch describes as an H200's second GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda:1")


def fake_nvcc(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """An nvcc in CUDA_HOME that logs its arguments to `words`, and runs the lines of a shell script.

    In the script, "$program" is the file to write.
    """
    path = folder / "bin" / "nvcc"
    path.parent.mkdir()
    words = f'echo "$*" > {folder}/words\nfor program; do :; done\n'
    path.write_text(f"#!/bin/sh\n{words}{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder))


def program(lines: str) -> str:
    return f'cat > "$program" <<"END"\n#!/bin/sh\n{lines}\nEND\nchmod +x "$program"'


def test_the_probe_is_compiled_for_the_gpu_and_run_on_it(monkeypatch, tmp_path):
    (tmp_path / "printed").write_text(PRINTED)
    fake_nvcc(monkeypatch, tmp_path, program(f'echo "$*" > {tmp_path}/run\ncat {tmp_path}/printed'))
    assert measure(gpu(monkeypatch), PROBE) == parse(PRINTED)
    compiled = (tmp_path / "words").read_text().split()
    assert "-arch=sm_90" in compiled and str(PROBE) in compiled
    assert not Path(compiled[-1]).exists()  # the program's temporary folder
    assert (tmp_path / "run").read_text().split() == ["--json", "--device", "1"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'nvcc warning: old' >&2; echo 'probe.cu(3): error: no such type' >&2; echo '1 error' >&2; exit 2",
            r"^nvcc ended with exit code 2: probe.cu\(3\): error: no such type$",
        ),
        ("exit 1", "^nvcc ended with exit code 1: no message$"),
        ("exit 0", "^scattered_access cannot be run: No such file or directory$"),
        (program("echo 'CUDA: out of memory' >&2; exit 1"), "ended with exit code 1: CUDA: out of memory$"),
        (program("echo nothing"), "^scattered_access: Expecting value"),
    ],
)
def test_a_probe_that_fails_has_a_reason(monkeypatch, tmp_path, script, message):
    fake_nvcc(monkeypatch, tmp_path, script)
    with pytest.raises(NotMeasured, match=message):
        measure(gpu(monkeypatch), PROBE)


def test_a_probe_that_does_not_end_has_a_reason(monkeypatch, tmp_path):
    fake_nvcc(monkeypatch, tmp_path, program("exec sleep 60"))
    monkeypatch.setattr(access_rates, "RUN_LIMIT_S", 0.2)
    with pytest.raises(NotMeasured, match="^scattered_access took more than 0 s$"):
        measure(gpu(monkeypatch), PROBE)


def test_without_nvcc_a_source_or_a_gpu_nothing_is_measured(monkeypatch, tmp_path):
    with pytest.raises(NotMeasured, match="^cpu is not an NVIDIA GPU$"):
        measure(torch.device("cpu"), PROBE)
    with pytest.raises(NotMeasured, match="missing.cu: no such file; .* or name it with --probe$"):
        measure(gpu(monkeypatch), tmp_path / "missing.cu")
    monkeypatch.setattr(access_rates, "nvcc", lambda: None)
    with pytest.raises(NotMeasured, match="^nvcc was not found"):
        measure(gpu(monkeypatch), PROBE)


def test_nvcc_is_that_of_cuda_home_before_that_on_path(monkeypatch, tmp_path):
    for name in ("home", "path"):
        folder = tmp_path / name / "bin"
        folder.mkdir(parents=True)
        (folder / "nvcc").write_text("#!/bin/sh\n")
        (folder / "nvcc").chmod(0o755)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"), prepend=os.pathsep)
    assert access_rates.nvcc() == str(tmp_path / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    assert access_rates.nvcc() == str(tmp_path / "path" / "bin" / "nvcc")


WORDS = ["--device", "cpu", "--delta_numel", "5000", "--n_rounds", "1", "--only", "deltas", "--json"]


def test_a_table_without_rates_says_why_and_counts_its_bounds_in_another_way(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    assert kernels.main([*WORDS, str(path)]) == 0
    found = json.loads(path.read_text())["kernels"]
    assert found["write_rates"] == "not measured: cpu is not an NVIDIA GPU"
    assert "\nwrite_rates: not measured: cpu is not an NVIDIA GPU\n" in capsys.readouterr().out
    assert found["floor_counting"] == bounds.COUNTING_WITHOUT_RATES
    applied = [row for row in found["rows"] if row["work"] == targets.APPLY]
    assert applied
    for row in applied:
        assert row["scattered_bytes"] > 0 and row["write_gb_per_s"] is None
        assert row["floor_ms"] == pytest.approx(row["bytes"] / (1e6 * found["copy_gb_per_s"]))
    units = {(verdict["work"], verdict["unit"]) for verdict in found["targets"]}
    assert (targets.APPLY, "x bound") not in units
    assert (targets.ENCODE, "of the copy rate") in units


def test_a_table_with_rates_has_bounds_of_both(tmp_path, capsys, monkeypatch):
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(access_rates, "measure", lambda device, probe: parse(PRINTED))
    assert kernels.main([*WORDS, str(path)]) == 0
    found = json.loads(path.read_text())["kernels"]
    assert "\nscattered writes, GB/s: 32 bytes 803 to 1560, 64 bytes 1501 to 1501\n" in capsys.readouterr().out
    assert found["floor_counting"] == bounds.COUNTING
    rates = AccessRates.of_report(found)
    assert rates.write == AccessRates.of(0.0, parse(PRINTED)).write
    for row in found["rows"]:
        scattered, copied = row["scattered_bytes"], row["bytes"] - row["scattered_bytes"]
        expected = copied / (1e6 * found["copy_gb_per_s"])
        if row["work"] == targets.APPLY:
            # 1 to 10 % of the elements are in 15 to 81 % of all sectors.
            assert 803 < row["write_gb_per_s"] <= 1560
            expected += scattered / (1e6 * row["write_gb_per_s"])
        else:
            assert (scattered, row["write_gb_per_s"]) == (0, None)
        assert row["floor_ms"] == pytest.approx(expected)
    assert any(verdict["work"] == targets.APPLY and verdict["unit"] == "x bound" for verdict in found["targets"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of CUDA 12.8 or newer, on PATH")
def test_the_probe_compiles(tmp_path):
    # Device code alone, unoptimized: the compiler reads the host's functions with it, and the rest takes two thirds of
    # the time.
    flags = ("-std=c++17", "-arch=sm_90", "-cubin", "--Ofast-compile=max", "-Werror=all-warnings")
    command = ["nvcc", *flags, str(PROBE), "-o", str(tmp_path / "probe.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
