"""The tables of launch sizes: those of the package, and files of measured ones, whole and damaged."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sparse_opt.errors import TuningError
from sparse_opt.tuning import ALLOWED, H200, SM_90, Tuning, builtin, files, why_invalid

CHECKOUT = Path(__file__).parents[2]
KEY = files.Key("NVIDIA A100-SXM4-80GB", "8.0", "2.13.0+cu130", "3.7.0", "0.1.0")
TABLE = replace(Tuning(), triton_step_slots=1024, cuda_encode_blocks=3)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sparse-opt/tuning"


def test_only_an_h200_has_what_was_measured_on_one():
    assert builtin("NVIDIA H200", "9.0") == (H200, "built-in for the H200")
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"):
        assert builtin(name, "9.0") == (
            SM_90,
            "built-in for compute capability 9.0, otherwise the conservative default",
        )
    for name, capability in (("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA B200", "10.0"), ("AMD Instinct MI250X", "")):
        assert builtin(name, capability) == (Tuning(), "conservative default")
    memory_of_the_gpu = ("scattered", "blocks", "slots", "elements")
    differing = [name for name, value in asdict(H200).items() if value != getattr(SM_90, name)]
    assert all(any(word in name for word in memory_of_the_gpu) for name in differing)


@pytest.mark.parametrize("table", [Tuning(), SM_90, H200], ids=["default", "sm_90", "h200"])
def test_the_tables_have_allowed_values(table):
    assert why_invalid(asdict(table)) == ""


def test_each_backend_has_the_entries_and_defaults_of_its_sources():
    """What Triton's launchers and the CUDA header use where no table was set."""
    source = (CHECKOUT / "triton_kernels/launch.py").read_text()
    of_triton = source[source.index("class Tuning(") : source.index("_DEFAULT")]
    assert {k: int(v) for k, v in re.findall(r"^    (\w+): int = (\d+)$", of_triton, re.M)} == Tuning().of("triton")
    header = (CHECKOUT / "csrc/kernels/cuda/tuning.h").read_text()
    assert {k: int(v) for k, v in re.findall(r"std::atomic<int> (\w+)\{(\d+)\};", header)} == Tuning().of("cuda")
    assert len(Tuning().of("triton")) + len(Tuning().of("cuda")) == len(ALLOWED)


def test_a_saved_table_is_read_back(cache):
    assert files.load(KEY) is None
    assert files.choose(KEY) == files.Chosen(Tuning(), "conservative default")
    path = files.save(KEY, TABLE, [{"entry": "triton_step_slots", "value": 1024, "ms": 1.5}])
    assert path.parent == cache
    saved = files.load(KEY)
    assert (saved.tuning, saved.path) == (TABLE, path)
    assert files.choose(KEY) == files.Chosen(TABLE, f"tuned on {saved.date} ({path})")
    assert json.loads(path.read_text())["measurements"] == [{"entry": "triton_step_slots", "value": 1024, "ms": 1.5}]


@pytest.mark.parametrize("name", ["torch", "triton", "sparse_opt"])
def test_a_table_of_other_versions_is_not_used_and_named(name):
    path = files.save(replace(KEY, **{name: "0.0.1"}), TABLE, [])
    chosen = files.choose(KEY)
    assert chosen.tuning == Tuning()
    assert chosen.warning == f"{path} was measured with other versions and is not used: {files.AGAIN}"


@pytest.mark.parametrize("other", [{"device": "NVIDIA A100-PCIE-40GB"}, {"compute_capability": "9.0"}])
def test_another_gpu_has_another_table(other):
    files.save(replace(KEY, **other), TABLE, [])
    assert files.choose(KEY) == files.Chosen(Tuning(), "conservative default")


def damaged(content: dict) -> dict[str, str]:
    """What is in a damaged file -> what the error says."""
    without = {k: v for k, v in content["tuning"].items() if k != "triton_step_slots"}
    return {
        "": "Expecting value",
        json.dumps(content)[:-20]: "",
        "[1]": "it has no key, tuning and date",
        json.dumps({**content, "tuning": None}): "it has no key, tuning and date",
        json.dumps({**content, "tuning": without}): "it has no entry triton_step_slots",
        json.dumps({**content, "tuning": {**content["tuning"], "slots": 1}}): "entry slots is unknown",
        json.dumps({**content, "tuning": {**content["tuning"], "cuda_encode_blocks": 4}}): "is 4, expected one of 1, 2",
        json.dumps({**content, "tuning": {**content["tuning"], "cuda_encode_blocks": True}}): "is True, expected",
        json.dumps({**content, "tuning": {**content["tuning"], "cuda_encode_blocks": "3"}}): "is '3', expected",
        json.dumps(
            {**content, "key": {**content["key"], "torch": "2.10.0"}}
        ): "it is for torch '2.10.0', expected '2.1",
    }


def test_a_damaged_table_raises_and_names_its_file():
    path = files.save(KEY, TABLE, [])
    for text, why in damaged(json.loads(path.read_text())).items():
        path.write_text(text)
        with pytest.raises(TuningError) as raised:
            files.choose(KEY)
        assert str(path) in str(raised.value), text
        assert why in str(raised.value), text
        assert "delete the file, or run `sparse-opt bench kernels --tune` again" in str(raised.value)
        assert "\n" not in str(raised.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TuningError, match="cannot be used"):
        files.choose(KEY)
    path.unlink()
    path.mkdir()
    with pytest.raises(TuningError, match="Is a directory"):
        files.choose(KEY)


def test_a_table_that_cannot_be_written_raises(cache):
    cache.parent.parent.joinpath("sparse-opt").write_text("a file in the place of the folder")
    assert files.why_unwritable()
    with pytest.raises(TuningError, match=r"was not saved in .*NVIDIA-A100"):
        files.save(KEY, TABLE, [])


def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert files.folder() == tmp_path / ".cache/sparse-opt/tuning"
